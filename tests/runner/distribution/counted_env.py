"""An env that counts the steps really taken, in this process and, at its close, in a file.

Importing it registers `test/Counted-v0`; worker processes of the tests are allowed to.
"""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from srl.base.settings import setting
from srl.rl.blocks import ImageLayers

_numbers = itertools.count()


class Counted(gymnasium.Env[Any, Any]):
    """Observes `[size]` zeros but for the step; episodes have 20 steps, each rewarded with `reward`.

    Args:
        directory: where `close` leaves a file whose content is the number of steps taken.
        fail_at: the step that raises.
    """

    steps = 0

    def __init__(
        self,
        size: int = 2,
        reward: float = 1.0,
        directory: str | None = None,
        fail_at: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space = spaces.Box(0, 100, (size,), np.float32)
        self.action_space = spaces.Discrete(size)
        self._reward, self._directory, self._fail_at = reward, directory, fail_at
        self._taken = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        self._taken += 1
        Counted.steps += 1
        if self._taken == self._fail_at:
            raise RuntimeError("the counted env broke")
        return self._observation(), self._reward, False, self._step == 20, {}

    def close(self) -> None:
        if self._directory is not None:
            path = Path(self._directory, f"{os.getpid()}-{next(_numbers)}")
            path.write_text(str(self._taken))
            self._taken = 0

    def _observation(self) -> np.ndarray:
        observation = np.zeros(self.observation_space.shape or (), np.float32)
        observation[0] = self._step
        return observation


def steps_taken(directory: Path) -> int:
    """Return the steps of all envs that were closed."""
    return sum(int(path.read_text()) for path in directory.iterdir())


def make_counted(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(name, **kwargs)


def unchanged(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return env


gymnasium.register("test/Counted-v0", Counted, disable_env_checker=True)


@dataclass
class Unchanged(ImageLayers):
    """Image layers of a user's own that do nothing."""

    channels: int = setting(1, low=1, doc="read by nobody")

    def features(self, images: Any) -> Any:
        return images
