"""A small image env, for image_env.py; importing this module registers it, in the script and in workers."""

from typing import Any

import gymnasium
import numpy as np

SIZE = 84
BALL = 4
FALL = 4
"""Pixels that the ball falls in a step."""
PADDLE_WIDTH, PADDLE_SPEED = 16, 6
PADDLE_TOP = SIZE - 4


class Catch(gymnasium.Env[np.ndarray, np.int64]):
    """Catch a ball that flies in a straight line between two walls: 1 for a catch, -1 for a miss.

    Observes one grey picture `[84, 84]` uint8. Every other picture hides the ball, also the last one before it is
    down, so that where it is and where it goes can only be told from several pictures.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)  # left, stay, right

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        self._x = int(self.np_random.integers(SIZE - BALL + 1))
        self._speed = int(self.np_random.integers(-5, 6))
        self._paddle = int(self.np_random.integers(SIZE - PADDLE_WIDTH + 1))
        return self._picture(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._paddle = int(np.clip(self._paddle + (action - 1) * PADDLE_SPEED, 0, SIZE - PADDLE_WIDTH))
        self._steps += 1
        self._x += self._speed
        if not 0 <= self._x <= SIZE - BALL:
            self._x = -self._x if self._x < 0 else 2 * (SIZE - BALL) - self._x
            self._speed = -self._speed
        is_down = self._steps * FALL + BALL > PADDLE_TOP
        is_caught = self._paddle - BALL < self._x < self._paddle + PADDLE_WIDTH
        reward = (1.0 if is_caught else -1.0) if is_down else 0.0
        return self._picture(), reward, is_down, False, {}

    def render(self) -> np.ndarray:  # type: ignore[override]
        """Return the picture as colours, with the ball where it is hidden drawn darker."""
        return np.repeat(self._picture(hidden_ball=90)[..., None], 3, axis=2)

    def _picture(self, hidden_ball: int = 0) -> np.ndarray:
        picture = np.zeros((SIZE, SIZE), np.uint8)
        top = self._steps * FALL
        picture[top : top + BALL, self._x : self._x + BALL] = hidden_ball if self._steps % 2 else 255
        picture[PADDLE_TOP:, self._paddle : self._paddle + PADDLE_WIDTH] = 160
        return picture


gymnasium.register("Catch-v0", entry_point=f"{__name__}:Catch")
