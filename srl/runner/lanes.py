"""Lanes: several copies of one env stepped together, with one rule for episode ends.

Gymnasium's vector envs reset in three ways (next step, same step, not at all). `Lanes` hides which:
every step returns the real last frame of an episode, and separately the first frame of the next one.
Actors and evaluators step envs only through this.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from srl.base.algorithm import RLConfig, Tree
from srl.base.env import EPISODE_STATS, AgentEnv, EnvConfig, make_agent_env
from srl.base.spaces import Spaces
from srl.runner.atari_lanes import atari_lanes
from srl.runner.env_faults import REPLACED, EnvWatch, GuardedEnv, LaneRecord
from srl.runner.env_process import ProcessLanes


@dataclass(frozen=True)
class LaneStep:
    """One step of `B` lanes.

    Attributes:
        active: `[B]` bool; false where the vector env used this step to reset the lane or a fault cost it, so that
            nothing but `started` means anything for it.
        frames: `[B, *shape]` where each step arrived, at an episode's end its real last frame.
        rewards: `[B]` float32. terminated, truncated: `[B]` bool.
        started: `[B]` bool; lanes that begin an episode now, with `first_frames`.
        replaced: `[B]` bool; lanes among them whose env was replaced in the middle of an episode, which never ends.
        first_frames: `[B, *shape]`.
        episode_rewards, episode_lengths: of true episodes that ended, as the env itself rewarded them.
        episode_lanes: the lanes these belong to.
    """

    active: np.ndarray
    frames: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    started: np.ndarray
    replaced: np.ndarray
    first_frames: np.ndarray
    episode_rewards: Sequence[float]
    episode_lengths: Sequence[int]
    episode_lanes: Sequence[int]


class Lanes:
    """A vector env of agent envs; any of Gymnasium's autoreset modes will do."""

    def __init__(self, env: VectorEnv[Any, Any, Any], spaces: Spaces) -> None:
        self._env = env
        self.spaces = spaces
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._resetting = np.zeros(env.num_envs, np.bool_)
        self._actions: np.ndarray | None = None
        self._next_seed: Callable[[int], int] | None = None
        self.is_overlapping = hasattr(env, "step_async")
        """Whether envs are stepped between `step_async` and `step_wait`, while this thread does something else."""

    def __len__(self) -> int:
        return int(self._env.num_envs)

    def reset(self, seeds: Sequence[int], next_seed: Callable[[int], int] | None = None) -> np.ndarray:
        """Start an episode in every lane and return the first frames `[B, *shape]`.

        Args:
            next_seed: gives the seed of a lane's next episode, each time the env's own episode has ended; without
                it, and in vector envs that reset by themselves, the envs go on with their own random numbers.
        """
        self._next_seed = next_seed
        frames, _ = self._env.reset(seed=list(seeds))  # type: ignore[arg-type]  # vector envs take one each
        self._resetting[:] = False
        return np.asarray(frames)

    def step(self, actions: np.ndarray) -> LaneStep:
        """Step all lanes with `actions[B, ...]`."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step of all lanes with `actions[B, ...]`; `step_wait` has to follow."""
        self._actions = actions
        if self.is_overlapping:
            self._env.step_async(actions)  # type: ignore[attr-defined]

    def step_wait(self) -> LaneStep:
        """Return what the step that was begun led to."""
        env: Any = self._env
        stepped = env.step_wait() if self.is_overlapping else env.step(self._actions)
        frames, rewards, terminated, truncated, info = stepped
        replaced = np.asarray(info.get(REPLACED, np.zeros(len(self), np.bool_)))
        active = ~(self._resetting | replaced)
        terminated, truncated = terminated & active, truncated & active
        ended = terminated | truncated
        first_frames, started = frames, ended
        statistics: Any = info
        if self._mode is AutoresetMode.NEXT_STEP:
            started = self._resetting
            self._resetting = ended
        elif ended.any() and self._mode is AutoresetMode.SAME_STEP:
            frames = frames.copy()
            frames[ended] = np.stack(list(info["final_obs"][ended]))
            statistics = info["final_info"]
        finished = np.flatnonzero(statistics.get(f"_{EPISODE_STATS}", ()))
        if self._mode is AutoresetMode.DISABLED and ended.any():
            seeds: list[int | None] = [None] * len(self)
            if self._next_seed is not None:
                for lane in finished[ended[finished]]:
                    seeds[lane] = self._next_seed(int(lane))
            first_frames, _ = env.reset(seed=seeds, options={"reset_mask": ended})
        totals = statistics.get(EPISODE_STATS)
        return LaneStep(
            active=active,
            frames=frames,
            rewards=rewards.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            started=started | replaced,
            replaced=replaced,
            first_frames=first_frames,
            episode_rewards=[float(totals["r"][lane]) for lane in finished],
            episode_lengths=[int(totals["l"][lane]) for lane in finished],
            episode_lanes=[int(lane) for lane in finished],
        )

    @property
    def can_replay(self) -> bool:
        """Whether one lane can be brought to where it was while the others stay where they are."""
        return self._mode is AutoresetMode.DISABLED and isinstance(self._env, SyncVectorEnv)

    def replay(self, lane: int, seed: int, actions: Iterable[Any]) -> tuple[np.ndarray, float] | None:
        """Play a lane's episode from its seed; returns the frame it is at then and the sum of its rewards.

        `None` where the env's own episode ended on the way. The lane goes on from there.
        """
        env = self._env.envs[lane]  # type: ignore[attr-defined]  # of a vector env that `can_replay`
        frame, _ = env.reset(seed=seed)
        total = 0.0
        for action in actions:
            frame, reward, terminated, truncated, info = env.step(action)
            total += float(np.float32(reward))
            if terminated or truncated:
                if EPISODE_STATS in info:
                    return None
                frame, _ = env.reset()
        return np.asarray(frame), total

    def close(self) -> None:
        """Close the envs."""
        self._env.close()


