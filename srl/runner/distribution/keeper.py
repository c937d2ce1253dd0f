"""A trainer's hold on its task: the heartbeat, and what it lays down again where the broker lost the task.

A broker that comes back without its data knows no task. Its trainer has everything that matters, so it restores the
task, and actors and clients, which wait for that, go on.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from srl.runner.distribution.broker import Broker, Committed, Lease, TaskDefinition, TaskGoneError, persist
from srl.runner.status import TrainerStatus

logger = logging.getLogger("srl")

T = TypeVar("T")

BEAT_S = 1.0
"""Seconds between heartbeats, and between history rows."""


class TaskKeeper:
    """Asks the broker on behalf of a trainer, and restores the task where the broker does not know it.

    Attributes:
        restored: how often that was needed; positions in the experience stream from before mean nothing then.
    """

    def __init__(
        self,
        broker: Broker,
        lease: Lease,
        definition: TaskDefinition,
        committed: Committed,
        checkpoint: bytes,
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

    @property
    def elapsed_s(self) -> float:
        """Seconds that the task has been running for."""
        return time.monotonic() - self._started_s

    def keep(self, train_count: int, progress: Mapping[str, Any], sequences: Mapping[str, int]) -> None:
        """Remember counters that were committed, and the newest sequence number of every actor."""
        with self._lock:
            self._train_count, self._progress, self._sequences = train_count, progress, sequences

    def keep_parameters(self, version: int, parameters: bytes) -> None:
        """Remember parameters that were published."""
        self._parameters = version, parameters

    def keep_checkpoint(self, checkpoint: bytes) -> None:
        """Remember a checkpoint that was stored."""
        self._checkpoint = checkpoint

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
            was_gone = persist(
                lambda: self.broker.restore_task(
                    self.lease,
                    self.definition,
                    backlog_limit_bytes=self._backlog_limit_bytes,
                    elapsed_s=self.elapsed_s,
                    train_count=self._train_count,
                    progress=self._progress,
                    sequences=self._sequences,
                    parameters=self._parameters,
                    checkpoint=self._checkpoint,
                ),
                self.broker,
                self._stop,
            )
            self.restored += 1
        if was_gone:
            logger.warning(
                "trainer: the broker had lost task %s; restored it at %d updates", self.lease.task, self._train_count
            )


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
                keeper.ask(lambda: keeper.broker.beat(keeper.lease, self._text))
                self._ended.wait(BEAT_S)
        except BaseException as error:
            self._failure = error
