"""An env of one's own, for own_env.py; importing this module registers it, in the script and in workers."""

from typing import Any

import gymnasium
import numpy as np


class Corridor(gymnasium.Env[np.ndarray, np.int64]):
    """Walk right to the end of a corridor; each step costs 0.1, the end gives 1."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)  # left, right

    def __init__(self, length: int = 8) -> None:
        self._length = length
        self._place = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = int(self.np_random.integers(self._length // 2))
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._place = max(0, self._place + (1 if action == 1 else -1))
        arrived = self._place >= self._length
        return self._observation(), 1.0 if arrived else -0.1, arrived, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._place / self._length], np.float32)


gymnasium.register("Corridor-v0", entry_point="corridor:Corridor", max_episode_steps=50)
