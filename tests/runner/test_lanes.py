from collections.abc import Sequence

import envs
import numpy as np
import pytest
import toy
from envs import OBSERVATION_SPACES, ShortLives, SignReward
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from srl.base.env import EnvConfig, as_seeds, make_agent_env
from srl.base.errors import EnvError
from srl.base.segment import End, Segment
from srl.runner.actor import Actor
from srl.runner.lanes import Lanes, Stacks, make_lanes

MODES = list(AutoresetMode)


def lanes_in_mode(env: EnvConfig, config: toy.Config, numbers: Sequence[int], mode: AutoresetMode) -> Lanes:
    made = [make_agent_env(env, config, lane=number) for number in numbers]
    factories = [lambda env=env: env for env in made]
    return Lanes(SyncVectorEnv(factories, autoreset_mode=mode), made[0].spaces)


def actor_of(lanes: Lanes, config: toy.Config, numbers: Sequence[int], seed: int = 0) -> Actor:
    policy = config.make_policy(lanes.spaces)
    actor = Actor(lanes, policy, config, seed=seed, lane_numbers=numbers, total_lanes=len(numbers), distributed=False)
    actor.set_parameters(config.make_learner(lanes.spaces, 0).parameters, 0)
    return actor


def whole_episodes(actor: Actor, steps: int) -> tuple[dict[int, list[Segment]], list[float]]:
    segments: dict[int, list[Segment]] = {}
    rewards: list[float] = []
    for _ in range(steps):
        produced = actor.step()
        rewards += produced.episode_rewards
        for segment in produced.segments:
            segments.setdefault(segment.lane, []).append(segment)
    return segments, rewards


def assert_same(first: Segment, second: Segment) -> None:
    for name in ("frames", "actions", "rewards"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), name)
    for name in ("end", "context", "lane", "sequence", "version"):
        assert getattr(first, name) == getattr(second, name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [1, 3])
def test_every_autoreset_mode_gives_the_segments_of_single_env_runs(mode: AutoresetMode, window: int) -> None:
    env = EnvConfig("test/Script-v0", {"longest": 12}, gym_wrappers=[envs.seeded_once])
    config = toy.Config(window_length=window, n_step=2, segment_length=4, epsilon=0.0)
    numbers = range(4)
    together, rewards = whole_episodes(actor_of(lanes_in_mode(env, config, numbers, mode), config, numbers), 150)
    assert rewards
    for number in numbers:
        alone, _ = whole_episodes(actor_of(make_lanes(env, config, [number]), config, [number]), 150)
        count = min(len(together[number]), len(alone[number]))
        assert count > 10
        assert {segment.end for segment in alone[number][:count]} == set(End)
        for first, second in zip(together[number], alone[number], strict=False):
            assert_same(first, second)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_returns_the_real_last_frame_and_the_next_first_one(mode: AutoresetMode) -> None:
    env = EnvConfig("test/Script-v0", {"lengths": [3], "ends": [0, 1], "reward": 2.0})
    lanes = lanes_in_mode(env, toy.Config(), range(2), mode)
    first = lanes.reset(as_seeds(0, range(2), 0))
    identities = first[:, 0]
    for episode in range(2):
        for number in range(1, 4):
            step = lanes.step(np.zeros(2, np.int32))
            assert step.active.all()
            np.testing.assert_array_equal(step.frames[:, 0], identities)
            np.testing.assert_array_equal(step.frames[:, 1:], [[episode, number]] * 2)
            np.testing.assert_array_equal(step.rewards, [2.0, 2.0])
            assert step.rewards.dtype == np.float32
            ended = number == 3
            assert step.terminated.tolist() == [ended and episode == 0] * 2
            assert step.truncated.tolist() == [ended and episode == 1] * 2
            assert list(step.episode_rewards) == [6.0, 6.0] * ended
            assert list(step.episode_lengths) == [3, 3] * ended
            assert list(step.episode_lanes) == [0, 1] * ended
            assert step.started.tolist() == [ended and mode is not AutoresetMode.NEXT_STEP] * 2
        if mode is AutoresetMode.NEXT_STEP:
            step = lanes.step(np.zeros(2, np.int32))
            assert not step.active.any()
            assert not (step.terminated | step.truncated).any()
            assert not step.episode_rewards
        assert step.started.all()
        np.testing.assert_array_equal(step.first_frames[:, 1:], [[episode + 1, 0]] * 2)


