"""Greedy evaluation, on envs of its own.

`Evaluator` advances one vector step at a time, so an actor or the one-process loop can evaluate beside
training without ever stopping; `Runner.evaluate` simply steps it to the end.
"""

from typing import Any

import numpy as np

from srl.base.algorithm import Policy, RLConfig, Tree
from srl.base.env import EnvConfig, as_seeds
from srl.runner.env_faults import EnvWatch
from srl.runner.lanes import Stacks, make_lanes, restarted

EVALUATION_STREAM = 1
"""Number of the random stream that evaluation envs are seeded from."""


class Evaluator:
    """Plays whole episodes with the greedy policy and reports what the env itself rewarded.

    Every lane plays a fixed number of episodes, so that short ones are not over-represented.

    Args:
        lanes: envs stepped together, at most. watch: as for `make_lanes`; an episode that a fault ended is played anew.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        config: RLConfig,
        policy: Policy,
        *,
        episodes: int,
        seed: int,
        lanes: int = 8,
        watch: EnvWatch | None = None,
    ) -> None:
        self._policy = policy
        self._seed = seed
        self._quota = np.full(min(lanes, episodes), episodes // min(lanes, episodes))
        self._quota[: episodes % len(self._quota)] += 1
        self._lanes = make_lanes(env_config, config, range(len(self._quota)), training=False, watch=watch)
        self._window = config.window_length
        self._rng = np.random.default_rng([seed, EVALUATION_STREAM])
        self._round = 0
        self.running = False

    def begin(self, parameters: Tree) -> None:
        """Start an evaluation of `parameters`."""
        self._parameters: Any = self._policy.load(parameters)
        # Each round plays other episodes, the same ones in every run of this seed.
        seeds = as_seeds(self._seed, range(len(self._lanes)), EVALUATION_STREAM + (self._round << 8))
        self._stacks = Stacks(self._lanes.reset(seeds), self._window)
        self._state = self._policy.initial_state(len(self._lanes))
        self._rewards: list[list[float]] = [[] for _ in self._quota]
        self._round += 1
        self.env_steps = 0
        self.running = True

    def step(self) -> list[float] | None:
        """Advance one vector step; returns all episode rewards once the last one has ended."""
        chosen = self._policy.act(self._parameters, self._stacks.array, self._state, self._rng, None)
        step = self._lanes.step(chosen.action)
        self._stacks.push(step)
        self._state = restarted(chosen.state, self._policy.initial_state(len(self._lanes)), step.started)
        self.env_steps += int(step.active.sum())
        for lane, reward in zip(step.episode_lanes, step.episode_rewards, strict=True):
            if len(self._rewards[lane]) < self._quota[lane]:
                self._rewards[lane].append(reward)
        if any(len(played) < quota for played, quota in zip(self._rewards, self._quota, strict=True)):
            return None
        self.running = False
        return [reward for played in self._rewards for reward in played]

    def close(self) -> None:
        """Close the envs."""
        self._lanes.close()
