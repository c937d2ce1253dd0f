"""A trainer's work directory: one folder a task, for the files of its memory."""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from srl.runner.distribution.broker import FINAL_STATES, Broker

logger = logging.getLogger("srl")


@contextlib.contextmanager
def task_directory(work_dir: Path, task: str) -> Iterator[Path | None]:
    """Give a task's folder to this process alone, or `None` where another process has it.

    That other one is a trainer that was paused and replaced: it finds out when it goes on, but until then what it
    writes must not meet what its successor writes.
    """
    directory = work_dir / task
    directory.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows: containers and their volumes are Linux
        yield directory
        return
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("trainer: another process has %s; this one's memory starts empty, without files", directory)
            yield None
        else:
            yield directory


def remove_finished(broker: Broker, work_dir: Path) -> None:
    """Remove the folders of tasks that have ended; those of unknown tasks stay, since a broker may lose its data."""
    for directory in work_dir.iterdir() if work_dir.is_dir() else ():
        if broker.is_safe(directory.name) and broker.task_fields(directory.name).get("state") in FINAL_STATES:
            shutil.rmtree(directory, ignore_errors=True)
