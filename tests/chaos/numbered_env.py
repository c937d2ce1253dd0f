"""An env whose every step can be found again: importing it registers `chaos/Numbered-v0`.

It observes `[number, steps]`, both exact in float32: a number of its own and how many steps it has taken in its life.
The steps taken are written to a file that the process maps, so that a killed process has told of them too.
"""

import mmap
import secrets
import struct
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

EPISODE = 20


class Numbered(gymnasium.Env[Any, Any]):
    """Episodes of 20 steps, each rewarded with 1.

    Args:
        directory: where each env has a file named after its number, with its steps as 8 bytes.
    """

    def __init__(self, directory: str, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(0, 1 << 24, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._directory, self._file = Path(directory), None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._file is None:
            self._number = 1 + secrets.randbelow((1 << 24) - 1)
            path = self._directory / str(self._number)
            path.write_bytes(bytes(8))
            with path.open("r+b") as file:
                self._file = mmap.mmap(file.fileno(), 8)
            self._steps = 0
        self._left = EPISODE
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._left -= 1
        assert self._file is not None
        self._file[:] = struct.pack("<q", self._steps)
        return self._observation(), 1.0, False, self._left == 0, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._number, self._steps], np.float32)


def steps_taken(directory: Path) -> dict[int, int]:
    """Return the steps of every env by its number."""
    return {int(path.name): struct.unpack("<q", path.read_bytes())[0] for path in directory.iterdir()}


gymnasium.register("chaos/Numbered-v0", entry_point=Numbered)
