"""An actor serving one task: the playing loop, and a link thread that talks to the broker.

The playing loop hands whole messages to the link and picks up newer parameters from it, so env steps and
the network overlap; when the backlog at the broker is full, the loop waits.
"""

import json
import logging
import queue
import threading
import time
from typing import Any

import msgspec

from srl.base.algorithm import Tree
from srl.base.env import EnvConfig
from srl.runner.actor import Actor, Produced
from srl.runner.distribution.broker import MESSAGE_STEPS, Broker, Lease, Reply, TaskDefinition
from srl.runner.distribution.servers import persist
from srl.runner.distribution.trainer_server import BEAT_S, Rates
from srl.runner.distribution.wire import Experience, decode_tree, encode_experience
from srl.runner.evaluate import Evaluator
from srl.runner.lanes import make_lanes
from srl.runner.plugins import config_from_dict
from srl.runner.run_config import RunConfig
from srl.runner.status import ActorStatus, Evaluation

logger = logging.getLogger("srl")

MESSAGE_AGE_S = 0.5
"""A message is not held back for longer than this, however slow the env is."""
POLL_S = 0.02
FLUSH_S = 5.0
"""How long a stopping actor tries to send what it still has."""


class ActorSession:
    """Plays for one task until it is over, the lease is lost or `stop` is set."""

    def __init__(self, broker: Broker, lease: Lease, definition: TaskDefinition, stop: threading.Event) -> None:
        self._env_config = EnvConfig.from_dict(definition.env)
        self._config = config_from_dict(definition.rl)
        self._run_config = RunConfig.from_dict(definition.run)
        self._lease = lease
        self._link = ActorLink(broker, lease, stop)

    def run(self) -> None:
        """Play; raises what went wrong in either thread."""
        config, link = self._run_config, self._link
        first = self._lease.slot * config.num_envs
        lane_numbers = range(first, first + config.num_envs)
        lanes = make_lanes(self._env_config, self._config, lane_numbers)
        policy = self._config.make_policy(lanes.spaces)
        actor = Actor(
            lanes,
            policy,
            self._config,
            seed=config.seed,
            lane_numbers=lane_numbers,
            total_lanes=config.actor_num * config.num_envs,
            distributed=True,
        )
        evaluator = None
        if self._lease.slot == 0 and config.eval_episodes:
            evaluator = Evaluator(
                self._env_config, self._config, policy, episodes=config.eval_episodes, seed=config.seed
            )
        with link:
            self._play(actor, evaluator)
            if not link.over:
                link.close(actor.flush())
        actor.close()
        if evaluator is not None:
            evaluator.close()

    def _play(self, actor: Actor, evaluator: Evaluator | None) -> None:
        link, next_evaluation_s = self._link, 0.0
        newest = link.wait_for_parameters()
        while newest is not None and not link.over:
            if newest.version != actor.version:
                actor.set_parameters(newest.tree, newest.version)
            actor.train_count = link.train_count
            actor.total_lanes = link.actor_num * self._run_config.num_envs
            link.add(actor.step(), actor.version)
            if evaluator is not None:
                if not evaluator.running and time.monotonic() >= next_evaluation_s:
                    evaluated = newest
                    evaluator.begin(newest.tree)
                elif evaluator.running and (rewards := evaluator.step()) is not None:
                    link.report_evaluation(rewards, evaluated.train_count)
                    next_evaluation_s = time.monotonic() + self._run_config.eval_interval_s
            newest = link.newest


class Published:
    """Parameters as an actor received them."""

    def __init__(self, version: int, tree: Tree, train_count: int) -> None:
        self.version = version
        self.tree = tree
        self.train_count = train_count


