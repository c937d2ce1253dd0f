"""A trainer serving one task: the learning loop, and three threads that speak to the broker beside it.

The learning loop never waits for the network: one thread brings segments from the broker into the memory,
one takes parameters, counters and checkpoints to it, one keeps the lease and reports.
"""

import functools
import json
import logging
import math
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from srl.base.algorithm import Tree
from srl.base.errors import ProtocolError
from srl.base.segment import Segment
from srl.runner.alive import give_sign_of_life
from srl.runner.distribution.broker import QUARANTINED
from srl.runner.distribution.gate import Gate
from srl.runner.distribution.keeper import BEAT_S, Heartbeat, TaskKeeper
from srl.runner.distribution.outages import persist
from srl.runner.distribution.records import Committed, Event, Message, Position, TaskGoneError
from srl.runner.distribution.wire import EvaluationRecord, Experience, decode_experience, encode_tree, unpacked_bytes
from srl.runner.run_config import RunConfig
from srl.runner.status import Evaluation, TrainerStatus
from srl.runner.trainer import Trainer

logger = logging.getLogger("srl")

T = TypeVar("T")

CHECKPOINT_SHARE = 0.01
"""Most of its time that the learning loop may spend on checkpoints."""
PARAMETER_BYTES_PER_S = 1_000_000
"""Most that parameters may take of the network, for each actor that fetches them."""
FATAL_S = 30.0
"""How long an actor's last error may still end the run, should nobody play meanwhile."""
KNOWN_ACTORS = 2_000
"""Actors whose newest message is remembered; each one that is started anew is another."""
FORGOTTEN_AT_ONCE = 1_000
"""A script takes only so many arguments."""
TELL_S = 10.0
"""Pause between two texts about refused messages."""
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
    """The threads that train; counters go on from what an earlier trainer, or the client, committed."""

    def __init__(
        self,
        keeper: TaskKeeper,
        trainer: Trainer,
        gate: Gate,
        n_step: int,
        committed: Committed,
        stop: threading.Event,
    ) -> None:
        self._keeper = keeper
        self._broker = keeper.broker
        self._lease = keeper.lease
        self._definition = keeper.definition
        self._run_config = RunConfig.from_dict(keeper.definition.run)
        self._trainer = trainer
        self._gate = gate
        self._n_step = n_step
        self._stop = stop
        self._over = threading.Event()  # nothing more to do: the run's end or a failure
        self._failure: BaseException | None = None
        self._counting = threading.Lock()
        self._env_steps: int = committed.progress.get("env_steps", 0)
        self._episodes: int = committed.progress.get("episodes", 0)
        self._messages_lost: int = committed.progress.get("messages_lost", 0)
        self._sequences = dict(committed.position.sequences)
        self._position = self._committed = committed.position
        self._restored = 0
        self._stored = trainer.memory.position
        self._stored_already = self._stored_since(committed.progress.get("stored"))
        self._commit_at_once_bytes = committed.backlog_limit_bytes / 2
        self._committing = threading.Lock()
        self._version = committed.version
        self._published_train_count = -1
        self._episode_rewards: list[float] = []
        self._lags: list[int] = []  # versions that inserted segments were behind
        self._refused: int = committed.progress.get("messages_refused", 0)
        self._refused_now: list[tuple[Message, str]] = []
        self._told_refused, self._told_refused_s = self._refused, -math.inf
        self._forgotten: list[str] = []
        self._evaluations: list[tuple[str, EvaluationRecord]] = []
        self._asked_to_end = False
        self._last_event = "0"
        self._fatal: Event | None = None
        self._snapshot: Snapshot | None = None
        self._snapshot_wanted = threading.Event()
        self._snapshot_ready = threading.Event()
        self._checkpoint_wanted = False
        self._checkpoint_s = 0.0
        self._checkpoint_count = trainer.train_count
        self._rates = Rates(trainer.train_count, self._env_steps)

    def run(self) -> bool:
        """Train; returns whether the run is done, raises what went wrong in any thread."""
        self._publish(self._take_snapshot(with_state=False))
        threads = [
            threading.Thread(target=self._guard, args=(target,), name=f"srl-{target.__name__}", daemon=True)
            for target in (self._ingest, self._publish_forever, self._report_forever)
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
        with Heartbeat(self._keeper, "its last checkpoint to be stored"):
            self._publish(self._take_snapshot(with_state=True))
        self._report()
        if not self._finished():
            return False
        self._ask(lambda: self._broker.finish(self._lease.task, "done", lease=self._lease))
        return True

    # --- the learning loop ---------------------------------------------------------------------------

    def _learn(self) -> None:
        while not self._is_ending():
            updates = self._trainer.wait_until_due(self._updates_left(), BLOCK_MS / 1000)
            if updates:
                self._trainer.learn(updates)
            self._give_snapshot()

    def _is_ending(self) -> bool:
        give_sign_of_life()  # every loop of the main thread asks this
        return self._stop.is_set() or self._over.is_set() or self._finished()

    def _give_snapshot(self) -> None:
        """Give the publisher a snapshot, if it wants one."""
        if self._snapshot_wanted.is_set():
            self._snapshot_wanted.clear()
            self._snapshot = self._take_snapshot(with_state=self._checkpoint_wanted)
            self._snapshot_ready.set()

    def _updates_left(self) -> int:
        limit = self._run_config.max_train_count
        return 1 << 62 if limit is None else self._definition.start_train_count + limit - self._trainer.train_count

    def _finished(self) -> bool:
        config = self._run_config
        steps = self._env_steps - self._definition.start_env_steps
        return (
            self._asked_to_end
            or self._updates_left() <= 0
            or (config.max_steps is not None and steps >= config.max_steps)
            or (config.max_episodes is not None and self._episodes >= config.max_episodes)
            or (config.timeout is not None and self._elapsed_s() >= config.timeout)
        )

    def _take_snapshot(self, *, with_state: bool) -> Snapshot:
        trainer = self._trainer
        if not with_state:
            return Snapshot(trainer.train_count, trainer.parameters, None, None)
        started_s = time.monotonic()
        state = {**trainer.get_state(), "env_steps": self._env_steps}
        snapshot = Snapshot(trainer.train_count, trainer.parameters, trainer.learner.get_state(), state)
        self._checkpoint_s = time.monotonic() - started_s
        return snapshot

    # --- experience ----------------------------------------------------------------------------------

    def _ingest(self) -> None:
        waiting: list[Message] = []
        while not (self._stop.is_set() or self._over.is_set()):
            if not self._trainer.wait_until_insertable(BLOCK_MS / 1000):
                continue
            waiting = waiting or self._ask(self._receive) or []
            if waiting:
                # All at once is cheapest, one by one keeps an asked ratio.
                count = 1 if self._trainer.limiter.may_hold_back else len(waiting)
                self._insert(waiting[:count])
                waiting = waiting[count:]
                # Usually the publisher commits soon enough; actors must not wait for it where they are fast.
                if self._position.received_bytes - self._committed.received_bytes > self._commit_at_once_bytes:
                    self._commit()

    def _receive(self) -> list[Message]:
        return self._broker.receive(self._lease.task, self._position.last, MESSAGES_AT_ONCE, BLOCK_MS)

    def _stored_since(self, stored: Mapping[str, int] | None) -> int:
        """Return how many segments the memory's files hold beyond what was committed.

        Whoever trained before was killed between the two. Their messages are still at the broker and come again, in
        the same order.
        """
        if stored is None:
            return 0
        if stored["identity"] != self._stored.identity:
            logger.warning("trainer: the memory of the trainer before is not here; it fills anew")
            return 0
        return max(0, self._stored.segments - stored["segments"])

    def _not_stored(self, segments: list[Segment]) -> tuple[list[Segment], int]:
        """Return the segments without those at their start that the memory's files hold already.

        And how many more they hold.
        """
        start, counted, already = 0, 0, self._stored_already
        while start < len(segments) and already:
            transitions = len(segments[start].transitions(self._n_step))
            already -= transitions > 0
            counted += transitions
            start += 1
        if counted:
            self._trainer.count(counted)
        return segments[start:], already

    def _insert(self, messages: list[Message]) -> None:
        fresh: dict[str, int] = {}
        known = ChainMap(fresh, self._sequences)
        arrived: list[Experience] = []
        lost = 0
        for message in messages:
            try:
                experience = decode_experience(message.data)
                self._gate.check(experience, known)
            except ProtocolError as error:
                self._refuse(message, error)
                continue
            newest = known.get(experience.actor, -1)
            if experience.sequence > newest:
                fresh[experience.actor] = experience.sequence
                lost += experience.sequence - newest - 1
                arrived.append(experience)  # the others were sent again after an answer was lost
        segments = [segment for experience in arrived for segment in experience.segments]
        missing, already = self._not_stored(segments)
        self._trainer.insert(missing)
        rewards = [reward for experience in arrived for reward in experience.episode_rewards]
        with self._counting:
            received_bytes = self._position.received_bytes + sum(unpacked_bytes(each.data) for each in messages)
            self._stored = self._trainer.memory.position
            self._stored_already = min(already, self._stored_already)  # it is 0 once the stream is another one
            self._messages_lost += lost
            for actor, sequence in fresh.items():
                self._sequences.pop(actor, None)
                self._sequences[actor] = sequence  # in order of who was heard last
            while len(self._sequences) > KNOWN_ACTORS:
                self._forgotten.append(oldest := next(iter(self._sequences)))
                del self._sequences[oldest]
            self._env_steps += sum(experience.env_steps for experience in arrived)
            self._episodes += len(rewards)
            self._episode_rewards += rewards
            self._evaluations += [(each.actor, record) for each in arrived for record in each.evaluations]
            self._lags += [max(0, self._version - segment.version) for segment in segments]
            uncommitted = {} if self._position is self._committed else self._position.sequences
            last = max((message.id for message in messages), key=_order)
            forgotten = tuple(self._forgotten[:FORGOTTEN_AT_ONCE])
            self._position = Position(last, received_bytes, {**uncommitted, **fresh}, forgotten)

    def _refuse(self, message: Message, error: ProtocolError) -> None:
        """Count a message that cannot be used; the run goes on without it, and the reporter tells of it."""
        self._refused += 1
        if len(self._refused_now) < QUARANTINED:
            self._refused_now.append((message, str(error)))

    def _tell_refused(self) -> None:
        """Put refused messages aside and tell of them, now and then."""
        # The ingest thread may be between counting a message and keeping it.
        if not self._refused_now or time.monotonic() - self._told_refused_s < TELL_S:
            return
        refused, self._refused_now = self._refused_now, []
        for message, reason in refused:
            self._ask(functools.partial(self._broker.quarantine, self._lease, message, reason))
        count, self._told_refused = self._refused - self._told_refused, self._refused
        self._told_refused_s = time.monotonic()
        first, reason = refused[0]
        what = "an experience message" if count == 1 else f"{count} experience messages, the first"
        self._tell(f"refused {what} of {first.sender or 'an unknown sender'}: {reason}")

    def _tell(self, text: str) -> None:
        logger.error("trainer: %s", text)
        self._ask(lambda: self._broker.add_error(self._lease.task, self._lease.worker, text))

    # --- parameters, counters, checkpoints -----------------------------------------------------------

    def _publish_forever(self) -> None:
        parameter_bytes = sum(array.nbytes for array in _arrays(self._trainer.parameters))
        interval_s = max(self._run_config.parameter_send_interval_s, parameter_bytes / PARAMETER_BYTES_PER_S, 0.005)
        next_checkpoint_s = time.monotonic() + self._run_config.checkpoint_interval_s
        while not (self._stop.is_set() or self._over.is_set()):
            self._over.wait(interval_s)
            self._checkpoint_wanted = self._is_checkpoint_due(next_checkpoint_s)
            self._snapshot_wanted.set()
            if not self._snapshot_ready.wait(BLOCK_MS / 1000):
                self._commit()  # a slow update must not keep actors waiting
                continue
            self._snapshot_ready.clear()
            snapshot = self._snapshot
            assert snapshot is not None
            self._publish_from_thread(snapshot)
            if snapshot.learner_state is not None:
                next_checkpoint_s = time.monotonic() + self._run_config.checkpoint_interval_s

    def _is_checkpoint_due(self, at_s: float) -> bool:
        config = self._run_config
        updates = self._trainer.train_count - self._checkpoint_count
        earliest_s = at_s - config.checkpoint_interval_s + self._checkpoint_s / CHECKPOINT_SHARE
        now_s = time.monotonic()
        return now_s >= earliest_s and (now_s >= at_s or updates >= config.checkpoint_interval_updates)

    def _publish_from_thread(self, snapshot: Snapshot) -> None:
        self._publish(snapshot)

    def _publish(self, snapshot: Snapshot) -> None:
        if snapshot.train_count == self._published_train_count:
            self._commit()
        elif self._commit(encode_tree(snapshot.parameters, {"train_count": snapshot.train_count})):
            self._published_train_count = snapshot.train_count
        self._store(snapshot)

    def _store(self, snapshot: Snapshot) -> None:
        """Store a checkpoint, if the snapshot has the state for one."""
        if snapshot.learner_state is None:
            return
        tree = {"parameters": snapshot.parameters, "learner": snapshot.learner_state}
        metadata: dict[str, Any] = {"train_count": snapshot.train_count, "state": json.dumps(snapshot.trainer_state)}
        checkpoint = encode_tree(tree, metadata)
        self._ask(lambda: self._broker.store_checkpoint(self._lease, checkpoint))
        self._keeper.keep_checkpoint(checkpoint)
        self._checkpoint_count = snapshot.train_count

    def _commit(self, parameters: bytes | None = None) -> bool:
        """Leave counters and `parameters` at the broker; returns whether it took them."""
        with self._committing:
            with self._counting:
                if self._restored != self._keeper.restored:
                    # The stream is another one now, and nothing of it is counted yet.
                    self._restored = self._keeper.restored
                    self._position = self._committed = Position("0", 0, {})
                    self._stored_already = 0
                position, progress, sequences = self._position, self._progress(), dict(self._sequences)
            if parameters is None and position is self._committed:
                return True
            train_count, version = self._trainer.train_count, self._version + 1
            try:
                persist(
                    lambda: self._broker.commit(
                        self._lease,
                        train_count=train_count,
                        progress=progress,
                        position=None if position is self._committed else position,
                        parameters=None if parameters is None else (version, parameters),
                    ),
                    self._broker,
                    self._stop,
                )
            except TaskGoneError:
                self._keeper.restore()
                return False
            self._keeper.keep(train_count, progress, sequences)
            if parameters is not None:
                self._version = version
                self._keeper.keep_parameters(version, parameters)
            self._committed = position
            del self._forgotten[: len(position.forgotten)]
            return True

    def _progress(self) -> dict[str, Any]:
        # What the files hold beyond the messages counted so far must not be counted by a commit before these come: a
        # successor, if this trainer is killed too, would store them again.
        segments = self._stored.segments - self._stored_already
        return {
            "env_steps": self._env_steps,
            "episodes": self._episodes,
            "messages_lost": self._messages_lost,
            "messages_refused": self._refused,
            "stored": {"identity": self._stored.identity, "segments": segments},
            "memory_size": len(self._trainer.memory),
            "memory_capacity": self._trainer.memory.capacity,
        }

    # --- heartbeats and history ----------------------------------------------------------------------

    def _report_forever(self) -> None:
        while not (self._stop.is_set() or self._over.is_set()):
            self._report()
            self._over.wait(BEAT_S)

    def _report(self) -> None:
        trainer = self._trainer
        updates_per_s, steps_per_s = self._rates.take(trainer.train_count, self._env_steps)
        status = TrainerStatus(
            worker=self._lease.worker,
            updates_per_s=updates_per_s,
            steps_received_per_s=steps_per_s,
            steps_received=self._env_steps,
            waiting_for="" if updates_per_s else trainer.limiter.waiting_for(len(trainer.memory)),
        )
        reply = self._ask(lambda: self._broker.beat(self._lease, msgspec.json.encode(status).decode()))
        if reply is not None and reply.cleared:
            self._tell(f"actors wrote more than they may, so it was deleted: {', '.join(reply.cleared)}")
        self._asked_to_end |= reply is not None and reply.ending
        with self._counting:
            rewards, self._episode_rewards = self._episode_rewards, []
            evaluations, self._evaluations = self._evaluations, []
            lags, self._lags = self._lags, []
        # Nothing is told that a successor would not know, and count again.
        committed = self._keeper.progress
        row: dict[str, Any] = {
            "time": round(self._elapsed_s(), 3),
            "train": trainer.train_count,
            "step": committed.get("env_steps", 0),
            "episode": committed.get("episodes", 0),
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
        if self._refused:
            row["messages_refused"] = self._refused
        if self._messages_lost:
            row["messages_lost"] = self._messages_lost
        # A history ends with the trainer's last row.
        for actor, record in evaluations:
            self._add_evaluation(actor.partition("/")[0], record)
        self._ask(lambda: self._broker.add_history(self._lease, row))
        self._tell_refused()
        self._end_where_nobody_can_play()

    def _add_evaluation(self, worker: str, record: EvaluationRecord) -> None:
        row = {
            "time": round(record.time_s, 3),
            "train": record.train_count,
            "role": "eval",
            "worker": worker,
            "eval_reward0": record.mean_reward,
        }
        shown = Evaluation(train_count=record.train_count, episodes=record.episodes, mean_reward=record.mean_reward)
        self._ask(lambda: self._broker.add_history(self._lease, row, msgspec.json.encode(shown).decode()))

    def _end_where_nobody_can_play(self) -> None:
        """End the run with the error of an actor that has left because of it, where nobody else plays."""
        for event in self._ask(lambda: self._broker.events(self._lease.task, self._last_event)) or []:
            self._last_event = event.id
            if event.fatal and event.worker.startswith("actor-"):
                self._fatal = event
        if self._fatal is None:
            return
        playing, now_ms = self._ask(lambda: self._broker.playing_actors(self._lease.task)) or (1, 0)
        text, age_s = f"{self._fatal.worker}: {self._fatal.message}", (now_ms - self._fatal.time_ms) / 1000
        if age_s > FATAL_S:
            self._fatal = None
        elif not playing:
            self._ask(lambda: self._broker.finish(self._lease.task, "failed", text, self._lease))
            self._over.set()

    # --- all threads ---------------------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        return self._keeper.elapsed_s

    def _ask(self, call: Callable[[], T]) -> T | None:
        return self._keeper.ask(call)

    def _guard(self, target: Callable[[], None]) -> None:
        """Run a thread's work; what it raises ends the session and is raised there."""
        try:
            target()
        except BaseException as error:
            self._failure = self._failure or error
            self._over.set()


def _order(message_id: str) -> tuple[int, ...]:
    """Return what stream ids are ordered by."""
    return tuple(map(int, message_id.split("-")))


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
