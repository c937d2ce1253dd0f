from collections.abc import Iterator
from typing import Any

import envs
import numpy as np
import pytest
import toy
from envs import PLAYED, ShortLives, SignReward

import srl
from srl.base.env import EnvConfig
from srl.base.errors import ConfigError
from srl.runner.evaluate import Evaluator
from srl.runner.lanes import make_lanes


@pytest.fixture(autouse=True)
def nothing_played() -> Iterator[None]:
    PLAYED.clear()
    yield
    PLAYED.clear()


def make_evaluator(config: toy.Config, episodes: int, *, seed: int = 0, lanes: int = 8, **kwargs: Any) -> Any:
    env = EnvConfig("test/Script-v0", kwargs)
    made = make_lanes(env, config, [0])
    policy: Any = config.make_policy(made.spaces)
    evaluator = Evaluator(env, config, policy, episodes=episodes, seed=seed, lanes=lanes)
    return evaluator, policy, config.make_learner(made.spaces, 0).parameters


def finish(evaluator: Evaluator) -> list[float]:
    while (rewards := evaluator.step()) is None:
        assert evaluator.running
    assert not evaluator.running
    return rewards


def test_rewards_are_raw_and_of_true_episodes() -> None:
    config = toy.Config(processors=[ShortLives(2), SignReward()])
    evaluator, _, parameters = make_evaluator(config, 3, lengths=[5], ends=[0], reward=10.0)
    evaluator.begin(parameters)
    assert finish(evaluator) == [50.0] * 3
    assert evaluator.env_steps == 15


@pytest.mark.parametrize(("episodes", "lanes"), [(1, 8), (3, 8), (8, 8), (11, 4), (5, 1)])
def test_just_as_many_episodes_as_asked_the_same_number_in_each_lane(episodes: int, lanes: int) -> None:
    evaluator, _, parameters = make_evaluator(toy.Config(), episodes, lanes=lanes, longest=30)
    evaluator.begin(parameters)
    rewards = finish(evaluator)
    assert len(rewards) == episodes
    lane_count = min(episodes, lanes)
    identities = list(dict.fromkeys(identity for identity, _ in PLAYED))
    assert len(identities) == lane_count
    quotas = [episodes // lane_count + (lane < episodes % lane_count) for lane in range(lane_count)]
    wanted = [
        sum(PLAYED[identity, episode].rewards)
        for identity, quota in zip(identities, quotas, strict=True)
        for episode in range(quota)
    ]
    np.testing.assert_allclose(rewards, wanted, rtol=1e-5)


def test_it_acts_greedily() -> None:
    evaluator, policy, parameters = make_evaluator(toy.Config(epsilon=1.0), 4)
    evaluator.begin({**parameters, "bias": np.array([0, 99, 0], np.float32)})
    finish(evaluator)
    assert set(policy.explored) == {None}
    assert {action for episode in PLAYED.values() for action in episode.actions} == {1}


def test_a_seed_gives_the_same_result_and_each_round_plays_other_episodes() -> None:
    results = []
    for seed in (3, 3, 4):
        evaluator, _, parameters = make_evaluator(toy.Config(), 4, seed=seed)
        for _ in range(2):
            evaluator.begin(parameters)
            results.append(finish(evaluator))
    assert results[:2] == results[2:4]
    assert len({str(result) for result in results}) == 4


def test_an_evaluation_keeps_the_parameters_it_began_with() -> None:
    evaluator, _, parameters = make_evaluator(toy.Config(), 1, lengths=[4])
    evaluator.begin(parameters)
    evaluator.step()
    assert evaluator.running
    evaluator.begin(parameters)  # starts over
    finish(evaluator)
    assert evaluator.env_steps == 4


def test_it_has_envs_of_its_own_and_closes_them() -> None:
    made, closed = envs.Script.made, envs.Script.closed
    evaluator, _, parameters = make_evaluator(toy.Config(), 5)
    assert envs.Script.made == made + 1 + 5
    evaluator.begin(parameters)
    finish(evaluator)
    evaluator.close()
    assert envs.Script.closed == closed + 5


def test_runner_evaluate() -> None:
    runner = srl.Runner(EnvConfig("test/Script-v0", {"reward": 10.0, "lengths": [2, 3]}), toy.Config(), seed=1)
    assert sorted(runner.evaluate()) == [20.0] * 8 + [30.0] * 2
    assert sorted(runner.evaluate(max_episodes=9)) == [20.0] * 8 + [30.0]
    assert runner.evaluate(3) == [20.0] * 3
    assert all(type(reward) is float for reward in runner.evaluate(1))
    with pytest.raises(ConfigError, match="max_episodes must be at least 1, not 0"):
        runner.evaluate(0)


def test_runner_evaluate_is_repeatable() -> None:
    env = EnvConfig("test/Script-v0", {"longest": 20})
    first = srl.Runner(env, toy.Config(), seed=1)
    assert first.evaluate(5) == first.evaluate(5) == srl.Runner(env, toy.Config(), seed=1).evaluate(5)
    assert first.evaluate(5) != srl.Runner(env, toy.Config(), seed=2).evaluate(5)
