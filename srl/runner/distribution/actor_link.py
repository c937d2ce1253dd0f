"""An actor's link to the broker: sends messages, beats, fetches parameters and tells of faulty envs.

It does so in a thread of its own, so that env steps overlap with compression and the network.
"""

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from srl.base.algorithm import Tree
from srl.base.segment import Segment
from srl.runner.actor import Produced
from srl.runner.alive import give_sign_of_life
from srl.runner.distribution.broker import MESSAGE_STEPS, Broker
from srl.runner.distribution.keeper import BEAT_S
from srl.runner.distribution.outages import outlast
from srl.runner.distribution.records import Lease, Reply, TaskOverError
from srl.runner.distribution.trainer_session import Rates
from srl.runner.distribution.wire import EvaluationRecord, Experience, decode_tree, encode_experience, unpacked_bytes
from srl.runner.env_faults import EnvWatch
from srl.runner.status import ActorStatus

logger = logging.getLogger("srl")

T = TypeVar("T")

LOOK_STEPS = 64
"""Env steps after which a link looks for newer parameters, so that looking costs few commands."""
MESSAGE_AGE_S = 0.5
"""A message is not held back for longer than this, however slow the env is."""
POLL_S = 0.1
EAGER_S = 0.002
"""How often an actor in lockstep looks for the parameters of its next round."""
FULL_S = 0.02, 0.5
"""First and longest pause before an actor looks again whether the backlog has room."""
TELL_S = 10.0
"""Pause between two texts about faults of envs, so that an env which often fails does not drown everything else."""
HANGING_EXIT_CODE = 70
FLUSH_S = 5.0
"""How long a stopping actor tries to send what it still has."""
COUNT_S = 5.0
"""How often an actor asks which of how many it is: exploration is dealt out anew when others come and go."""


@dataclass(frozen=True)
class Published:
    """Parameters as an actor received them."""

    version: int
    tree: Tree
    train_count: int


