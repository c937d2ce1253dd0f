"""`srl dashboard`: a web page over the tasks of a broker."""

import errno
from pathlib import Path

import click

from srl.base.errors import ConfigError
from srl.cli.options import broker_options, broker_parameters, show_log

PATIENCE_S = 2.0


@click.command()
@broker_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 is everywhere.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="Another name by which browsers may reach it; may be given several times.",
)
def dashboard(
    redis_url: str | None,
    password_file: Path | None,
    connect_timeout: float | None,
    host: str,
    port: int,
    allow_hosts: tuple[str, ...],
) -> None:
    """Show the tasks of a broker in a browser: progress, curves, workers, errors. It changes nothing.

    It has no log-in of its own: whoever reaches its port sees the tasks.

    \b
    Examples:
      srl dashboard --redis-url redis://127.0.0.1:6379
      SRL_REDIS_URL=redis://viewer@broker:6379 SRL_REDIS_PASSWORD=... srl dashboard --port 8080
    """  # noqa: D301
    from srl.dashboard.server import Dashboard
    from srl.runner.shutdown import stop_on_signals

    show_log()
    parameters = broker_parameters(redis_url, password_file, connect_timeout, patience_s=PATIENCE_S)
    try:
        server = Dashboard(parameters, host, port, allow_hosts)
    except OSError as error:
        why = "is in use; choose another one with --port" if error.errno == errno.EADDRINUSE else f"fails: {error}"
        raise ConfigError(f"port {port} of {host} {why}") from error
    with server, stop_on_signals() as stop:
        click.echo(f"dashboard of {parameters.address}: {server.url} (Ctrl-C ends it)")
        server.serve_until(stop)
