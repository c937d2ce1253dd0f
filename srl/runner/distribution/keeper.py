"""A trainer's hold on its task: the heartbeat, and what it lays down again where the broker lost the task.

A broker that comes back without its data knows no task. Its trainer has everything that matters, so it restores the
task, and actors and clients, which wait for that, go on. With a work directory even a trainer that was killed at the
same time leaves behind what its successor needs for that.
"""

import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from srl.base.algorithm import Memory
from srl.base.errors import ProtocolError
from srl.runner.alive import give_sign_of_life
from srl.runner.distribution.broker import KEEP_FINISHED_S, Broker
from srl.runner.distribution.outages import persist
from srl.runner.distribution.records import Committed, Lease, TaskDefinition, TaskGoneError
from srl.runner.distribution.wire import decode_tree
from srl.runner.distribution.work_dir import task_directory
from srl.runner.status import TrainerStatus

logger = logging.getLogger("srl")

T = TypeVar("T")

BEAT_S = 1.0
"""Seconds between heartbeats, and between history rows."""
SAVE_S = 0.2
TASK_FILE, CHECKPOINT_FILE = "task.json", "checkpoint.bin"


class TaskKeeper:
    """Asks the broker on behalf of a trainer, and restores the task where the broker does not know it.

    Args:
        checkpoint: the newest, or `b""`.
        directory: where a copy of what it keeps lies, or `None`.

    Attributes:
        restored: how often that was needed; positions in the experience stream from before mean nothing then.
        memory: set once it is made.
    """

    memory: Memory | None = None

    def __init__(
        self,
        broker: Broker,
        lease: Lease,
        definition: TaskDefinition,
        committed: Committed,
        checkpoint: bytes,
        directory: Path | None,
        stop: threading.Event,
    ) -> None:
        self.broker = broker
        self.lease = lease
        self.definition = definition
        self.restored = 0
        self._stop = stop
        self._lock = threading.Lock()
        self._backlog_limit_bytes = committed.backlog_limit_bytes
        self._started_s = time.monotonic() - committed.elapsed_s
        self._train_count = committed.train_count
        self._progress: Mapping[str, Any] = committed.progress
        self._sequences: Mapping[str, int] = committed.position.sequences
        self._parameters = (committed.version, b"")
        self._checkpoint = checkpoint
        self._directory = directory
        self._saved_s, self._failed_to_save = -math.inf, False

    @property
    def elapsed_s(self) -> float:
        """Seconds that the task has been running for."""
        return time.monotonic() - self._started_s

    @property
    def progress(self) -> Mapping[str, Any]:
        """The counters that were committed last."""
        return self._progress

    def keep(self, train_count: int, progress: Mapping[str, Any], sequences: Mapping[str, int]) -> None:
        """Remember counters that were committed, and the newest sequence number of every actor."""
        with self._lock:
            self._train_count, self._progress, self._sequences = train_count, progress, sequences
        if time.monotonic() - self._saved_s > SAVE_S:
            self._save(TASK_FILE, json.dumps(self._kept()).encode())
            self._saved_s = time.monotonic()

    def keep_parameters(self, version: int, parameters: bytes) -> None:
        """Remember parameters that were published."""
        self._parameters = version, parameters

    def keep_checkpoint(self, checkpoint: bytes) -> None:
        """Remember a checkpoint that was stored."""
        self._checkpoint = checkpoint
        self._save(CHECKPOINT_FILE, checkpoint)

    def ask(self, call: Callable[[], T]) -> T | None:
        """Call until the broker answers, restoring the task on the way; `None` when stopped before that."""
        while True:
            try:
                return persist(call, self.broker, self._stop)
            except TaskGoneError:
                self.restore()

    def restore(self) -> None:
        """Lay the task down again, unless another thread has done so."""
        with self._lock:
            kept = self._kept()
            was_gone = persist(
                lambda: restore_task(self.broker, self.lease, kept, self._parameters, self._checkpoint),
                self.broker,
                self._stop,
            )
            self.restored += 1
        if was_gone:
            logger.warning(
                "trainer: the broker had lost task %s; restored it at %d updates", self.lease.task, self._train_count
            )

    def _kept(self) -> dict[str, Any]:
        progress = dict(self._progress)
        if self.memory is not None:
            # What the lost server had not given out or been told of is not coming again.
            progress["stored"] = dataclasses.asdict(self.memory.position)
        return {
            "definition": dataclasses.asdict(self.definition),
            "backlog_limit_bytes": self._backlog_limit_bytes,
            "elapsed_s": self.elapsed_s,
            "train_count": self._train_count,
            "progress": progress,
            "sequences": self._sequences,
            "version": self._parameters[0],
            "token": self.lease.token,
        }

    def _save(self, name: str, data: bytes) -> None:
        if self._directory is None:
            return
        temporary = self._directory / f"{name}.new"
        try:
            temporary.write_bytes(data)
            temporary.replace(self._directory / name)
        except OSError as error:
            if not self._failed_to_save:
                logger.error("trainer: %s cannot be written (%s); a copy of the task is missing there", name, error)
            self._failed_to_save = True
        else:
            self._failed_to_save = False


