"""The usual treatment of Atari games: no-op starts, the fire button, lost lives, signs of rewards.

Users put an `AtariProcessor` into `Config.processors`, before an `ImageProcessor`. Evaluations play whole games and
see the game's own score, whatever is set here.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from srl.base.errors import SpaceError
from srl.base.processor import Processor
from srl.base.settings import setting

_NO_OP, _FIRE = 0, 1


@dataclass
class AtariProcessor(Processor):
    """What Mnih et al. 2015 do to games; frames are skipped by the env itself (`kwargs={"frameskip": 4}`)."""

    episodic_life: bool = setting(
        True, doc="whether a lost life ends the episode for the learner; the game itself goes on"
    )
    noop_max: int = setting(
        30, low=0, doc="each game starts after 1 to so many steps of doing nothing; 0 starts at once, high varies more"
    )
    fire_reset: bool = setting(True, doc="whether to press fire where a game or a life starts with that")
    clip_reward: bool = setting(True, doc="whether the learner sees only the sign of each reward: -1, 0 or 1")

    def for_evaluation(self) -> "AtariProcessor":
        """Return what an evaluation uses: the same starts, but whole games and rewards as they are."""
        return dataclasses.replace(self, episodic_life=False, clip_reward=False)

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Return `env` with this around it; `SpaceError` where it is no Atari game with discrete actions."""
        if not hasattr(env.unwrapped, "ale") or not isinstance(env.action_space, gymnasium.spaces.Discrete):
            raise SpaceError(
                f"AtariProcessor needs an Atari game with discrete actions ('ALE/...'), not {env.unwrapped}; remove it "
                "from config.processors for this env"
            )
        return _AtariWrapper(env, self)


class _AtariWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], processor: AtariProcessor) -> None:
        super().__init__(env)
        self._processor = processor
        meanings: list[str] = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fires = processor.fire_reset and meanings[_FIRE : _FIRE + 1] == ["FIRE"]
        self._lives = 0
        self._goes_on = False  # a lost life ended the learner's episode, but not the game

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a game, or go on with one whose life was lost."""
        goes_on = self._goes_on and seed is None
        if goes_on:
            observation, info, is_over = self._press(_FIRE if self._fires else _NO_OP)
            goes_on = not is_over
        if not goes_on:
            observation, info = self._start(seed, options)
        self._goes_on = False
        self._lives = int(info["lives"])
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the game; a lost life ends the learner's episode."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        lives = int(info["lives"])
        is_lost = self._processor.episodic_life and lives < self._lives
        self._lives = lives
        self._goes_on = is_lost and not (terminated or truncated)
        terminated = terminated or is_lost
        if self._processor.clip_reward:
            reward = float(np.sign(float(reward)))
        return observation, reward, terminated, truncated, info

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        presses = []
        if self._processor.noop_max:
            presses = [_NO_OP] * int(self.np_random.integers(1, self._processor.noop_max + 1))
        if self._fires:
            presses.append(_FIRE)
        for action in presses:
            observation, info, is_over = self._press(action)
            if is_over:  # a game that ends by itself so early starts again
                observation, info = self.env.reset(options=options)
        return observation, info

    def _press(self, action: int) -> tuple[Any, dict[str, Any], bool]:
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, info, terminated or truncated
