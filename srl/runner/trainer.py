"""The trainer: memory, learner and rate limiter.

In one process `Runner.train` calls it beside the actor; on a broker `TrainerServer` does, inserting from
one thread and learning in another.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from srl.base.algorithm import Learner, Memory, RLConfig, Sample, Tree
from srl.base.errors import CheckpointError
from srl.base.segment import Segment
from srl.base.spaces import Spaces
from srl.runner.rate_limiter import RateLimiter

STEPS_PER_UPDATE = 2
"""Env steps that actors must have sent for each update, unless `samples_per_insert` says otherwise. Data from
actors is older than data of one process, where a step is enough, so an update needs more of it."""
MIN_CREDIT = 512
"""Transitions that may arrive at once without updates being forgone."""


class Trainer:
    """Learns from segments. `insert` and `learn` may be called from two different threads.

    Args:
        distributed: whether actors run apart, so that the learner may run below the asked ratio.
        prefetch: whether a thread samples what the next dispatch needs, and brings it to the accelerator, while this
            one computes. It is drawn by priorities that are a dispatch older then, and not repeatably.
    """

    def __init__(
        self,
        config: RLConfig,
        spaces: Spaces,
        learner: Learner,
        memory: Memory,
        *,
        distributed: bool,
        prefetch: bool = False,
    ) -> None:
        self.learner = learner
        self.memory = memory
        self.dispatch = memory.updates_per_dispatch
        """Updates that are done at once."""
        ratio = config.samples_per_insert
        tolerance = credit = None
        if distributed:
            # Room for a dispatch and for what arrives at once, so that neither side works in single steps.
            per_dispatch = self.dispatch * self.memory.batch_size / (ratio or self.memory.batch_size)
            room = int(2 * per_dispatch) + 2 * config.steps_per_segment(spaces)
            tolerance, credit = (room, None) if ratio is not None else (None, max(room, MIN_CREDIT))
        self.limiter = RateLimiter(
            self.memory.warmup_size,
            self.memory.batch_size,
            self.memory.batch_size / (STEPS_PER_UPDATE if distributed else 1) if ratio is None else ratio,
            tolerance,
            credit,
        )
        self._prefetcher = ThreadPoolExecutor(1, "srl-prefetch") if prefetch else None
        self._prefetched: Future[tuple[Sample, Mapping[str, Any]]] | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._metrics: dict[str, list[float]] = {}

    def prepare(self) -> None:
        """Compile what learning needs, which takes seconds, before anybody waits for it."""
        self.learner.prepare(self.memory.example())

    @property
    def train_count(self) -> int:
        """Updates done in the whole run."""
        return self.learner.train_count

    @property
    def parameters(self) -> Tree:
        """The learner's parameters now; the tree does not change when learning goes on."""
        return self.learner.parameters

    def insert(self, segments: Sequence[Segment], env_steps: int | None = None) -> int:
        """Store segments and return how many transitions they added.

        `env_steps` are counted for the update ratio in place of these transitions: in one process steps are
        counted as they happen, although their segments come later.
        """
        with self._changed:
            added = self.memory.insert(segments) if segments else 0
            self.limiter.inserted(added if env_steps is None else env_steps, len(self.memory))
            self._changed.notify_all()
        return added

    def count(self, env_steps: int) -> None:
        """Count steps for the update ratio whose segments are stored already."""
        with self._changed:
            if len(self.memory) >= self.memory.warmup_size:
                self.limiter.inserted(env_steps, len(self.memory))

    def wait_until_insertable(self, timeout_s: float) -> bool:
        """Wait while inserting must wait for the learner; returns whether it may go on."""
        with self._changed:
            return self._changed.wait_for(self.limiter.may_insert, timeout_s)

    def wait_until_due(self, limit: int, timeout_s: float) -> int:
        """Wait until a whole dispatch (or `limit` updates, if that is less) is due; returns how many are."""
        wanted = min(limit, self.dispatch)
        with self._changed:
            ready = self._changed.wait_for(lambda: self.limiter.updates_due(wanted) >= wanted, timeout_s)
            return wanted if ready else 0

    def due(self, limit: int) -> int:
        """Return how many updates, at most one dispatch, are due now."""
        return self.limiter.updates_due(min(limit, self.dispatch))

    def learn(self, updates: int) -> None:
        """Do `updates` updates in one dispatch."""
        sample, batches = self._next_batches(updates)
        info = self.learner.update(batches)
        with self._changed:
            if info.priorities is not None:
                self.memory.update_priorities(sample, info.priorities)
            self.limiter.updated(updates)
            for name, value in info.metrics.items():
                self._metrics.setdefault(name, []).append(value)
            self._changed.notify_all()

    def _next_batches(self, updates: int) -> tuple[Sample, Mapping[str, Any]]:
        if self._prefetcher is None or updates != self.dispatch:
            with self._lock:
                sample = self.memory.sample(updates, self.train_count)
            return sample, sample.batches
        ready = self._prefetched or self._prefetcher.submit(self._prefetch, self.train_count)
        result = ready.result()
        self._prefetched = self._prefetcher.submit(self._prefetch, self.train_count + updates)
        return result

    def _prefetch(self, train_count: int) -> tuple[Sample, Mapping[str, Any]]:
        with self._lock:
            sample = self.memory.sample(self.dispatch, train_count)
        return sample, self.learner.place(sample.batches)

    def take_metrics(self) -> dict[str, float]:
        """Return the mean of each metric since the last call."""
        with self._lock:
            metrics, self._metrics = self._metrics, {}
        return {name: float(np.mean(values)) for name, values in metrics.items()}

    def get_state(self) -> dict[str, Any]:
        """Return everything but the learner's arrays and the memory's contents, as JSON data."""
        with self._lock:
            return {"memory": self.memory.get_state(), "limiter": self.limiter.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `get_state`'s data."""
        self.check_valid(state)
        with self._lock:
            self.memory.set_state(state["memory"])
            # A memory that was lost is warmed up again, and the ratio counts from there.
            is_lost = len(self.memory) < self.memory.warmup_size and state["limiter"]["warm_at"] is not None
            if not is_lost:
                self.limiter.set_state(state["limiter"])

    def check_valid(self, state: dict[str, Any]) -> None:
        """Raise `CheckpointError` where this is no state of a trainer; it may have more in it."""
        for name in ("memory", "limiter"):
            if not isinstance(state.get(name), dict):
                raise CheckpointError(f"no trainer state, as it has no {name!r}: {sorted(state)}")
        self.memory.check_valid(state["memory"])
        self.limiter.check_valid(state["limiter"])
