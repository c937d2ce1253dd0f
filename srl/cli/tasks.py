"""`srl status`, `srl watch` and `srl cancel`: the tasks at a broker, from anywhere that reaches it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from srl.cli.options import DIRECTORY, broker_options, broker_parameters, show_log, writable

if TYPE_CHECKING:
    from srl.runner.distribution.parameters import RedisParameters
    from srl.runner.distribution.task_manager import TaskManager

PATIENCE_S = 5.0


class NoTask(click.ClickException):
    """The broker answered, but has no such task."""

    exit_code = 4


def _task_command(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that find a task, as one argument `parameters`."""

    @broker_options
    @click.option("--task", default="", metavar="TASK", help="Id of a task, or the name it was given.")
    @functools.wraps(command)
    def wrapper(
        redis_url: str | None, password_file: Path | None, connect_timeout: float | None, task: str, **options: Any
    ) -> None:
        show_log(quiet=True)
        parameters = broker_parameters(redis_url, password_file, connect_timeout, patience_s=PATIENCE_S, task_name=task)
        command(parameters, **options)

    return wrapper


@click.command()
@_task_command
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of tasks, or with --task one object.")
def status(parameters: "RedisParameters", as_json: bool) -> None:
    """Show the tasks at the broker, oldest first, with their workers.

    \b
    Examples:
      srl status --redis-url redis://127.0.0.1:6379
      srl status --task CartPole-v1-1f2e3d4c
      srl status --json | jq '.[] | {task, state, train_count}'
    """  # noqa: D301
    import msgspec

    from srl.runner.distribution.task_manager import TaskManager
    from srl.runner.progress import final_line, log_lines

    one = bool(parameters.task_name)
    with _the_task(parameters) if one else contextlib.closing(TaskManager(parameters)) as manager:
        tasks = [manager.get_status()] if one else manager.tasks()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(tasks[0] if one else tasks)).decode())
        return
    address = parameters.address
    for each in tasks:
        click.echo(final_line(each) if each.finished else "\n".join(log_lines(each, address)))
    if not tasks:
        click.echo(f"no tasks at {address}; make one with: srl train ENV --redis-url {address} ...")


@click.command()
@_task_command
@click.option("--checkpoint-dir", type=DIRECTORY, help="Keep the task's checkpoints here as they come.")
@click.option("--history-dir", type=DIRECTORY, help="Append the task's history here.")
def watch(parameters: "RedisParameters", checkpoint_dir: Path | None, history_dir: Path | None) -> None:
    """Wait for a task to end, with progress; by default for the newest.

    Ctrl-C ends the watching, not the task. Any number may watch.

    \b
    Examples:
      srl watch
      srl watch --task CartPole-v1-1f2e3d4c --checkpoint-dir run --history-dir run
    """  # noqa: D301
    from srl.runner.progress import final_line

    show_log()
    with _the_task(parameters) as manager:
        ended = manager.train_wait(checkpoint_save_dir=writable(checkpoint_dir), history_save_dir=writable(history_dir))
    click.echo(final_line(ended))
    if ended.state == "cancelled":
        raise click.ClickException(f"task {ended.task} was cancelled")


@click.command()
@_task_command
def cancel(parameters: "RedisParameters") -> None:
    """End a task; its workers turn to the next within seconds, and what it learned stays at the broker.

    --task may be left out where only one task is unfinished.

    \b
    Examples:
      srl cancel
      srl cancel --task CartPole-v1-1f2e3d4c
    """  # noqa: D301
    if not parameters.task_name:
        parameters.task_name = _only_unfinished(parameters)
    with _the_task(parameters) as manager:
        if manager.cancel():
            click.echo(f"cancelled {manager.task}")
        else:
            click.echo(f"{manager.task} is {manager.get_status().state} already")


@contextlib.contextmanager
def _the_task(parameters: "RedisParameters") -> "Iterator[TaskManager]":
    """Give the manager of the task that `parameters.task_name` says, or of the newest."""
    from srl.base.errors import BrokerError
    from srl.runner.distribution.task_manager import TaskManager

    with contextlib.closing(TaskManager(parameters)) as manager:
        try:
            _ = manager.task
        except BrokerError:
            wanted = f"no task is called {parameters.task_name!r}" if parameters.task_name else "there is no task"
            raise NoTask(f"{wanted} at {parameters.address}; srl status lists all") from None
        yield manager


def _only_unfinished(parameters: "RedisParameters") -> str:
    from srl.runner.distribution.task_manager import TaskManager

    with contextlib.closing(TaskManager(parameters)) as manager:
        unfinished = [each.task for each in manager.tasks() if not each.finished]
    if not unfinished:
        raise NoTask(f"no task is unfinished at {parameters.address}; srl status lists all")
    if len(unfinished) > 1:
        raise click.UsageError(f"say which task with --task; unfinished are {', '.join(unfinished)}")
    return unfinished[0]