@pytest.mark.parametrize("mode", MODES)
def test_only_the_lane_that_ends_starts_anew(mode: AutoresetMode) -> None:
    config = toy.Config(window_length=2)
    made = [
        make_agent_env(EnvConfig("test/Script-v0", {"lengths": [2 if lane == 2 else 9], "ends": [1]}), config)
        for lane in range(4)
    ]
    lanes = Lanes(SyncVectorEnv([lambda env=env: env for env in made], autoreset_mode=mode), made[0].spaces)
    stacks = Stacks(lanes.reset(as_seeds(0, range(4), 0)), 2)
    lanes.step(np.zeros(4, np.int32))
    step = lanes.step(np.zeros(4, np.int32))
    assert step.truncated.tolist() == [False, False, True, False]
    assert not step.terminated.any()
    stacks.push(step)
    if mode is AutoresetMode.NEXT_STEP:
        step = lanes.step(np.zeros(4, np.int32))
        assert step.active.tolist() == [True, True, False, True]
        stacks.push(step)
    assert step.started.tolist() == [False, False, True, False]
    # The new episode's first frame is repeated, nothing of the old one is left.
    np.testing.assert_array_equal(stacks.array[2, :, 1:], [[1, 0], [1, 0]])
    assert (stacks.array[[0, 1, 3], :, 1] == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_episode_rewards_are_raw_and_of_true_episodes(mode: AutoresetMode) -> None:
    env = EnvConfig("test/Script-v0", {"lengths": [5], "ends": [0], "reward": 10.0})
    config = toy.Config(processors=[ShortLives(2), SignReward()])
    lanes = lanes_in_mode(env, config, range(2), mode)
    lanes.reset([1, 2])
    rewards, lengths, ends, learned = [], [], 0, 0.0
    for _ in range(20):
        step = lanes.step(np.zeros(2, np.int32))
        rewards += step.episode_rewards
        lengths += step.episode_lengths
        ends += int(step.terminated.sum())
        learned = max(learned, float(step.rewards.max()))
    assert set(rewards) == {50.0}
    assert set(lengths) == {5}
    assert ends > len(rewards)
    assert learned == 1.0


@pytest.mark.parametrize("name", OBSERVATION_SPACES)
def test_segments_keep_the_dtype_of_the_space(name: str) -> None:
    env = EnvConfig("test/Sampled-v0", {"observation": name})
    config = toy.Config()
    lanes = make_lanes(env, config, range(2))
    frames = lanes.reset([0, 1])
    step = lanes.step(np.zeros(2, np.int32))
    spec = lanes.spaces.observation
    for array in (frames, step.frames, step.first_frames):
        assert (array.shape, array.dtype.name) == ((2, *spec.shape), spec.dtype)
    stacks = Stacks(frames, 4)
    stacks.push(step)
    assert (stacks.array.shape, stacks.array.dtype.name) == ((2, 4, *spec.shape), spec.dtype)


def test_an_error_in_one_lane_names_it() -> None:
    lanes = make_lanes(EnvConfig("test/Broken-v0", {"what": "reward", "value": np.inf, "at": 3}), toy.Config(), [40])
    lanes.reset([0])
    lanes.step(np.zeros(1, np.int32))
    lanes.step(np.zeros(1, np.int32))
    with pytest.raises(EnvError, match="test/Broken-v0 lane 40 returned a reward inf at step 3"):
        lanes.step(np.zeros(1, np.int32))


def test_close_closes_every_env() -> None:
    closed = envs.Script.closed
    make_lanes(EnvConfig("test/Script-v0"), toy.Config(), range(3)).close()
    assert envs.Script.closed == closed + 3
