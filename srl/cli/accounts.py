"""`srl broker-acl`: users for a broker that others reach too."""

from pathlib import Path

import click

from srl.cli.options import DIRECTORY


@click.command("broker-acl")
@click.option(
    "--passwords",
    "directory",
    type=DIRECTORY,
    default=Path("broker-passwords"),
    show_default=True,
    help="With the files client, trainer, actor and viewer, each with a password; missing ones are made.",
)
def broker_acl(directory: Path) -> None:
    """Print an ACL file for a Redis or Valkey server, with one user for each role.

    Actors may read tasks and parameters, and add experience and heartbeats; nothing else. A viewer (of the dashboard)
    may only read. The file has hashes of
    passwords, not the passwords. See docs/security.md.

    \b
    Examples:
      srl broker-acl > users.acl
      redis-server --aclfile "$PWD/users.acl" --maxmemory 1gb --maxmemory-policy noeviction
      srl actor --redis-url redis://actor@HOST --password-file broker-passwords/actor
    """  # noqa: D301
    from srl.runner.distribution.accounts import acl_file, passwords_in

    click.echo(acl_file(passwords_in(directory)), nl=False)
