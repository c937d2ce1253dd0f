"""What holds for every registered algorithm; its own tests say what makes it what it is."""

import copy
import json
from pathlib import Path
from typing import Any

import envs  # noqa: F401  registers the envs
import numpy as np
import pytest

import srl
from srl.base.algorithm import ALGORITHMS, Exploration, RLConfig, Tree
from srl.base.env import EnvConfig
from srl.base.errors import CheckpointError
from srl.base.spaces import DiscreteActions
from srl.runner.actor import Actor
from srl.runner.lanes import make_lanes
from srl.runner.plugins import config_from_dict, load_plugins

load_plugins()
NAMES = sorted(name for name, cls in ALGORITHMS.items() if cls.__module__.startswith("srl."))
every_algorithm = pytest.mark.parametrize("name", NAMES)


def small(name: str) -> Any:
    """Return a config that learns small problems in seconds, as far as the algorithm has such settings."""
    config: Any = ALGORITHMS[name]()
    fields = config.documentation()
    if "memory" in fields:
        config.memory.capacity, config.memory.warmup_size = 2000, 64
    if "hidden_block" in fields:
        config.hidden_block.set_mlp((32,))
    if "target_model_update_interval" in fields:
        config.target_model_update_interval = 50
    if "lr" in fields:
        config.lr = 0.01
    return config


def simple_env(config: RLConfig) -> EnvConfig:
    return EnvConfig("test/Identity-v0" if config.action_type == "discrete" else "test/Reach-v0")


def trained(name: str, updates: int, seed: int = 0) -> srl.Runner:
    config = small(name)
    runner = srl.Runner(simple_env(config), config, seed=seed)
    runner.train(max_train_count=updates, eval_episodes=0, progress=False)
    return runner


def leaves(tree: Tree, path: str = "") -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{path}{name}/") if hasattr(value, "items") else {f"{path}{name}": np.asarray(value)}
    return found


def assert_equal(first: Tree, second: Tree) -> None:
    expected = leaves(second)
    assert leaves(first).keys() == expected.keys()
    for path, array in leaves(first).items():
        np.testing.assert_array_equal(array, expected[path], path)


def make_batches(config: RLConfig, env: EnvConfig, updates: int) -> tuple[Any, Any]:
    """Return spaces and batches of real play."""
    lanes = make_lanes(env, config, range(4))
    policy = config.make_policy(lanes.spaces)
    actor = Actor(lanes, policy, config, seed=0, lane_numbers=range(4), total_lanes=4, distributed=False)
    actor.set_parameters(config.make_learner(lanes.spaces, 0).parameters, 0)
    memory = config.make_memory(lanes.spaces, 0, None)
    while len(memory) < memory.warmup_size:
        memory.insert(actor.step().segments)
    return lanes.spaces, [memory.sample(1, update).batches for update in range(updates)]


@every_algorithm
def test_a_problem_of_one_step_is_learned(name: str) -> None:
    runner = trained(name, 400)
    untrained = srl.Runner(runner.env_config, runner.config, seed=0).evaluate(50)
    best = 1.0 if runner.config.action_type == "discrete" else 0.0
    assert np.mean(runner.evaluate(50)) > best - 0.15
    assert np.mean(untrained) < best - 0.2


@every_algorithm
def test_a_seed_gives_the_same_result_bit_for_bit(name: str, tmp_path: Path) -> None:
    runners = [trained(name, 40), trained(name, 40)]
    assert_equal(runners[0].learner.get_state(), runners[1].learner.get_state())
    other = trained(name, 40, seed=1)
    with pytest.raises(AssertionError):
        assert_equal(other.parameters, runners[0].parameters)
    # Saved and loaded, nothing has changed.
    runners[0].save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    assert_equal(other.learner.get_state(), runners[0].learner.get_state())
    assert other.env_steps == runners[0].env_steps
    runners[0].save_parameter(tmp_path / "p.safetensors")
    fresh = srl.Runner(other.env_config, small(name), seed=7)
    fresh.load_parameter(tmp_path / "p.safetensors")
    assert_equal(fresh.parameters, runners[0].parameters)
    fresh.seed = other.seed
    assert fresh.evaluate(5) == other.evaluate(5)