def make_lanes(
    env_config: EnvConfig,
    rl_config: RLConfig,
    lanes: Sequence[int],
    *,
    training: bool = True,
    watch: EnvWatch | None = None,
) -> Lanes:
    """Make one env a lane number; raises what `make_agent_env` raises.

    Args:
        watch: takes the faults of envs, which are replaced then; without one a fault is raised at once.
    """
    if env_config.env_processes:
        processes = ProcessLanes(env_config, rl_config, lanes, training=training, watch=watch)
        return Lanes(processes, processes.spaces)
    makes = [functools.partial(make_agent_env, env_config, rl_config, lane=lane, training=training) for lane in lanes]
    first = makes[0]()
    native = atari_lanes(env_config, first, len(lanes))
    if native is not None:
        first.close()
        return Lanes(native, first.spaces)
    envs = [first, *(make() for make in makes[1:])]
    if watch is None:
        return join_lanes(envs)
    kind = "lane" if training else "evaluation lane"
    return join_lanes(
        [
            GuardedEnv(env, make, LaneRecord(f"{env_config.name} {kind} {lane}", lane, watch), watch)
            for env, make, lane in zip(envs, makes, lanes, strict=True)
        ]
    )


def make_lane_groups(
    env_config: EnvConfig, rl_config: RLConfig, lanes: Sequence[int], *, watch: EnvWatch | None = None
) -> list[tuple[Sequence[int], Lanes]]:
    """Make lanes in groups to be stepped in turn, each with its numbers; the rest is as in `make_lanes`.

    Where envs are stepped by threads or processes of their own there are two, so that one is stepped while the policy
    acts in the other; elsewhere one.
    """
    halves = (lanes[::2], lanes[1::2])
    if not env_config.env_processes or len(lanes) < 2:
        whole = make_lanes(env_config, rl_config, lanes, watch=watch)
        if not whole.is_overlapping or len(lanes) < 2:
            return [(lanes, whole)]
        whole.close()
    first = make_lanes(env_config, rl_config, halves[0], watch=watch)
    try:
        return [(halves[0], first), (halves[1], make_lanes(env_config, rl_config, halves[1], watch=watch))]
    except BaseException:
        first.close()
        raise


def join_lanes(envs: Sequence[AgentEnv | GuardedEnv]) -> Lanes:
    """Return lanes over envs that were made already."""
    factories = [lambda env=env: env for env in envs]
    return Lanes(SyncVectorEnv(factories, autoreset_mode=AutoresetMode.DISABLED), envs[0].spaces)


class Stacks:
    """The last `window_length` frames of each lane, oldest first, as `[B, window_length, *shape]`."""

    def __init__(self, frames: np.ndarray, window_length: int) -> None:
        self.array = np.repeat(frames[:, None], window_length, axis=1)

    def push(self, step: LaneStep) -> None:
        """Add a step's frames; a new episode starts with its first frame repeated."""
        if self.array.shape[1] > 1:
            self.array[:, :-1] = self.array[:, 1:]
        self.array[:, -1] = step.frames
        if step.started.any():
            self.array[step.started] = step.first_frames[step.started, None]


def restarted(state: Tree | None, initial: Tree | None, started: np.ndarray) -> Tree | None:
    """Return a policy's recurrent state `[B, ...]` with the initial one in the lanes that begin an episode."""
    if state is None or initial is None or not started.any():
        return state
    return {
        name: restarted(value, initial[name], started)
        if isinstance(value, Mapping)
        else np.where(started.reshape(-1, *[1] * (np.ndim(value) - 1)), initial[name], value)
        for name, value in state.items()
    }