def restore_task(
    broker: Broker, lease: Lease, kept: Mapping[str, Any], parameters: tuple[int, bytes], checkpoint: bytes
) -> bool:
    """Lay a task down again from what a keeper kept; returns whether the broker had lost it."""
    return broker.restore_task(
        lease,
        TaskDefinition(**kept["definition"]),
        backlog_limit_bytes=kept["backlog_limit_bytes"],
        elapsed_s=kept["elapsed_s"],
        train_count=kept["train_count"],
        progress=kept["progress"],
        sequences=kept["sequences"],
        parameters=parameters,
        checkpoint=checkpoint,
    )


def restore_from_directories(broker: Broker, work_dir: Path) -> None:
    """Restore the tasks that a killed trainer left in a work directory and the broker does not know.

    A task that has ended is known for days, and then its folder is removed; older ones are not brought back.
    """
    for directory in work_dir.iterdir() if work_dir.is_dir() else ():
        file = directory / TASK_FILE
        if not broker.is_safe(directory.name) or not file.exists() or broker.task_fields(directory.name):
            continue
        if time.time() - file.stat().st_mtime > KEEP_FINISHED_S / 2:
            continue
        with task_directory(work_dir, directory.name) as unused:
            if unused is not None:  # else its trainer lives, and restores it itself
                _restore_from(broker, directory)


def _restore_from(broker: Broker, directory: Path) -> None:
    checkpoint = directory / CHECKPOINT_FILE
    try:
        kept = json.loads((directory / TASK_FILE).read_bytes())
        epoch, _, nonce = kept["token"].partition(":")
        lease = Lease(directory.name, "trainer", 0, f"{int(epoch) + 1}:{nonce}")
        # The memory's files are newer than this copy, and what they hold is not coming again.
        kept["progress"].pop("stored", None)
        found = checkpoint.read_bytes() if checkpoint.exists() else b""
        if found:
            decode_tree(found)  # one that is damaged would end the run
        restored = restore_task(broker, lease, kept, (kept["version"], b""), found)
    except (OSError, ValueError, KeyError, TypeError, ProtocolError) as error:
        logger.error("trainer: the task in %s cannot be restored: %r", directory, error)
        return
    if restored:
        broker.release(lease)
        logger.warning("trainer: the broker had lost task %s; restored it from %s", directory.name, directory)


class Heartbeat:
    """Keeps a trainer's lease while something takes long; a context manager, which raises what the broker refused."""

    def __init__(self, keeper: TaskKeeper, waiting_for: str) -> None:
        status = TrainerStatus(worker=keeper.lease.worker, waiting_for=waiting_for)
        self._text = msgspec.json.encode(status).decode()
        self._keeper = keeper
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._beat, name="srl-heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._failure is not None and exception[0] is None:
            raise self._failure

    def _beat(self) -> None:
        keeper = self._keeper
        try:
            while not self._ended.is_set():
                give_sign_of_life()
                keeper.ask(lambda: keeper.broker.beat(keeper.lease, self._text))
                self._ended.wait(BEAT_S)
        except BaseException as error:
            self._failure = error
