"""A trainer serving one task: an ingest thread, the learning loop, and a publisher thread.

The learning loop never waits for the network: the ingest thread brings segments from the broker into the
memory, the publisher takes parameters, heartbeats, history and checkpoints to it.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from srl.base.algorithm import Tree
from srl.base.spaces import Spaces
from srl.runner.distribution.broker import Broker, Lease, TaskDefinition
from srl.runner.distribution.servers import persist
from srl.runner.distribution.wire import decode_experience, decode_tree, encode_tree
from srl.runner.plugins import config_from_dict
from srl.runner.run_config import RunConfig
from srl.runner.status import TrainerStatus
from srl.runner.trainer import Trainer

logger = logging.getLogger("srl")

BEAT_S = 1.0
"""Seconds between heartbeats, and between history rows."""
PARAMETER_BYTES_PER_S = 10_000_000
"""Most that parameters may take of the network, for each actor that fetches them."""
MESSAGES_AT_ONCE = 32
BLOCK_MS = 200


@dataclass(frozen=True)
class Snapshot:
    """What the learning loop hands to the publisher; none of it changes afterwards."""

    train_count: int
    parameters: Tree
    learner_state: Tree | None
    trainer_state: dict[str, Any] | None


class TrainerSession:
    """Trains one task until it is done, the lease is lost or `stop` is set.

    Args:
        directory: for the memory's files, or `None`.
    """

    def __init__(
        self, broker: Broker, lease: Lease, definition: TaskDefinition, directory: Path | None, stop: threading.Event
    ) -> None:
        self._broker = broker
        self._lease = lease
        self._run_config = RunConfig.from_dict(definition.run)
        self._start = definition.start_train_count
        self._stop = stop
        self._over = threading.Event()  # nothing more to do: finished, cancelled or failed
        self._failure: BaseException | None = None
        config = config_from_dict(definition.rl)
        spaces = Spaces.from_dict(definition.spaces)
        seed = self._run_config.seed
        memory = config.make_memory(spaces, seed, directory)
        self._trainer = Trainer(config, config.make_learner(spaces, seed), memory, distributed=True)
        self._env_steps = 0
        self._episodes = 0
        self._last_sequence: dict[str, int] = {}
        self._episode_rewards: list[float] = []
        self._lags: list[int] = []  # versions that inserted segments were behind
        self._version = 0
        self._counting = threading.Lock()
        self._started_s = time.monotonic()
        self._snapshot: Snapshot | None = None
        self._snapshot_wanted = threading.Event()
        self._checkpoint_wanted = False
        self._snapshot_ready = threading.Event()
        self._restore()
        self._rates = Rates(self._trainer.train_count, self._env_steps)

    def run(self) -> None:
        """Train; returns when this trainer has nothing more to do, raises what went wrong in any thread."""
        fields = self._ask(lambda: self._broker.task_fields(self._lease.task))
        now = self._ask(self._broker.redis.time)
        if fields is None or now is None:
            return
        self._started_s = time.monotonic() - (now[0] * 1000 + now[1] // 1000 - int(fields["started_ms"])) / 1000
        self._publish(self._take_snapshot(with_state=False))
        threads = [
            threading.Thread(target=self._guard, args=(target,), name=f"srl-{target.__name__}", daemon=True)
            for target in (self._ingest, self._publish_forever)
        ]
        for thread in threads:
            thread.start()
        try:
            self._learn()
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure
        self._publish(self._take_snapshot(with_state=True))
        self._beat(force=True)
        if self._finished():
            self._ask(lambda: self._broker.finish(self._lease.task, "done", lease=self._lease))

    # --- the learning loop ---------------------------------------------------------------------------

    def _learn(self) -> None:
        while not (self._stop.is_set() or self._over.is_set() or self._finished()):
            updates = self._trainer.wait_until_due(self._updates_left(), BLOCK_MS / 1000)
            if updates:
                self._trainer.learn(updates)
            if self._snapshot_wanted.is_set():
                self._snapshot_wanted.clear()
                self._snapshot = self._take_snapshot(with_state=self._checkpoint_wanted)
                self._snapshot_ready.set()

    def _updates_left(self) -> int:
        limit = self._run_config.max_train_count
        return 1 << 62 if limit is None else self._start + limit - self._trainer.train_count

    def _finished(self) -> bool:
        config = self._run_config
        return (
            self._updates_left() <= 0
            or (config.max_steps is not None and self._env_steps >= config.max_steps)
            or (config.max_episodes is not None and self._episodes >= config.max_episodes)
            or (config.timeout is not None and self._elapsed_s() >= config.timeout)
        )

    def _take_snapshot(self, *, with_state: bool) -> Snapshot:
        trainer = self._trainer
        return Snapshot(
            trainer.train_count,
            trainer.parameters,
            trainer.learner.get_state() if with_state else None,
            self._get_state() if with_state else None,
        )

    # --- experience ----------------------------------------------------------------------------------

    def _ingest(self) -> None:
        claim = True  # first what an earlier trainer read and did not acknowledge
        while not (self._stop.is_set() or self._over.is_set()):
            if not self._trainer.wait_until_insertable(BLOCK_MS / 1000):
                continue
            pending = claim
            messages = self._ask(
                lambda pending=pending: self._broker.receive(self._lease, MESSAGES_AT_ONCE, BLOCK_MS, pending=pending)
            )
            claim = claim and bool(messages)
            if messages:
                self._insert([message for _, message in messages])
                self._ask(lambda messages=messages: self._broker.acknowledge(self._lease, messages))

    def _insert(self, messages: list[bytes]) -> None:
        segments, env_steps, rewards, lags = [], 0, [], []
        for message in messages:
            experience = decode_experience(message)
            if experience.sequence <= self._last_sequence.get(experience.actor, -1):
                continue  # sent again after an answer was lost; it is in the memory already
            self._last_sequence[experience.actor] = experience.sequence
            segments += experience.segments
            lags += [self._version - segment.version for segment in experience.segments]
            env_steps += experience.env_steps
            rewards += experience.episode_rewards
        self._trainer.insert(segments)
        with self._counting:
            self._env_steps += env_steps
            self._episodes += len(rewards)
            self._episode_rewards += rewards
            self._lags += lags

    # --- parameters, heartbeats, history, checkpoints ------------------------------------------------

    def _publish_forever(self) -> None:
        parameter_bytes = sum(array.nbytes for array in _arrays(self._trainer.parameters))
        interval_s = max(self._run_config.parameter_send_interval_s, parameter_bytes / PARAMETER_BYTES_PER_S, 0.005)
        next_checkpoint_s = time.monotonic() + self._run_config.checkpoint_interval_s
        published = self._trainer.train_count
        while not (self._stop.is_set() or self._over.is_set()):
            self._over.wait(interval_s)
            self._beat()
            self._checkpoint_wanted = time.monotonic() >= next_checkpoint_s
            self._snapshot_wanted.set()
            if not self._snapshot_ready.wait(1.0):
                continue
            self._snapshot_ready.clear()
            snapshot = self._snapshot
            if snapshot is None or (snapshot.train_count == published and snapshot.learner_state is None):
                continue
            published = snapshot.train_count
            self._publish(snapshot)
            if snapshot.learner_state is not None:
                next_checkpoint_s = time.monotonic() + self._run_config.checkpoint_interval_s

    def _publish(self, snapshot: Snapshot) -> None:
        metadata: dict[str, Any] = {"train_count": snapshot.train_count}
        blob = encode_tree(snapshot.parameters, metadata)
        version = self._ask(lambda: self._broker.publish(self._lease, snapshot.train_count, self._progress(), blob))
        self._version = version or self._version
        if snapshot.learner_state is not None:
            tree = {"parameters": snapshot.parameters, "learner": snapshot.learner_state}
            checkpoint = encode_tree(tree, {**metadata, "state": json.dumps(snapshot.trainer_state)})
            self._ask(lambda: self._broker.store_checkpoint(self._lease, checkpoint))

    def _beat(self, *, force: bool = False) -> None:
        if self._rates.since_s() < BEAT_S and not force:
            return
        trainer = self._trainer
        updates_per_s, steps_per_s = self._rates.take(trainer.train_count, self._env_steps)
        due = trainer.due(1)
        status = TrainerStatus(
            worker=self._lease.worker,
            updates_per_s=updates_per_s,
            steps_received_per_s=steps_per_s,
            steps_received=self._env_steps,
            waiting_for="" if due or updates_per_s else trainer.limiter.waiting_for(len(trainer.memory)),
        )
        reply = self._ask(lambda: self._broker.beat(self._lease, msgspec.json.encode(status).decode()))
        self._ask(lambda: self._broker.publish(self._lease, trainer.train_count, self._progress()))
        with self._counting:
            rewards, self._episode_rewards = self._episode_rewards, []
            lags, self._lags = self._lags, []
        row: dict[str, Any] = {
            "time": round(self._elapsed_s(), 3),
            "train": trainer.train_count,
            "step": self._env_steps,
            "episode": self._episodes,
            "role": "trainer",
            "worker": self._lease.worker,
            "memory": len(trainer.memory),
            "updates_per_s": round(updates_per_s, 1),
            "env_steps_per_s": round(steps_per_s, 1),
            **trainer.take_metrics(),
        }
        if lags:
            row["version_lag"] = float(np.mean(lags))
        if rewards:
            row["reward0"] = float(np.mean(rewards))
        self._ask(lambda: self._broker.add_history(self._lease.task, row))
        if reply is not None and reply.state not in ("waiting", "running"):
            logger.info("trainer: task %s is %s", self._lease.task, reply.state)
            self._over.set()

    def _progress(self) -> dict[str, Any]:
        return {
            "env_steps": self._env_steps,
            "episodes": self._episodes,
            "memory_size": len(self._trainer.memory),
            "memory_capacity": self._trainer.memory.capacity,
        }

    # --- state ---------------------------------------------------------------------------------------

    def _get_state(self) -> dict[str, Any]:
        state = self._trainer.get_state()
        return {
            **state,
            "env_steps": self._env_steps,
            "episodes": self._episodes,
            "received": self._last_sequence.copy(),
        }

    def _restore(self) -> None:
        """Go on from what the client or an earlier trainer left at the broker."""
        answer = self._ask(lambda: self._broker.checkpoint_blob(self._lease.task))
        if answer is None or answer[1] is None:
            return
        tree, metadata = decode_tree(answer[1])
        self._trainer.learner.set_state(tree["learner"])
        state = json.loads(metadata["state"])
        self._env_steps, self._episodes = state.get("env_steps", 0), state.get("episodes", 0)
        self._last_sequence = dict(state.get("received", {}))
        logger.info("trainer: task %s goes on at %d updates", self._lease.task, self._trainer.train_count)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _ask(self, call: Callable[[], Any]) -> Any:
        return persist(call, self._broker, self._stop)

    def _guard(self, target: Callable[[], None]) -> None:
        """Run a thread's work; what it raises ends the session and is raised there."""
        try:
            target()
        except BaseException as error:
            self._failure = self._failure or error
            self._over.set()


def _arrays(tree: Tree) -> Iterator[Any]:
    for value in tree.values():
        yield from _arrays(value) if isinstance(value, Mapping) else (value,)


class Rates:
    """How fast counters grow between two looks."""

    def __init__(self, *counts: int) -> None:
        self._counts = counts
        self._at_s = time.monotonic()

    def since_s(self) -> float:
        """Return seconds since the last look."""
        return time.monotonic() - self._at_s

    def take(self, *counts: int) -> list[float]:
        """Return each counter's growth a second since the last look."""
        elapsed_s = max(self.since_s(), 1e-6)
        rates = [(now - before) / elapsed_s for now, before in zip(counts, self._counts, strict=True)]
        self._counts, self._at_s = counts, time.monotonic()
        return rates
