"""Options that several commands share, and what they make: the broker's parameters and own modules."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from srl.base.errors import ConfigError

if TYPE_CHECKING:
    from srl.runner.distribution.parameters import RedisParameters

Command = TypeVar("Command", bound=Callable[..., Any])

DIRECTORY: Any = click.Path(file_okay=False, path_type=Path)


def broker_options(command: Command) -> Command:
    """Add the options that `broker_parameters` takes."""
    for option in reversed(
        [
            click.option(
                "--redis-url",
                metavar="URL",
                help="The broker: redis://HOST:PORT, rediss:// for TLS, or unix://. Options of RedisParameters may "
                "follow a '?', such as ?ssl_ca_certs=ca.pem.  [default: the variable SRL_REDIS_URL]",
            ),
            click.option(
                "--password-file",
                type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
                help="File with the broker's password.  [default: the variable SRL_REDIS_PASSWORD, or the file that "
                "SRL_REDIS_PASSWORD_FILE names]",
            ),
            click.option(
                "--ask-password",
                "password_file",
                flag_value="-",
                type=click.Path(path_type=Path),
                help="Ask for the broker's password.",
            ),
            click.option(
                "--connect-timeout",
                type=click.FloatRange(min=0),
                metavar="SECONDS",
                help="How long to wait for a broker that does not answer yet.  [default: 30; 5 for status, watch and "
                "cancel; without end for workers]",
            ),
        ]
    ):
        command = option(command)
    return command


def broker_parameters(
    redis_url: str | None,
    password_file: Path | None,
    connect_timeout: float | None,
    *,
    patience_s: float,
    task_name: str = "",
) -> "RedisParameters":
    """Return where the broker is; `patience_s` is the timeout where neither option nor URL has one."""
    from srl.runner.distribution.parameters import RedisParameters, password_in

    given: dict[str, Any] = {}
    if redis_url:
        given["url"] = redis_url
    if password_file is not None:
        asks = password_file == Path("-")
        given["password"] = click.prompt("Password", hide_input=True, err=True) if asks else password_in(password_file)
    if connect_timeout is not None:
        given["connect_timeout_s"] = connect_timeout
    parameters = RedisParameters(task_name=task_name, **given)
    if connect_timeout is None and parameters.connect_timeout_s == RedisParameters.connect_timeout_s:
        parameters.connect_timeout_s = patience_s
    return parameters


def allow_option(command: Command) -> Command:
    """Add the option whose modules `import_modules` takes."""
    return click.option(
        "--allow",
        multiple=True,
        metavar="MODULE",
        help="Import a module with own envs, algorithms or processors, so that tasks and checkpoints may name "
        "them; may be given several times. Modules in the current directory are found.",
    )(command)


def import_modules(allow: Sequence[str]) -> None:
    """Import the modules the user allows; from now on the current directory's modules are found."""
    from srl.runner.plugins import load_plugins

    directory = str(Path.cwd())
    if not sys.flags.safe_path and directory not in sys.path:
        sys.path.insert(0, directory)  # as `python script.py` has it
    load_plugins(allow)


def show_log(*, quiet: bool = False) -> None:
    """Send the log to the console, `quiet` for warnings alone."""
    import logging

    from srl.utils.common import logger_print

    logger_print(logging.WARNING if quiet else logging.INFO)


def writable(directory: Path | None) -> Path | None:
    """Make a directory now, so that a run cannot find out at its end that it cannot save."""
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the directory {directory} cannot be made: {error.strerror}") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(f"the directory {directory} cannot be written to")
    return directory
