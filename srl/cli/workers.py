"""`srl trainer` and `srl actor`: workers that serve the tasks of a broker until they are stopped."""

import math
from pathlib import Path

import click

from srl.cli.options import DIRECTORY, allow_option, broker_options, broker_parameters, import_modules, show_log


@click.command()
@broker_options
@click.option(
    "--work-dir",
    type=DIRECTORY,
    help="Where replay memories keep their files, so that the next trainer goes on with them. By default they are "
    "in plain memory.",
)
@allow_option
def trainer(
    redis_url: str | None,
    password_file: Path | None,
    connect_timeout: float | None,
    work_dir: Path | None,
    allow: tuple[str, ...],
) -> None:
    """Learn for the broker's tasks, one after the other, until stopped.

    Start it before or after the tasks and the broker; it waits for them, without end unless --connect-timeout
    says otherwise. A second trainer stands by and takes over when the first dies. SIGTERM and Ctrl-C stop it in
    order, with exit code 0.

    \b
    Examples:
      srl trainer --redis-url redis://127.0.0.1:6379 --work-dir /var/lib/srl
      SRL_REDIS_URL=rediss://broker:6379 SRL_REDIS_PASSWORD=... srl trainer
      srl trainer --allow my_envs              # tasks may use what my_envs.py defines
    """  # noqa: D301
    from srl.runner.distribution.servers import trainer_run_forever

    show_log()
    parameters = broker_parameters(redis_url, password_file, connect_timeout, patience_s=math.inf)
    import_modules(allow)
    trainer_run_forever(parameters, None, work_dir=work_dir, allow=allow)


@click.command()
@broker_options
@allow_option
def actor(
    redis_url: str | None, password_file: Path | None, connect_timeout: float | None, allow: tuple[str, ...]
) -> None:
    """Play for the broker's tasks, one after the other, until stopped.

    Start as many as a task asks for (srl train --actors); more stand by. Each uses one CPU core. They wait for
    broker and tasks, without end unless --connect-timeout says otherwise. SIGTERM and Ctrl-C stop an actor in
    order, with exit code 0.

    \b
    Examples:
      srl actor --redis-url redis://127.0.0.1:6379
      SRL_REDIS_URL=rediss://broker:6379 SRL_REDIS_PASSWORD=... srl actor
      srl actor --password-file /run/secrets/broker --redis-url redis://broker:6379 --allow my_envs
    """  # noqa: D301
    from srl.runner.distribution.servers import actor_run_forever, configure_actor_process

    show_log()
    parameters = broker_parameters(redis_url, password_file, connect_timeout, patience_s=math.inf)
    configure_actor_process()  # before an own module imports JAX
    import_modules(allow)
    actor_run_forever(parameters, None, allow=allow)