class ActorLink:
    """Sends messages, beats, fetches parameters and tells of faulty envs in a thread of its own; a context manager.

    At its end it sends what it was given; then it raises what the broker refused, or what went wrong.
    """

    def __init__(self, broker: Broker, lease: Lease, stop: threading.Event, watch: EnvWatch) -> None:
        self._broker = broker
        self._lease = lease
        self._stop = stop
        self._watch = watch
        self._over = threading.Event()  # the thread has ended
        self._closing = threading.Event()  # nothing more will be added
        self._given_up = threading.Event()  # what could not be sent by now is lost
        self._failure: BaseException | None = None
        self._messages: queue.Queue[Experience] = queue.Queue(maxsize=1)
        self._evaluations: list[EvaluationRecord] = []
        self._pending = Produced()
        self._pending_transitions = 0
        self._pending_since_s = time.monotonic()
        self._sequence = 0
        self._parameters_ready = threading.Event()
        self._give_up_s: float | None = None
        self._looked_at_step = 0
        self._started_s = 0.0
        self._env_steps = self._steps_sent = self._episodes = self._version = 0
        self._env_faults = self._faults_told = 0
        self._told_at_s = -TELL_S
        self._rates = Rates(0, 0)
        self._env_rate = self._sent_rate = 0.0
        self._beat_at_s = 0.0
        self._waiting_for = "its envs to be ready"
        self._known_version = 0
        self.newest: Published | None = None
        self.train_count = 0
        self.rank, self.actors = 0, 1  # which of how many that play now
        self._counted_s = -math.inf
        self._thread = threading.Thread(target=self._work, name="srl-link", daemon=True)

    def __enter__(self) -> "ActorLink":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        while self._thread.is_alive():
            self._thread.join(POLL_S)
            self._gives_up()
        if exception[0] is not None:
            return
        unsent = self._env_steps - self._steps_sent
        if unsent and not isinstance(self._failure, TaskOverError):
            logger.warning("%s: %d env steps could not be sent and are lost", self._lease.worker, unsent)
        if self._failure is not None:
            raise self._failure

    @property
    def _has_other(self) -> bool:
        return self.newest is not None and self.newest.version != self._known_version

    @property
    def stopping(self) -> bool:
        """Whether playing is to stop: a signal, the task's end, or a failure of the link."""
        return self._over.is_set() or self._stop.is_set()

    def wait_for_parameters(self, other_than: int = 0) -> Published | None:
        """Wait for parameters of another version than one; `None` where playing is to stop before that.

        The next version is usually higher, but not where the broker has forgotten the last ones.
        """
        what = "first" if other_than == 0 else "next"
        self._waiting_for = f"the trainer's {what} parameters"
        self._known_version = other_than
        while not (self.stopping or self._has_other):
            give_sign_of_life()
            self._parameters_ready.clear()
            if not self._has_other:
                self._parameters_ready.wait(POLL_S)
        self._waiting_for = ""
        return self.newest if self._has_other else None

    def add(self, produced: Produced, version: int) -> None:
        """Collect what a step made, and hand a message over when there is enough; waits while all is full."""
        self.collect(produced, version)
        old = self._pending.segments and time.monotonic() - self._pending_since_s > MESSAGE_AGE_S
        if self._pending_transitions >= MESSAGE_STEPS or old:
            self.hand_over()

    def collect(self, produced: Produced, version: int) -> None:
        """Collect what a step made, for the next message."""
        give_sign_of_life()
        pending = self._pending
        if not pending.segments and not pending.env_steps:
            self._pending_since_s = time.monotonic()
        pending.segments += produced.segments
        pending.env_steps += produced.env_steps
        pending.episode_rewards += produced.episode_rewards
        pending.episode_lengths += produced.episode_lengths
        self._env_steps += produced.env_steps
        self._episodes += len(produced.episode_rewards)
        self._version = version
        self._pending_transitions += sum(len(segment.actions) for segment in produced.segments)

    def flush(self, segments: list[Segment]) -> None:
        """Hand over everything that is left, with these last segments."""
        self._pending.segments += segments
        if self._pending.segments or self._pending.env_steps or self._evaluations:
            self.hand_over()

    def report_evaluation(self, rewards: list[float], train_count: int) -> None:
        """Send an evaluation along with the next message, for the status and the history."""
        time_s = max(0.0, time.monotonic() - self._started_s)
        self._evaluations.append(EvaluationRecord(train_count, len(rewards), sum(rewards) / len(rewards), time_s))

    def hand_over(self) -> None:
        """Hand what was collected over as a message; waits while another one waits to be sent."""
        message = self._take_message()
        while not self._over.is_set():
            give_sign_of_life()
            try:
                self._messages.put(message, timeout=POLL_S)
                return
            except queue.Full:
                if self._gives_up():
                    return

    def _take_message(self) -> Experience:
        pending, self._pending = self._pending, Produced()
        self._pending_transitions = 0
        experience = Experience(
            actor=self._lease.sender,
            sequence=self._sequence,
            segments=pending.segments,
            env_steps=pending.env_steps,
            episode_rewards=pending.episode_rewards,
            episode_lengths=pending.episode_lengths,
            evaluations=self._evaluations,
        )
        self._evaluations = []
        self._sequence += 1
        return experience

    # --- the link's thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._beat()
            while not (self._closing.is_set() and self._messages.empty()):
                with contextlib.suppress(queue.Empty):
                    is_eager = self._known_version > 0 and not self._has_other
                    self._send(self._messages.get(timeout=EAGER_S if is_eager else POLL_S))
                if time.monotonic() - self._beat_at_s >= BEAT_S:
                    self._beat()
                elif not self._has_other or self._env_steps - self._looked_at_step >= LOOK_STEPS:
                    self._look()
                self._tell_faults()
            self._told_at_s = -TELL_S
            self._tell_faults()
        except BaseException as error:
            self._failure = error
        finally:
            self._over.set()
        # The playing loop ends soon, unless an env holds it.
        while not self._closing.wait(POLL_S):
            self._end_where_env_hangs()

    def _send(self, experience: Experience) -> None:
        message = encode_experience(experience)
        pause_s, longest_s = FULL_S
        while (
            reply := self._ask(lambda: self._broker.send(self._lease, message, is_last=self._is_ending))
        ) is not None:
            self._note(reply)
            if reply.sent:
                self._steps_sent += experience.env_steps
                return
            self._waiting_for = "the trainer: the backlog is full"
            while reply is not None and unpacked_bytes(message) > reply.room and not self._gives_up():
                self._over.wait(pause_s)  # which only this thread sets
                pause_s = min(2 * pause_s, longest_s)
                reply = self._beat()
                if self._is_ending:
                    break  # what is last may be above the limit
            self._waiting_for = ""
            if reply is None or self._gives_up():
                break

    @property
    def _is_ending(self) -> bool:
        return self._stop.is_set() or self._closing.is_set()

    def _gives_up(self) -> bool:
        """Whether an actor that ends has tried for long enough; then no call waits for the broker or its task any more.

        Both threads ask this while they wait.
        """
        if not self._is_ending:
            return False
        if self._give_up_s is None:
            self._give_up_s = time.monotonic() + FLUSH_S
        if time.monotonic() > self._give_up_s:
            self._given_up.set()
        return self._given_up.is_set()

    def _tell_faults(self) -> None:
        """Tell the client of the newest fault, and of how many others there were since the last one told."""
        if not self._watch.faults or time.monotonic() - self._told_at_s < TELL_S:
            return
        while self._watch.faults:
            text = self._watch.faults.popleft()
            self._env_faults += 1
        others = self._env_faults - self._faults_told - 1
        if others:
            text += f"(and {others} other fault{'s' * (others != 1)} of envs before it)"
        self._faults_told, self._told_at_s = self._env_faults, time.monotonic()
        logger.warning("%s: %s", self._lease.worker, text)
        self._ask(lambda: self._broker.add_error(self._lease.task, self._lease.worker, text))

    def _end_where_env_hangs(self) -> None:
        """End this process where an env does not come back, as nothing can interrupt it."""
        hanging = self._watch.overdue()
        if hanging is None:
            return
        text = f"{hanging}The actor ends; with env_processes=True such an env would be replaced alone"
        logger.error("%s: %s", self._lease.worker, text)
        try:
            self._broker.add_error(self._lease.task, self._lease.worker, text)
            self._broker.release(self._lease)
        finally:
            os._exit(HANGING_EXIT_CODE)

    def _beat(self) -> Reply | None:
        self._end_where_env_hangs()
        if self._rates.since_s() >= BEAT_S:  # a full backlog is asked about more often
            self._env_rate, self._sent_rate = self._rates.take(self._env_steps, self._steps_sent)
        status = ActorStatus(
            worker=self._lease.worker,
            slot=self._lease.slot,
            env_steps_per_s=self._env_rate,
            steps_sent_per_s=self._sent_rate,
            env_steps=self._env_steps,
            steps_sent=self._steps_sent,
            episodes=self._episodes,
            parameter_version=self._version,
            env_faults=self._env_faults + len(self._watch.faults),
            waiting_for=self._waiting_for,
        )
        text = msgspec.json.encode(status).decode()
        self._beat_at_s = time.monotonic()
        counts = self._beat_at_s - self._counted_s >= COUNT_S
        reply = self._ask(lambda: self._broker.beat(self._lease, text, count_actors=counts))
        if reply is not None:
            if counts:
                self.rank, self.actors, self._counted_s = reply.rank, reply.actors, self._beat_at_s
            self._note(reply)
        return reply

    def _note(self, reply: Reply) -> None:
        self.train_count = reply.train_count
        self._fetch_newer(reply.version)

    def _look(self) -> None:
        """Look for newer parameters between messages: how fresh they are decides how well a fast run learns."""
        self._fetch_newer(self._ask(lambda: self._broker.parameter_version(self._lease.task)) or 0)

    def _fetch_newer(self, version: int) -> None:
        self._looked_at_step = self._env_steps
        if version != (0 if self.newest is None else self.newest.version):
            self._fetch()

    def _fetch(self) -> None:
        version, blob = self._ask(lambda: self._broker.parameters_blob(self._lease.task)) or (0, None)
        if blob is None:
            return
        if self.newest is None:
            elapsed_s = self._ask(lambda: self._broker.elapsed_s(self._lease.task))
            self._started_s = time.monotonic() - (elapsed_s or 0.0)
        tree, metadata = decode_tree(blob)
        self.newest = Published(version, tree, int(metadata["train_count"]))
        self._parameters_ready.set()

    def _ask(self, call: Callable[[], T]) -> T | None:
        return outlast(call, self._broker, self._given_up)
