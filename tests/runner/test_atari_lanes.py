"""Native Atari lanes give what single envs give, and are taken only where they can."""

from typing import Any

import numpy as np
import pytest

from srl.algorithms import dqn
from srl.base.env import EnvConfig, make_agent_env
from srl.base.processor import Processor
from srl.rl.processors.atari_processor import AtariProcessor
from srl.rl.processors.image_processor import ImageProcessor
from srl.runner import atari_lanes as module
from srl.runner.atari_lanes import AtariLanes, atari_lanes
from srl.runner.lanes import Lanes, join_lanes, make_lane_groups, make_lanes

pytest.importorskip("ale_py")

LANES = 3


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 2)


def config_of(*processors: Processor) -> dqn.Config:
    return dqn.Config(processors=list(processors) or [ImageProcessor(trimming=(30, 0, 210, 160), resize=(84, 84))])


def env_of(game: str, **kwargs: Any) -> EnvConfig:
    return EnvConfig(f"ALE/{game}-v5", kwargs={"repeat_action_probability": 0, **kwargs})


@pytest.mark.parametrize(
    ("env", "ends"),
    [
        (env_of("Pong", frameskip=7), {"terminated"}),
        pytest.param(
            env_of("Breakout", frameskip=4, max_num_frames_per_episode=600),
            {"terminated", "truncated"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            env_of("Seaquest", frameskip=4, full_action_space=True, max_num_frames_per_episode=400),
            {"truncated"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["pong", "breakout", "seaquest"],
)
def test_native_lanes_equal_single_envs(env: EnvConfig, ends: set[str]) -> None:
    config = config_of()
    native = make_lanes(env, config, range(LANES))
    singles = join_lanes([make_agent_env(env, config, lane=lane) for lane in range(LANES)])
    assert native.spaces == singles.spaces
    np.testing.assert_array_equal(native.reset([5, 6, 7]), singles.reset([5, 6, 7]))
    rng, seen = np.random.default_rng(0), set()
    for _ in range(700):
        actions = rng.integers(0, native.spaces.action_count, LANES)
        one, other = native.step(actions), singles.step(actions)
        for name in ("active", "rewards", "terminated", "truncated", "started"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
        # No value follows a terminal state, and its frame is not shown by ALE's vector env.
        used = ~one.terminated
        np.testing.assert_array_equal(one.frames[used], other.frames[used])
        np.testing.assert_array_equal(one.first_frames[one.started], other.first_frames[other.started])
        for name in ("episode_rewards", "episode_lengths", "episode_lanes"):
            assert list(getattr(one, name)) == list(getattr(other, name))
        seen |= {name for name in ("terminated", "truncated") if getattr(one, name).any()}
    assert seen == ends


def test_a_reset_in_the_middle_of_games_equals_that_of_single_envs() -> None:
    env, config = env_of("Assault", frameskip=4), config_of()  # what its console remembers shows in the next game
    native = make_lanes(env, config, range(LANES))
    singles = join_lanes([make_agent_env(env, config, lane=lane) for lane in range(LANES)])
    rng = np.random.default_rng(0)
    for seeds in ([0, 1, 2], [2**31 - 1, 4, 5]):
        np.testing.assert_array_equal(native.reset(seeds), singles.reset(seeds))
        for actions in rng.integers(0, native.spaces.action_count, (40, LANES)):
            np.testing.assert_array_equal(native.step(actions).frames, singles.step(actions).frames)


def is_native(env: EnvConfig, config: dqn.Config) -> bool:
    return isinstance(atari_lanes(env, make_agent_env(env, config), 2), AtariLanes)


def test_native_lanes_are_taken_only_where_they_give_the_same() -> None:
    plain = env_of("Pong")
    assert is_native(plain, config_of())
    assert is_native(plain, dqn.Config()), "the algorithm's own processors are of frames alone"
    assert not is_native(plain, config_of(AtariProcessor(), ImageProcessor())), "lives and starts are no frames"
    assert not is_native(env_of("Pong", repeat_action_probability=0.25), config_of()), "seeds differ"
    assert not is_native(env_of("Pong", mode=1), config_of())
    assert not is_native(EnvConfig("ALE/Pong-v5", plain.kwargs, max_episode_steps=50), config_of())
    assert not is_native(EnvConfig("ALE/Pong-v5", plain.kwargs, frameskip=2), config_of())


def test_one_core_gains_nothing_from_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 1)
    assert not is_native(env_of("Pong"), config_of())
    assert isinstance(make_lanes(env_of("Pong"), config_of(), range(2)), Lanes)


def test_an_actor_gets_two_groups_where_threads_step_one_while_it_acts_in_the_other() -> None:
    env, config = env_of("Pong", frameskip=7), config_of()
    groups = make_lane_groups(env, config, range(1, 10, 2))
    assert [list(numbers) for numbers, _ in groups] == [[1, 5, 9], [3, 7]]
    whole = make_lanes(env, config, range(LANES))
    parts = [make_lanes(env, config, [number]) for number in range(LANES)]
    np.testing.assert_array_equal(whole.reset(range(LANES)), np.concatenate([part.reset([0]) for part in parts]))
    for actions in np.random.default_rng(0).integers(0, 6, (60, LANES)):
        for part, action in zip(parts, actions, strict=True):
            part.step_async(np.array([action]))
        expected = whole.step(actions)
        steps = [part.step_wait() for part in parts]
        np.testing.assert_array_equal(expected.frames, np.concatenate([step.frames for step in steps]))
    assert len(make_lane_groups(env, config, [0])) == 1
    assert len(make_lane_groups(EnvConfig("CartPole-v1"), dqn.Config(), range(4))) == 1, "no threads, no groups"
