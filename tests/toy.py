"""A linear Q-learner in numpy: the smallest whole algorithm, quick to make, shared by tests of the runner."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from srl.base.algorithm import Exploration, Memory, RLConfig, Step, Tree, UpdateInfo
from srl.base.segment import End
from srl.base.settings import setting
from srl.base.spaces import Spaces
from srl.rl.exploration import epsilon_greedy
from srl.rl.memories.config import MemoryConfig
from srl.rl.memories.replay import ReplayMemory
from srl.rl.trees import check_matches


@dataclass
class Config(RLConfig, algorithm="toy"):
    batch_size: int = setting(8, low=1, doc="transitions an update uses")
    memory: MemoryConfig = setting(factory=lambda: MemoryConfig(capacity=1000, warmup_size=50), doc="replay memory")
    n_step: int = setting(1, low=1, doc="rewards summed before bootstrapping")
    epsilon: float = setting(0.5, low=0, high=1, doc="probability of a uniform action")
    updates_per_dispatch: int = setting(4, low=1, doc="updates done at once")

    @property
    def n_step_frames(self) -> int:
        return self.n_step

    def make_policy(self, spaces: Spaces) -> "Policy":
        return Policy(self, spaces)

    def make_learner(self, spaces: Spaces, seed: int) -> "Learner":
        return Learner(spaces, seed)

    def make_memory(self, spaces: Spaces, seed: int, directory: Path | None) -> Memory:
        return ReplayMemory(
            spaces,
            self.memory,
            batch_size=self.batch_size,
            n_step=self.n_step,
            discount=0.9,
            updates_per_dispatch=self.updates_per_dispatch,
            segment_length=self.steps_per_segment(spaces),
            seed=seed,
            directory=directory,
        )


def q_values(parameters: Tree, observation: np.ndarray) -> np.ndarray:
    """Return `[B, A]` of `[B, window, *frame]`."""
    features = np.tanh(observation.reshape(len(observation), -1).astype(np.float32) / 10)
    values: np.ndarray = features @ parameters["weights"] + parameters["bias"]
    return values


class Policy:
    """Epsilon-greedy; its state counts the steps of the episode."""

    def __init__(self, config: Config, spaces: Spaces) -> None:
        self._config, self._actions = config, spaces.action_count
        self.explored: list[Exploration | None] = []

    def load(self, parameters: Tree) -> Any:
        return parameters

    def initial_state(self, lanes: int) -> Tree:
        return {"steps": np.zeros(lanes, np.int32), "nested": {"steps": np.zeros((lanes, 1), np.int32)}}

    def act(
        self,
        parameters: Any,
        observation: np.ndarray,
        state: Tree | None,
        rng: np.random.Generator,
        explore: Exploration | None,
    ) -> Step:
        assert state is not None
        if observation.shape[2:] == (3,) and not self._config.processors:
            # Of a Script env: the state starts anew with each episode.
            np.testing.assert_array_equal(state["steps"], observation[:, -1, 2])
            np.testing.assert_array_equal(state["nested"]["steps"][:, 0], observation[:, -1, 2])
        self.explored.append(explore)
        action = q_values(parameters, observation).argmax(-1).astype(np.int32)
        if explore is not None:
            action = epsilon_greedy(action, self._actions, self._config.epsilon, rng)
        counted = {"steps": state["steps"] + 1, "nested": {"steps": state["nested"]["steps"] + 1}}
        return Step(action, counted)

    def priorities(
        self, rewards: np.ndarray, end: End, transitions: range, scores: Mapping[str, np.ndarray]
    ) -> np.ndarray | None:
        return None


class Learner:
    has_accelerator = False

    def __init__(self, spaces: Spaces, seed: int) -> None:
        features = int(np.prod(spaces.observation.shape)) * spaces.window_length
        weights = np.random.default_rng(seed).normal(size=(features, spaces.action_count)) * 0.1
        self._state: dict[str, Any] = {
            "parameters": {"weights": weights.astype(np.float32), "bias": np.zeros(spaces.action_count, np.float32)},
            "train_count": np.asarray(0),
        }

    def place(self, batches: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """There is nowhere to bring them."""
        return batches

    def update(self, batches: Mapping[str, np.ndarray]) -> UpdateInfo:
        errors = []
        for k in range(len(batches["reward_t"])):
            batch = {name: values[k] for name, values in batches.items()}
            parameters = self._state["parameters"]
            q_t = q_values(parameters, batch["observation_t"]).max(-1)
            q_tm1 = np.take_along_axis(q_values(parameters, batch["observation_tm1"]), batch["action_tm1"][:, None], 1)
            error = (batch["reward_t"] + batch["discount_t"] * q_t - q_tm1[:, 0]).astype(np.float32)
            errors.append(error)
            bias, weights = parameters["bias"].copy(), parameters["weights"].copy()
            np.add.at(bias, batch["action_tm1"], 0.01 * error)
            features = np.tanh(batch["observation_tm1"].reshape(len(error), -1).astype(np.float32) / 10)
            np.add.at(weights.T, batch["action_tm1"], 0.01 * features * error[:, None])
            self._state["parameters"] = {"weights": weights, "bias": bias}
        self._state["train_count"] = self._state["train_count"] + len(errors)
        return UpdateInfo(np.abs(errors), {"loss": float(np.square(errors).mean())})

    def prepare(self, batches: Mapping[str, np.ndarray]) -> None:
        """Nothing is compiled."""

    @property
    def parameters(self) -> Tree:
        tree: Tree = self._state["parameters"]
        return tree

    @property
    def train_count(self) -> int:
        return int(self._state["train_count"])

    def set_parameters(self, parameters: Tree) -> None:
        check_matches(parameters, self.parameters)
        self._state["parameters"] = dict(parameters)

    def get_state(self) -> dict[str, Any]:
        return dict(self._state)

    def set_state(self, state: Tree) -> None:
        self.check_valid(state)
        self._state = dict(state)

    def check_valid(self, state: Tree) -> None:
        check_matches(state, self.get_state())