@every_algorithm
def test_a_learner_goes_on_exactly_from_its_state(name: str) -> None:
    config = small(name)
    spaces, batches = make_batches(config, simple_env(config), 8)
    first, second = config.make_learner(spaces, 0), config.make_learner(spaces, 1)
    for batch in batches[:4]:
        first.update(batch)
    published, state = first.parameters, first.get_state()
    before, kept = copy.deepcopy(leaves(published)), copy.deepcopy(leaves(state))
    second.check_valid(state)
    second.set_state(state)
    for batch in batches[4:]:
        infos = first.update(batch), second.update(batch)
        assert infos[0].metrics == infos[1].metrics
        assert infos[0].metrics
        assert all(np.isfinite(value) for value in infos[0].metrics.values())
    assert first.train_count == second.train_count == 8
    assert_equal(first.get_state(), second.get_state())
    # What was published or saved before does not change when learning goes on.
    assert_equal(leaves(published), before)
    assert_equal(leaves(state), kept)
    with pytest.raises(AssertionError):
        assert_equal(first.parameters, before)


@every_algorithm
def test_a_state_of_something_else_is_refused(name: str) -> None:
    config = small(name)
    spaces = make_lanes(simple_env(config), config, [0]).spaces
    learner = config.make_learner(spaces, 0)
    state = learner.get_state()
    with pytest.raises(CheckpointError):
        learner.check_valid({})
    with pytest.raises(CheckpointError):
        learner.set_state({key: value for key, value in state.items() if key != next(iter(state))})
    with pytest.raises(CheckpointError):
        learner.set_parameters({})
    with pytest.raises(CheckpointError):
        config.make_policy(spaces).load({})


SPACES = [
    ("discrete from 1", "discrete from 1"),
    ("multi discrete", "float64"),
    ("uint8", "multi binary"),
    ("bool", "tuple"),
    ("nested dict", "nested dict"),
]


@every_algorithm
@pytest.mark.parametrize(("observation", "action"), SPACES)
def test_spaces_are_learned_from(name: str, observation: str, action: str) -> None:
    config = small(name)
    if config.action_type == "continuous":
        action = "float64"
    env = EnvConfig("test/Sampled-v0", {"observation": observation, "action": action})
    config.action_division_num = 2
    spaces, (batch,) = make_batches(config, env, 1)
    assert batch["observation_tm1"].dtype == spaces.observation.dtype
    assert batch["observation_tm1"].shape[2:] == (1, *spaces.observation.shape)
    learner = config.make_learner(spaces, 0)
    learner.update(batch)
    assert all(np.isfinite(array).all() for array in leaves(learner.parameters).values())


@every_algorithm
def test_lanes_do_not_affect_each_other_and_greedy_actions_need_no_randomness(name: str) -> None:
    config = small(name)
    lanes = make_lanes(simple_env(config), config, range(6))
    frames = lanes.reset(range(6))[:, None]
    policy = config.make_policy(lanes.spaces)
    parameters = policy.load(config.make_learner(lanes.spaces, 3).parameters)
    together = [
        policy.act(parameters, frames, policy.initial_state(6), np.random.default_rng(seed), None).action
        for seed in (0, 1)
    ]
    np.testing.assert_array_equal(together[0], together[1])
    for lane in range(6):
        alone = policy.act(parameters, frames[lane : lane + 1], policy.initial_state(1), np.random.default_rng(0), None)
        np.testing.assert_allclose(alone.action[0], together[0][lane], rtol=1e-5, atol=1e-6)
    discrete = isinstance(lanes.spaces.action, DiscreteActions)
    assert together[0].dtype == (np.int32 if discrete else np.float32)


@every_algorithm
def test_exploration_follows_from_the_random_generator(name: str) -> None:
    config = small(name)
    lanes = make_lanes(simple_env(config), config, range(64))
    frames = lanes.reset(range(64))[:, None]
    policy = config.make_policy(lanes.spaces)
    parameters = policy.load(config.make_learner(lanes.spaces, 0).parameters)
    explore = Exploration(0, np.arange(64), 64, distributed=False)

    def act(seed: int) -> list[Any]:
        rng = np.random.default_rng(seed)
        actions = [policy.act(parameters, frames, policy.initial_state(64), rng, explore).action for _ in range(5)]
        return np.array(actions).tolist()

    assert act(0) == act(0)
    assert act(0) != act(1)


@every_algorithm
def test_a_config_survives_json_and_every_field_is_documented(name: str) -> None:
    config = small(name)
    data = json.loads(json.dumps(config.to_dict()))
    assert data["algorithm"] == name
    assert config_from_dict(data) == config
    assert all(len(text) > 10 for text in config.documentation().values())
    config.validate()
