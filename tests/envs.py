"""Envs whose every step is known, shared by tests of several layers; importing this registers them."""

import os
import secrets
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from srl.base.processor import Processor
from srl.base.segment import End
from srl.base.settings import setting


@dataclass
class Episode:
    """What an env really did."""

    frames: list[list[int]]
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    end: End = End.CUT  # until it ends


PLAYED: dict[tuple[int, int], Episode] = {}
"""Every episode that `Script` envs of this process played, by identity and episode."""


class Script(gymnasium.Env[np.ndarray, int]):
    """Observes `[identity, episode, step]`; lengths, ends and rewards follow from the seed.

    Args:
        longest: steps of the longest episode. lengths: of each episode instead, then the last one again.
        ends: how each episode ends, then the last one again; drawn where not given.
        reward: of each step; `None`: drawn, plus the action.
    """

    observation_space = spaces.Box(0, 1 << 30, (3,), np.int32)
    action_space = spaces.Discrete(3)
    made = 0
    closed = 0

    def __init__(
        self,
        longest: int = 8,
        lengths: list[int] | None = None,
        ends: list[int] | None = None,
        reward: float | None = None,
        fail_at: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._longest, self._lengths, self._ends, self._reward = longest, lengths, ends, reward
        self._fail_at = fail_at
        self._steps = 0
        self._resets = -1
        Script.made += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._identity, self._episode = int(self.np_random.integers(1 << 30)), -1
        self._episode += 1
        self._resets += 1
        self._length = int(self.np_random.integers(1, self._longest + 1))
        if self._lengths is not None:
            self._length = self._lengths[min(self._resets, len(self._lengths) - 1)]
        self._end = End(int(self.np_random.integers(2)))
        if self._ends is not None:
            self._end = End(self._ends[min(self._resets, len(self._ends) - 1)])
        self._step = 0
        self._record = PLAYED[self._identity, self._episode] = Episode([self._frame().tolist()])
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        self._steps += 1
        if self._steps == self._fail_at:
            raise RuntimeError("the script broke")
        reward = float(self.np_random.normal()) + int(action) if self._reward is None else self._reward
        self._record.frames.append(self._frame().tolist())
        self._record.actions.append(int(action))
        self._record.rewards.append(reward)
        ended = self._step == self._length
        if ended:
            self._record.end = self._end
        terminated = ended and self._end is End.TERMINATED
        return self._frame(), reward, terminated, ended and not terminated, {}

    def close(self) -> None:
        Script.closed += 1

    def _frame(self) -> np.ndarray:
        return np.array([self._identity, self._episode, self._step], np.int32)


class Unseeded(Script):
    """A `Script` that plays something else each time, whatever its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return super().reset(seed=None if seed is None else secrets.randbits(31), options=options)


class Identity(gymnasium.Env[Any, Any]):
    """One step an episode: reward 1 for the action that the observation shows, else 0."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Discrete(3)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._shown = int(self.np_random.integers(3))
        return self._shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._shown, float(action == self._shown), True, False, {}


class Reach(gymnasium.Env[Any, Any]):
    """One step an episode: the reward is minus the distance of a continuous action to the observation."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._shown = self.np_random.choice([-1.0, 0.0, 1.0], 1).astype(np.float32)
        return self._shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._shown, -float(np.abs(action - self._shown)[0]), True, False, {}


class Clock(gymnasium.Env[Any, Any]):
    """Draws the number of its step as a picture [8, 8, 3], counts the pictures, and ends after four steps."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.now = self.drawn = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.now = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now += 1
        return np.full(1, self.now, np.float32), 1.0, self.now == 4, False, {}

    def render(self) -> Any:
        self.drawn += 1
        return np.full((8, 8, 3), self.now, np.uint8) if self.render_mode == "rgb_array" else None


OBSERVATION_SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "discrete from 1": spaces.Discrete(4, start=1),
    "multi discrete": spaces.MultiDiscrete([3, 2]),
    "multi binary": spaces.MultiBinary(3),
    "float32": spaces.Box(-1, 1, (2, 3), np.float32),
    "float64": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "uint8": spaces.Box(0, 255, (4, 4), np.uint8),
    "int8": spaces.Box(-128, 127, (2,), np.int8),
    "int64": spaces.Box(-(1 << 40), 1 << 40, (2,), np.int64),
    "bool": spaces.Box(0, 1, (2,), np.bool_),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))),
    "nested dict": spaces.Dict({"a": spaces.Dict({"b": spaces.MultiBinary(2)}), "c": spaces.Discrete(2, start=5)}),
    "int tuple": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))),
}
ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "discrete from 1": spaces.Discrete(4, start=1),
    "multi discrete": spaces.MultiDiscrete([3, 2], start=[0, 7]),
    "multi binary": spaces.MultiBinary((2, 2)),
    "float32": spaces.Box(np.array([-2, 0.1], np.float32), np.array([2, 0.3], np.float32)),
    "float64": spaces.Box(-0.1, 0.1, (2,), np.float64),
    "int64": spaces.Box(-1, 1, (2,), np.int64),
    "tuple": spaces.Tuple((spaces.Discrete(2, start=-1), spaces.Box(-1, 1, (1,), np.float64))),
    "nested dict": spaces.Dict({"a": spaces.Dict({"b": spaces.MultiBinary(2)}), "c": spaces.Discrete(2, start=5)}),
}