class ActorLink:
    """Sends messages, beats, and fetches parameters in a thread of its own; a context manager."""

    def __init__(self, broker: Broker, lease: Lease, stop: threading.Event) -> None:
        self._broker = broker
        self._lease = lease
        self._stop = stop
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._messages: queue.Queue[tuple[bytes, int]] = queue.Queue(maxsize=2)
        self._evaluations: queue.SimpleQueue[tuple[Evaluation, dict[str, Any]]] = queue.SimpleQueue()
        self._pending = Produced()
        self._pending_transitions = 0
        self._pending_since_s = time.monotonic()
        self._sequence = 0
        self._parameters_ready = threading.Event()
        self._closing = threading.Event()
        self._started_ms = 0
        self._env_steps = self._steps_sent = self._episodes = self._version = 0
        self._rates = Rates(0, 0)
        self._waiting_for = ""
        self.newest: Published | None = None
        self.train_count = 0
        self.actor_num = 1
        self._thread = threading.Thread(target=self._work, name="srl-link", daemon=True)

    def __enter__(self) -> "ActorLink":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._thread.join()
        if self._failure is not None and exception[0] is None:
            raise self._failure

    @property
    def over(self) -> bool:
        """Whether playing is to stop: a signal, the task's end, or a failure of the link."""
        return self._over.is_set() or self._stop.is_set()

    def wait_for_parameters(self) -> Published | None:
        """Wait for the trainer's first parameters; `None` where playing is over before that."""
        while not self.over and not self._parameters_ready.wait(POLL_S):
            continue
        return self.newest

    def add(self, produced: Produced, version: int) -> None:
        """Collect what a step made, and hand a message over when there is enough; waits while all is full."""
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
        old = pending.segments and time.monotonic() - self._pending_since_s > MESSAGE_AGE_S
        if self._pending_transitions >= MESSAGE_STEPS or old:
            message = self._take_message()
            while not self.over:
                try:
                    self._messages.put(message, timeout=POLL_S)
                    return
                except queue.Full:
                    continue

    def close(self, segments: list[Any]) -> None:
        """Send everything that is left before the link stops."""
        self._pending.segments += segments
        if self._pending.segments:
            # The thread empties the queue before it ends, so this waits at most for one message to go.
            self._messages.put(self._take_message(), timeout=FLUSH_S)

    def report_evaluation(self, rewards: list[float], train_count: int) -> None:
        """Leave an evaluation for the status and the history."""
        mean = sum(rewards) / len(rewards)
        evaluation = Evaluation(train_count=train_count, episodes=len(rewards), mean_reward=mean)
        elapsed_s = time.time() - self._started_ms / 1000
        row = {"time": round(elapsed_s, 3), "train": train_count, "role": "eval", "worker": self._lease.worker}
        self._evaluations.put((evaluation, {**row, "eval_reward0": mean}))

    def _take_message(self) -> tuple[bytes, int]:
        pending, self._pending = self._pending, Produced()
        self._pending_transitions = 0
        experience = Experience(
            actor=self._lease.token,
            sequence=self._sequence,
            segments=pending.segments,
            env_steps=pending.env_steps,
            episode_rewards=pending.episode_rewards,
            episode_lengths=pending.episode_lengths,
        )
        self._sequence += 1
        return encode_experience(experience), pending.env_steps

    # --- the link's thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._beat()
            while not self._over.is_set() and not (self._closing.is_set() and self._messages.empty()):
                try:
                    message, env_steps = self._messages.get(timeout=POLL_S if self.newest is None else 0.1)
                except queue.Empty:
                    pass
                else:
                    self._send(message, env_steps)
                if self._rates.since_s() >= BEAT_S or self.newest is None:
                    self._beat()
                while not self._evaluations.empty():
                    self._store_evaluation(*self._evaluations.get())
        except BaseException as error:
            self._failure = error
        finally:
            self._over.set()

    def _send(self, message: bytes, env_steps: int) -> None:
        deadline_s: float | None = None
        while not self._over.is_set():
            reply = persist(lambda: self._broker.send(self._lease, message), self._broker, self._stop)
            if reply is None:
                return
            self._note(reply)
            if reply.sent:
                self._steps_sent += env_steps
                self._waiting_for = ""
                return
            self._waiting_for = "the trainer: the backlog is full"
            if self._stop.is_set():
                deadline_s = deadline_s or time.monotonic() + FLUSH_S
                if time.monotonic() > deadline_s:
                    logger.warning("%s: the backlog stayed full, %d env steps are lost", self._lease.worker, env_steps)
                    return
            self._over.wait(POLL_S)
            if self._rates.since_s() >= BEAT_S:
                self._beat()

    def _beat(self) -> None:
        env_rate, sent_rate = self._rates.take(self._env_steps, self._steps_sent)
        waiting_for = self._waiting_for if self.newest is not None else "the trainer's first parameters"
        status = ActorStatus(
            worker=self._lease.worker,
            slot=self._lease.slot,
            env_steps_per_s=env_rate,
            steps_sent_per_s=sent_rate,
            env_steps=self._env_steps,
            steps_sent=self._steps_sent,
            episodes=self._episodes,
            parameter_version=self._version,
            waiting_for=waiting_for,
        )
        text = msgspec.json.encode(status).decode()
        reply = persist(lambda: self._broker.beat(self._lease, text), self._broker, self._stop)
        if reply is not None:
            self._note(reply)

    def _note(self, reply: Reply) -> None:
        if reply.state not in ("waiting", "running"):
            logger.info("%s: task %s is %s", self._lease.worker, self._lease.task, reply.state)
            self._over.set()
            return
        self.train_count, self.actor_num = reply.train_count, reply.actor_num
        if reply.version > (self.newest.version if self.newest is not None else 0):
            answer = persist(lambda: self._broker.parameters_blob(self._lease.task), self._broker, self._stop)
            if answer is not None and answer[1] is not None:
                tree, metadata = decode_tree(answer[1])
                self.newest = Published(answer[0], tree, int(metadata["train_count"]))
                if not self._started_ms:
                    fields = self._broker.task_fields(self._lease.task)
                    self._started_ms = int(fields.get("started_ms", 0))
                self._parameters_ready.set()

    def _store_evaluation(self, evaluation: Evaluation, row: dict[str, Any]) -> None:
        text = json.dumps(msgspec.to_builtins(evaluation))
        persist(lambda: self._broker.set_evaluation(self._lease.task, text), self._broker, self._stop)
        persist(lambda: self._broker.add_history(self._lease.task, row), self._broker, self._stop)
