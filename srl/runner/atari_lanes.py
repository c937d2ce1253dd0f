"""Atari lanes stepped by ALE's own vector env, whose threads use every core of the machine.

`make_lanes` takes them where nothing but frames is processed and games have no randomness of their own. What an agent
acts on or bootstraps from is the same as without them, to the byte; only a game's limit of frames, where it falls into
the middle of a step, is looked at after that step.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from srl.base.env import EPISODE_STATS, AgentEnv, EnvConfig
from srl.base.spaces import Spaces

FrameFunction = Callable[[np.ndarray], np.ndarray]

_HEIGHT, _WIDTH = 210, 160
_KNOWN = {"game", "frameskip", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode"}
_NO_LIMIT = 2**30


class AtariLanes(VectorEnv[Any, Any, Any]):
    """Games of one kind; resets in the step that ends an episode, and reports raw scores.

    Args:
        game: keyword arguments of Gymnasium's Atari envs.
        functions: applied in order to each raw frame `[210, 160, 3]` uint8.
    """

    def __init__(self, game: Mapping[str, Any], spaces: Spaces, functions: Sequence[FrameFunction], count: int) -> None:
        from ale_py.vector_env import AtariVectorEnv

        self._games = AtariVectorEnv(
            game["game"],
            count,
            num_threads=min(count, cores()),
            # The limit is kept here: ALE's vector env shows a game that it stops one step too early.
            max_num_frames_per_episode=_NO_LIMIT,
            full_action_space=game["full_action_space"],
            repeat_action_probability=0.0,
            frameskip=game["frameskip"],
            autoreset_mode=AutoresetMode.SAME_STEP,
            # Frames as they are: processors make of them what they make of a single env's.
            img_height=_HEIGHT,
            img_width=_WIDTH,
            grayscale=False,
            stack_num=1,
            maxpool=False,
            noop_max=0,
            use_fire_reset=False,
            episodic_life=False,
            reward_clipping=False,
        )
        self._max_frames = game["max_num_frames_per_episode"]
        self._functions = list(functions)
        self.num_envs = count
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self._frames = np.zeros((count, *spaces.observation.shape), np.uint8)
        self._rewards, self._lengths = np.zeros(count), np.zeros(count, np.int64)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start all games; `seed`, one a lane, says only that consoles are switched on anew, as single envs do then."""
        frames, _ = self._games.reset(seed=None if seed is None else np.asarray(seed))
        self._process(frames, range(self.num_envs))
        self._rewards[:], self._lengths[:] = 0, 0
        return self._frames.copy(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all games with `actions[B]`."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: np.ndarray) -> None:
        """Let threads step all games with `actions[B]`."""
        self._games.send(np.asarray(actions, np.int32))

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Wait for the threads and return what `step` returns."""
        frames, rewards, terminated, _, info = self._games.recv()
        self._rewards += rewards
        self._lengths += 1
        # A finished game's last frame is not to be had: its place is taken by the one before, which nothing looks at,
        # as no value follows a terminal state.
        self._process(frames, np.flatnonzero(~terminated))
        last = self._frames.copy()
        truncated = ~terminated & (info["episode_frame_number"] >= self._max_frames)
        if truncated.any():
            frames, _ = self._games.reset(options={"reset_mask": truncated})
        ended = terminated | truncated
        self._process(frames, np.flatnonzero(ended))
        statistics = {"r": self._rewards.copy(), "l": self._lengths.copy()}
        self._rewards[ended], self._lengths[ended] = 0, 0
        final = {EPISODE_STATS: statistics, f"_{EPISODE_STATS}": ended}
        result = {"final_obs": last, "final_info": final} if ended.any() else {}
        return self._frames.copy(), np.asarray(rewards, np.float32), terminated, truncated, result

    def _process(self, frames: np.ndarray, lanes: Sequence[int] | np.ndarray) -> None:
        for lane in lanes:
            frame = frames[lane, 0]
            for function in self._functions:
                frame = function(frame)
            self._frames[lane] = frame


def atari_lanes(config: EnvConfig, sample: AgentEnv, count: int) -> AtariLanes | None:
    """Return native lanes of the same games as the env `sample`, `None` where only single envs will do."""
    functions = [function for processor in sample.processors if (function := processor.frame_function) is not None]
    plain = not (config.gym_make_func or config.gym_wrappers or config.render_observation or config.max_episode_steps)
    if not config.name.startswith("ALE/") or not plain or config.frameskip > 1 or cores() < 2:
        return None
    game = {**gymnasium.spec(config.name).kwargs, **config.kwargs}
    is_known = set(game) == _KNOWN and isinstance(game["frameskip"], int) and game["repeat_action_probability"] == 0
    is_usual = sample.unwrapped.observation_space.shape == (_HEIGHT, _WIDTH, 3)
    if not is_known or not is_usual or len(functions) < len(sample.processors):
        return None
    return AtariLanes(game, sample.spaces, functions, count)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