class Sampled(gymnasium.Env[Any, Any]):
    """Observations sampled from a space; an action outside its space is an error. Episodes have 4 steps."""

    def __init__(self, observation: str, action: str = "discrete", render_mode: str | None = None) -> None:
        self.observation_space = OBSERVATION_SPACES[observation]
        self.action_space = ACTION_SPACES[action]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self._steps += 1
        return self.observation_space.sample(), 1.0, False, self._steps == 4, {}


class Broken(gymnasium.Env[Any, Any]):
    """Returns `value` as `what` at step `at`, or raises in its constructor where `what` is that."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, what: str, value: float = 0.0, at: int = 1, render_mode: str | None = None) -> None:
        if what == "constructor":
            raise OSError("the licence server is down")
        self._what, self._value, self._at = what, float(value), at
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        observation, reward = np.zeros(2, np.float32), 0.0
        if self._steps == self._at and self._what == "observation":
            observation[1] = self._value
        if self._steps == self._at and self._what == "reward":
            reward = self._value
        if self._steps == self._at and self._what == "shape":
            observation = np.zeros(3, np.float32)
        return observation, reward, False, False, {}


class Faulty(Script):
    """A `Script` env that breaks: it raises, hangs, exits or crashes.

    Args:
        how: `raise`, `hang`, `exit` or `crash`. at_step, at_reset: of this instance, from 1 on.
        victims: seeds of the first resets that must have come before; `None`: all.
        makes: how often it can be made; counted, with the process ids, by files in `directory`.
    """

    def __init__(
        self,
        how: str = "raise",
        at_step: int | None = None,
        at_reset: int | None = None,
        victims: list[int] | None = None,
        makes: int | None = None,
        directory: str | None = None,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        if directory is not None:
            made = len(list(Path(directory).iterdir()))
            Path(directory, f"{made}-{os.getpid()}").touch()
            if makes is not None and made >= makes:
                raise OSError("no more licences")
        super().__init__(**kwargs)
        self._how, self._at_step, self._at_reset, self._victims = how, at_step, at_reset, victims
        self._begun, self._is_victim = 0, victims is None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._begun += 1
        if self._begun == 1 and self._victims is not None:
            self._is_victim = seed in self._victims
        if self._begun == self._at_reset:
            self._break()
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._steps + 1 == self._at_step:
            self._break()
        return super().step(action)

    def _break(self) -> None:
        if not self._is_victim:
            return
        if self._how == "hang":
            threading.Event().wait()
        if self._how == "exit":
            os._exit(139)
        if self._how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        raise RuntimeError("the faulty env broke")


def make_script(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("test/Script-v0", **{"longest": 3, **kwargs})


def halve_reward(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TransformReward(env, lambda reward: reward / 2)


def add_one(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TransformReward(env, lambda reward: reward + 1)


class seeded_once(gymnasium.Wrapper[Any, Any, Any, Any]):  # used like a function
    """Takes the first seed only, as in vector envs that reset by themselves."""

    is_seeded = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        seed, self.is_seeded = None if self.is_seeded else seed, True
        return self.env.reset(seed=seed, options=options)


@dataclass
class SignReward(Processor):
    """Rewards become their sign."""

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Return `env` with rewards of -1, 0 and 1."""
        return gymnasium.wrappers.TransformReward(env, np.sign)


@dataclass
class Drawn(Processor):
    """Observations of `Script` become pictures `[36, 40]` uint8 that `undrawn` reads."""

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Return `env` with pictures."""

        def draw(observation: np.ndarray) -> np.ndarray:
            return np.resize(observation.view(np.uint8), (36, 40))

        space = gymnasium.spaces.Box(0, 255, (36, 40), np.uint8)
        return gymnasium.wrappers.TransformObservation(env, draw, space)


def undrawn(pictures: np.ndarray) -> np.ndarray:
    """Return the observations `[..., 3]` int32 that pictures `[..., 36, 40]` show."""
    assert pictures.dtype == np.uint8 and pictures.shape[-2:] == (36, 40)
    shown = np.ascontiguousarray(pictures.reshape(*pictures.shape[:-2], -1)[..., :12]).view(np.int32)
    np.testing.assert_array_equal(pictures[..., -1, -1], pictures.reshape(*pictures.shape[:-2], -1)[..., 1439 % 12])
    return shown


@dataclass
class ShortLives(Processor):
    """An agent's episode ends every few steps, while the env's own goes on."""

    steps: int = setting(3, low=1, doc="env steps of a life; low ends often")

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Return `env` with lives."""
        return _Lives(env, self.steps)


class _Lives(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], steps: int) -> None:
        super().__init__(env)
        self._life, self._steps, self._over = steps, 0, True

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self._over or kwargs.get("seed") is not None:
            self._observation, _ = self.env.reset(**kwargs)
        self._steps, self._over = 0, False
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        self._over = terminated or truncated
        return self._observation, reward, terminated or self._steps == self._life, truncated, info


_ENVS: dict[str, Callable[..., gymnasium.Env[Any, Any]]] = {
    "Script": Script,
    "Unseeded": Unseeded,
    "Identity": Identity,
    "Reach": Reach,
    "Sampled": Sampled,
    "Broken": Broken,
    "Clock": Clock,
    "Faulty": Faulty,
}
for _name, _env in _ENVS.items():
    gymnasium.register(f"test/{_name}-v0", _env, disable_env_checker=True)
