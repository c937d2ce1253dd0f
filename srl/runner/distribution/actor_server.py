"""An actor serving one task: the playing loop, and a link thread that talks to the broker.

The playing loop hands whole messages to the link and picks up newer parameters from it, so env steps overlap
with compression and the network; when the backlog at the broker is full, the loop waits.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from srl.base.env import EnvConfig
from srl.runner.actor import Actor
from srl.runner.distribution.actor_link import ActorLink, Published
from srl.runner.distribution.broker import Broker
from srl.runner.distribution.outages import persist
from srl.runner.distribution.records import Lease, TaskDefinition
from srl.runner.env_faults import EnvWatch
from srl.runner.evaluate import Evaluator
from srl.runner.lanes import make_lane_groups
from srl.runner.plugins import config_from_dict
from srl.runner.run_config import RunConfig

EVALUATION_TURNS = 2
"""An evaluation advances once in so many turns: it must not keep its actor from playing."""


def serve_actor(broker: Broker, lease: Lease, definition: TaskDefinition, stop: threading.Event) -> None:
    """Play for one task until it is over, the lease is lost or `stop` is set; raises what went wrong."""
    env_config = EnvConfig.from_dict(definition.env)
    config = config_from_dict(definition.rl)
    run_config = RunConfig.from_dict(definition.run)
    lane_numbers = range(lease.slot * run_config.num_envs, (lease.slot + 1) * run_config.num_envs)
    # The link comes first: it keeps the lease while envs, which may take long, are made.
    watch = EnvWatch(env_config.env_timeout_s)
    with ActorLink(broker, lease, stop, watch) as link, contextlib.ExitStack() as stack:
        groups = make_lane_groups(env_config, config, lane_numbers, watch=watch)
        for _, lanes in groups:
            stack.callback(lanes.close)
        fields = persist(lambda: broker.task_fields(lease.task), broker, stop)
        if not fields:
            return
        env_steps = json.loads(fields["progress"]).get("env_steps", 0)
        policy = config.make_policy(groups[0][1].spaces)
        actors = [
            Actor(
                lanes,
                policy,
                config,
                # A run that goes on, or an actor that replaces another, plays on: not the same episodes again.
                seed=run_config.seed + env_steps,
                lane_numbers=numbers,
                total_lanes=run_config.actor_num * run_config.num_envs,
                distributed=True,
            )
            for numbers, lanes in groups
        ]

        def make_evaluator() -> Evaluator:
            episodes, seed = run_config.eval_episodes, run_config.seed
            evaluator = Evaluator(env_config, config, policy, episodes=episodes, seed=seed, watch=watch)
            stack.callback(evaluator.close)
            return evaluator

        every_turns = EVALUATION_TURNS * len(actors)
        evaluations = _Evaluations(link, make_evaluator, run_config.eval_interval_s, every_turns)
        if run_config.lockstep:
            steps = config.steps_per_segment(groups[0][1].spaces)
            _play_in_lockstep(link, actors, evaluations, run_config, lease.slot, steps)
        else:
            _play(link, actors, evaluations, run_config)
        link.flush([segment for actor in actors for segment in actor.flush()])


@dataclass
class _Evaluations:
    """Evaluates beside playing: a step in so many turns, so that the actor goes on playing."""

    link: ActorLink
    make_evaluator: Callable[[], Evaluator]
    interval_s: float
    every_turns: int

    def __post_init__(self) -> None:
        self._evaluator: Evaluator | None = None
        self._next_s, self._turn = 0.0, 0

    def advance(self, newest: Published) -> None:
        """Note a turn of the playing loop, which acts with these parameters."""
        self._turn += 1
        if self._evaluator is None:
            self._evaluator = self.make_evaluator()
        if not self._evaluator.running and time.monotonic() >= self._next_s:
            self._evaluated = newest
            self._evaluator.begin(newest.tree)
        elif self._evaluator.running and self._turn % self.every_turns == 0:
            rewards = self._evaluator.step()
            if rewards is not None:
                self.link.report_evaluation(rewards, self._evaluated.train_count)
                self._next_s = time.monotonic() + self.interval_s


def _play(link: ActorLink, actors: list[Actor], evaluations: _Evaluations, run_config: RunConfig) -> None:
    turn = 0
    newest = link.wait_for_parameters()
    while newest is not None and not link.stopping:
        group = turn % len(actors)
        actor = actors[group]
        if turn >= len(actors):
            link.add(actor.finish(), actor.version)
        if newest.version != actor.version:
            actor.set_parameters(newest.tree, newest.version)
        actor.train_count = link.train_count
        # Exploration is dealt out in turn among who plays now: each actor has exploring and greedy lanes alike, so a
        # slow actor (or the one that evaluates) slows neither kind more than the other.
        numbers = range(link.rank, link.actors * run_config.num_envs, link.actors)
        actor.explore_as(numbers[group :: len(actors)], link.actors * run_config.num_envs)
        actor.begin()
        if link.rank == 0 and run_config.eval_episodes:
            evaluations.advance(newest)
        newest, turn = link.newest, turn + 1
    for actor in actors[:turn]:
        link.add(actor.finish(), actor.version)


def _play_in_lockstep(
    link: ActorLink, actors: list[Actor], evaluations: _Evaluations, run_config: RunConfig, slot: int, steps: int
) -> None:
    """Play rounds of `steps` vector steps, each with the next version of the parameters and sent as one message."""
    total = run_config.actor_num * run_config.num_envs
    numbers = range(slot, total, run_config.actor_num)
    newest = link.wait_for_parameters()
    while newest is not None and not link.stopping:
        for group, actor in enumerate(actors):
            actor.set_parameters(newest.tree, newest.version)
            actor.train_count = newest.train_count
            actor.explore_as(numbers[group :: len(actors)], total)
        for _ in range(steps):
            for actor in actors:
                actor.begin()
            for actor in actors:
                link.collect(actor.finish(), actor.version)
            if slot == 0 and run_config.eval_episodes:
                evaluations.advance(newest)
        link.hand_over()
        newest = link.wait_for_parameters(other_than=newest.version)
