"""DQN: its settings, its updates against slower ones, what it learns in small known problems, its priorities."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest

from srl.algorithms import dqn
from srl.base.algorithm import Exploration
from srl.base.env import EnvConfig, make_agent_env
from srl.base.errors import CheckpointError, ConfigError, SpaceError, UnknownFieldError
from srl.base.processor import Processor
from srl.base.segment import End, Segment
from srl.base.spaces import ContinuousActions, DiscreteActions, ObservationSpec, Spaces
from srl.rl import losses, networks
from srl.rl.exploration import ladder
from srl.rl.schedules import Schedule
from srl.rl.trees import flatten

SPACES = Spaces(ObservationSpec((3,), "float32"), DiscreteActions(4))
IMAGES = Spaces(ObservationSpec((36, 36), "uint8", scale=1 / 255), DiscreteActions(4))
ACTIONS, BATCH = 4, 8


COMPILED: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def compile_equal_updates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes most of the time here; the compiled function is pure, so learners can share it."""
    make_updates = dqn.make_updates

    def shared(config: dqn.Config, network: Any, optimizer: Any) -> Any:
        key = json.dumps(config.to_dict() | {"lr": None}), network
        if key not in COMPILED:
            COMPILED[key] = make_updates(config, network, optimizer)
        return COMPILED[key]

    monkeypatch.setattr(dqn, "make_updates", shared)


def small_config(**settings: Any) -> dqn.Config:
    config = dqn.Config(**{"batch_size": BATCH, "updates_per_dispatch": 4, "lr": 0.01, **settings})
    config.memory.warmup_size = BATCH
    if "hidden_block" not in settings:
        config.hidden_block.set_mlp((6,))
    return config


def random_batches(updates: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (updates, BATCH)
    return {
        "observation_tm1": rng.normal(size=(*shape, 1, 3)).astype(np.float32),
        "action_tm1": rng.integers(ACTIONS, size=shape).astype(np.int32),
        "reward_t": rng.normal(size=shape).astype(np.float32),
        "discount_t": np.where(rng.random(shape) < 0.2, 0, 0.99).astype(np.float32),
        "observation_t": rng.normal(size=(*shape, 1, 3)).astype(np.float32),
        "weight": rng.random(shape).astype(np.float32),
    }


def part(batches: Mapping[str, np.ndarray], start: int, stop: int) -> dict[str, np.ndarray]:
    return {name: array[start:stop] for name, array in batches.items()}


def assert_equal_trees(first: Any, second: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


def differ(first: Any, second: Any) -> bool:
    return any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def segment(frames: np.ndarray, rewards: Any, end: End, sequence: int = 0, **fields: Any) -> Segment:
    steps = len(frames) - 1
    return Segment(
        frames=frames,
        actions=fields.pop("actions", np.arange(steps, dtype=np.int32) % ACTIONS),
        rewards=np.broadcast_to(np.asarray(rewards, np.float32), steps).copy(),
        end=end,
        context=0,
        lane=0,
        sequence=sequence,
        version=0,
        **fields,
    )


# --- config -----------------------------------------------------------------------------------------------


def test_promised_keywords_and_defaults() -> None:
    config = dqn.Config(
        batch_size=32,
        target_model_update_interval=1000,
        discount=0.99,
        lr=0.001,
        enable_reward_clip=False,
        enable_double_dqn=True,
        enable_rescale=False,
    )
    assert config == dqn.Config()
    assert config.lr.value(10**7) == 0.001
    assert not config.epsilon.is_set
    with pytest.raises(UnknownFieldError, match="batch_size"):
        config.batchsize = 3


def test_a_config_is_made_checked_and_sent_without_jax() -> None:
    script = (
        "import json, sys\n"
        "from srl.algorithms import dqn\n"
        "config = dqn.Config(lr=0.1)\n"
        "config.validate()\n"
        "data = json.loads(json.dumps(config.to_dict()))\n"
        "data.pop('algorithm')\n"
        "assert dqn.Config.from_dict(data) == config\n"
        "print([name for name in ('jax', 'flax', 'optax') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.epsilon.set_linear(10, 1.2, 0.1), "epsilon"),
        (lambda c: c.epsilon.set_constant(-0.1), "epsilon"),
        (lambda c: c.lr.set_linear(10, 0.1, -0.1), "lr"),
        (lambda c: setattr(c, "lr", Schedule()), "lr"),
        (lambda c: setattr(c.memory, "warmup_size", 3), "warmup_size"),
        (lambda c: setattr(c.memory, "warmup_size", 10**6), "warmup_size"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(change: Callable[[Any], None], message: str) -> None:
    config = dqn.Config()
    change(config)
    for use in (config.validate, lambda: config.make_policy(SPACES), lambda: config.make_learner(SPACES, 0)):
        with pytest.raises(ConfigError, match=message):
            use()


def test_continuous_actions_are_refused() -> None:
    spaces = Spaces(SPACES.observation, ContinuousActions((-1.0,), (1.0,)))
    with pytest.raises(SpaceError, match="discrete"):
        dqn.Config().make_policy(spaces)
    with pytest.raises(SpaceError, match="discrete"):
        dqn.Config().make_learner(spaces, 0)


@dataclass
class Doubled(Processor):
    """Doubles rewards."""

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        return gymnasium.wrappers.TransformReward(env, lambda reward: 2 * float(reward))


OTHER_VALUES: dict[str, Any] = {
    "window_length": 4,
    "processors": [Doubled()],
    "use_rl_processor": False,
    "action_division_num": 7,
    "samples_per_insert": 4.0,
    "segment_length": 100,
    "batch_size": 16,
    "memory": {"capacity": 5000, "warmup_size": 77, "kind": "proportional", "alpha": 0.5},
    "hidden_block": {"kind": "dueling", "layer_sizes": (5, 4), "activation": "tanh"},
    "image_block": {"kind": "r2d3", "activation": "tanh", "compute_dtype": "bfloat16"},
    "epsilon": {"kind": "linear", "start": 1.0, "end": 0.5, "steps": 10},
    "lr": {"kind": "cosine", "start": 0.1, "end": 0.05, "steps": 10},
    "target_model_update_interval": 2,
    "discount": 0.5,
    "n_step": 5,
    "enable_double_dqn": False,
    "enable_rescale": True,
    "enable_reward_clip": True,
    "huber_delta": 0.1,
    "updates_per_dispatch": 2,
}


@pytest.mark.parametrize("name", dqn.Config.documentation())
def test_every_field_at_another_value_survives_json(name: str) -> None:
    config = dqn.Config(**{name: OTHER_VALUES[name]})
    data = json.loads(json.dumps(config.to_dict()))
    assert data.pop("algorithm") == "dqn"
    copy = dqn.Config.from_dict(data)
    assert copy == config
    assert getattr(copy, name) != getattr(dqn.Config(), name)


# What a field changes, as something to compare. The runner's rate limiter reads `samples_per_insert`; its tests
# prove that.
READ_BY_RUNNER = {"samples_per_insert"}


def env_spaces(config: dqn.Config) -> Spaces:
    env = make_agent_env(EnvConfig("Pendulum-v1"), config)
    env.close()
    return env.spaces


def with_default_processor(config: dqn.Config) -> Any:
    """DQN adds no processors of its own; a subclass of it may."""

    class Adding(dqn.Config):
        def default_processors(self, observation_space: gymnasium.Space[Any]) -> list[Processor]:
            return [Doubled()]

    return processors(Adding(**vars(config)))


def processors(config: dqn.Config) -> list[Processor]:
    env = make_agent_env(EnvConfig("Pendulum-v1"), config)
    env.close()
    return env.processors


def sampled(config: dqn.Config) -> Any:
    config.memory.warmup_size = config.batch_size
    memory = config.make_memory(SPACES, 0, None)
    memory.insert([segment(np.random.default_rng(0).normal(size=(41, 3)).astype(np.float32), 5.0, End.TERMINATED)])
    sample = memory.sample(1, 0)
    return memory.updates_per_dispatch, {name: sample.batches[name] for name in ("reward_t", "discount_t")}


def batch_loss(config: dqn.Config) -> float:
    network = dqn.make_network(config, SPACES, learning=True)
    online, target = (networks.first_parameters(network, SPACES, seed) for seed in (0, 1))
    batch = part(random_batches(1), 0, 1)
    batch = {name: array[0] for name, array in batch.items()} | {"reward_t": 3 * batch["reward_t"][0]}
    return float(jax.jit(dqn.make_loss(config, network))(online, target, batch)[0])


def after_two_updates(config: dqn.Config) -> Any:
    learner = config.make_learner(SPACES, 0)
    learner.update(random_batches(2))
    return learner.get_state()


def explored(config: dqn.Config) -> np.ndarray:
    policy = config.make_policy(SPACES)
    zeros = jax.tree.map(np.zeros_like, config.make_learner(SPACES, 0).parameters)
    observation = np.zeros((500, 1, 3), np.float32)
    explore = Exploration(train_count=0, lanes=np.arange(500), total_lanes=500, distributed=False)
    return policy.act(policy.load(zeros), observation, None, np.random.default_rng(0), explore).action


def shapes(config: dqn.Config, spaces: Spaces = SPACES) -> Any:
    return jax.tree.map(np.shape, config.make_learner(spaces, 0).parameters)


PROBES: dict[str, Callable[[dqn.Config], Any]] = {
    "window_length": env_spaces,
    "processors": processors,
    "use_rl_processor": with_default_processor,
    "action_division_num": env_spaces,
    "segment_length": lambda config: config.steps_per_segment(SPACES),
    "batch_size": sampled,
    "memory": lambda config: config.make_memory(SPACES, 0, None).warmup_size,
    "hidden_block": shapes,
    "image_block": lambda config: shapes(config, IMAGES),
    "epsilon": explored,
    "lr": after_two_updates,
    "target_model_update_interval": after_two_updates,
    "discount": sampled,
    "n_step": sampled,
    "enable_double_dqn": batch_loss,
    "enable_rescale": batch_loss,
    "enable_reward_clip": sampled,
    "huber_delta": batch_loss,
    "updates_per_dispatch": sampled,
}


SLOW = ("image_block",)  # a residual network, which takes long to be made


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in dqn.Config.documentation()
        if name not in READ_BY_RUNNER
    ],
)
def test_every_field_changes_something(name: str) -> None:
    if name == "memory":
        default, changed = small_config(), small_config()
        changed.memory = OTHER_VALUES["memory"]
    else:
        default, changed = small_config(), small_config(**{name: OTHER_VALUES[name]})
    probe = PROBES[name]
    assert repr(probe(default)) == repr(probe(default))
    assert repr(probe(default)) != repr(probe(changed))


# --- learner ----------------------------------------------------------------------------------------------


def test_many_updates_at_once_equal_single_ones() -> None:
    config = small_config(target_model_update_interval=3)
    batches = random_batches(4)
    at_once, singly = (config.make_learner(SPACES, 0) for _ in range(2))
    info = at_once.update(batches)
    steps = [singly.update(part(batches, k, k + 1)) for k in range(4)]
    assert at_once.train_count == singly.train_count == 4
    assert_equal_trees(at_once.get_state(), singly.get_state())
    assert info.priorities is not None
    np.testing.assert_array_equal(info.priorities, np.concatenate([step.priorities for step in steps]))
    assert info.metrics["loss"] == pytest.approx(np.mean([step.metrics["loss"] for step in steps]), rel=1e-5)
    assert info.metrics["td_error"] == pytest.approx(float(info.priorities.mean()), rel=1e-5)


def test_one_update_is_one_step_of_adam_on_the_mean_loss() -> None:
    config = small_config(lr=0.05, enable_double_dqn=False)
    learner = config.make_learner(SPACES, 0)
    before = learner.parameters
    batches = random_batches(1)
    info = learner.update(batches)
    batch = {name: array[0] for name, array in batches.items()}
    network = dqn.make_network(config, SPACES, learning=True)

    def loss(parameters: Any) -> Any:
        q_tm1 = networks.q_values(network, parameters, batch["observation_tm1"])
        q_t = networks.q_values(network, before, batch["observation_t"])
        chosen = (q_tm1 * np.eye(ACTIONS)[batch["action_tm1"]]).sum(axis=1)
        errors = batch["reward_t"] + batch["discount_t"] * q_t.max(axis=1) - chosen
        return (batch["weight"] * losses.squared_loss(errors)).mean(), errors

    (value, errors), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(before)
    # Adam's first step: both bias corrections undone, the gradient over its own size.
    expected = jax.tree.map(lambda p, g: p - 0.05 * g / (np.abs(g) + 1e-8), before, gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), learner.parameters, expected)
    np.testing.assert_allclose(info.priorities, np.abs(errors)[None], rtol=1e-4, atol=1e-5)
    assert info.metrics["loss"] == pytest.approx(float(value), rel=1e-4)


def test_target_is_copied_exactly_at_the_interval() -> None:
    learner = small_config(target_model_update_interval=3).make_learner(SPACES, 0)
    history = [learner.get_state()]
    for k in range(7):
        learner.update(random_batches(1, seed=k))
        history.append(learner.get_state())
    for count, state in enumerate(history):
        assert_equal_trees(state["target"], history[count - count % 3]["parameters"])
    assert differ(history[3]["parameters"], history[6]["parameters"])


def test_the_learning_rate_follows_its_schedule_update_by_update() -> None:
    config = small_config()
    config.lr.set_linear(2, 0.1, 0.0)
    learner = config.make_learner(SPACES, 0)
    info = learner.update(random_batches(2))
    assert info.metrics["lr"] == pytest.approx(0.05)
    before = learner.parameters
    assert learner.update(random_batches(3)).metrics["lr"] == 0.0
    assert_equal_trees(learner.parameters, before)


@pytest.mark.parametrize("huber_delta", [None, 0.1])
def test_weights_scale_each_transitions_gradient_linearly(huber_delta: float | None) -> None:
    config = small_config(huber_delta=huber_delta)
    network = dqn.make_network(config, SPACES, learning=True)
    parameters = networks.first_parameters(network, SPACES, 0)
    batch = {name: array[0, :1] for name, array in random_batches(1).items()}
    loss = dqn.make_loss(config, network)
    gradient = jax.jit(jax.grad(lambda p, weight: loss(p, p, batch | {"weight": weight})[0]))
    full, half = (gradient(parameters, np.array([weight], np.float32)) for weight in (1.0, 0.5))
    assert any(leaf.any() for leaf in jax.tree.leaves(full))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b, rtol=1e-5), full, half)


def test_state_round_trip_goes_on_bit_equal() -> None:
    config = small_config(target_model_update_interval=3)
    config.lr.set_linear(20, 0.1, 0.0)
    learner, other = config.make_learner(SPACES, 0), config.make_learner(SPACES, 1)
    learner.update(random_batches(4))
    state = jax.tree.map(np.copy, learner.get_state())
    other.set_state(state)
    assert other.train_count == 4
    assert_equal_trees(other.get_state(), state)
    for trained in (learner, other):
        trained.update(random_batches(3, seed=1))
    assert_equal_trees(other.get_state(), learner.get_state())
    assert differ(learner.get_state(), state)


def test_a_state_holds_numpy_arrays_and_is_not_changed_by_updates() -> None:
    learner = small_config().make_learner(SPACES, 0)
    state, parameters = learner.get_state(), learner.parameters
    assert all(isinstance(array, (np.ndarray, np.generic)) for _, array in flatten(state))
    before = jax.tree.map(np.array, (state, parameters))
    learner.update(random_batches(4))
    assert_equal_trees((state, parameters), before)
    other = small_config().make_learner(SPACES, 1)
    copied = jax.tree.map(np.array, state)
    other.set_state(copied)
    for _, array in flatten(copied):
        array[...] = 0
    assert_equal_trees(other.get_state(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["target"].pop("q"), "target/q/bias is missing"),
        (lambda state: state["parameters"].update(more={"bias": np.zeros(1)}), "parameters/more/bias"),
        (
            lambda state: state["parameters"]["hidden_0"].update(kernel=np.zeros((3, 7), np.float32)),
            r"parameters/hidden_0/kernel has shape \(3, 7\) where \(3, 6\)",
        ),
        (lambda state: state["optimizer"].update(count=np.zeros((), np.float32)), "optimizer/count has dtype float32"),
        (lambda state: state.pop("train_count"), "train_count is missing"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(change: Callable[[Any], Any], message: str) -> None:
    learner = small_config().make_learner(SPACES, 0)
    state = jax.tree.map(lambda array: array, learner.get_state())
    change(state)
    for use in (learner.check_valid, learner.set_state):
        with pytest.raises(CheckpointError, match=message):
            use(state)


def test_learners_follow_from_their_seed() -> None:
    config = small_config()
    first, same, other = (config.make_learner(SPACES, seed) for seed in (5, 5, 6))
    for learner in (first, same):
        learner.update(random_batches(2))
    assert_equal_trees(first.get_state(), same.get_state())
    assert differ(config.make_learner(SPACES, 5).parameters, other.parameters)


def test_more_updates_than_a_dispatch_are_refused() -> None:
    learner = small_config(updates_per_dispatch=2).make_learner(SPACES, 0)
    for updates in (0, 3):
        with pytest.raises(ValueError, match="updates_per_dispatch"):
            learner.update(random_batches(updates))


# --- what it learns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "rescale", "starts", "expected"),
    [
        # The observation does not tell the time: a time limit is no end of rewards.
        (End.TRUNCATED, False, [0], [10.0]),
        (End.TERMINATED, False, [0, 10, 19], [(1 - 0.9**20) / 0.1, (1 - 0.9**10) / 0.1, 1.0]),
        (End.TERMINATED, True, [0, 10, 19], [(1 - 0.9**20) / 0.1, (1 - 0.9**10) / 0.1, 1.0]),
    ],
)
def test_constant_reward_until_a_time_limit(end: End, rescale: bool, starts: list[int], expected: list[float]) -> None:
    frames = np.zeros(21, np.int64) if end is End.TRUNCATED else np.arange(21)
    spaces = Spaces(ObservationSpec((), "int64", "discrete", (21,), (0,)), DiscreteActions(2))
    config = dqn.Config(
        discount=0.9, n_step=3, target_model_update_interval=25, updates_per_dispatch=50, enable_rescale=rescale
    )
    config.lr.set_linear(1500, 0.1, 0.005)
    config.hidden_block.set_mlp(())
    config.memory.warmup_size = config.memory.capacity = 160
    memory, learner = config.make_memory(spaces, 0, None), config.make_learner(spaces, 0)
    rng = np.random.default_rng(0)
    memory.insert([segment(frames, 1.0, end, i, actions=rng.integers(2, size=20).astype(np.int32)) for i in range(8)])
    for _ in range(30):
        learner.update(memory.sample(50, learner.train_count).batches)
    policy = config.make_policy(spaces)
    observation = np.array(starts)[:, None]
    step = policy.act(policy.load(learner.parameters), observation, None, rng, None)
    values = losses.inverse_value_rescale(step.scores["q_max"]) if rescale else step.scores["q_max"]
    np.testing.assert_allclose(values, expected, rtol=0.02)


# --- policy -----------------------------------------------------------------------------------------------


def test_greedy_actions_and_their_values() -> None:
    config = small_config()
    policy, parameters = config.make_policy(SPACES), config.make_learner(SPACES, 0).parameters
    observation = np.random.default_rng(0).normal(size=(50, 1, 3)).astype(np.float32)
    q = np.asarray(networks.q_values(dqn.make_network(config, SPACES, learning=True), parameters, observation))
    loaded = policy.load(jax.tree.map(np.asarray, parameters))
    step = policy.act(loaded, observation, policy.initial_state(50), np.random.default_rng(0), None)
    assert step.action.dtype == np.int32
    np.testing.assert_array_equal(step.action, q.argmax(axis=1))
    explore = Exploration(0, np.arange(50), 50, distributed=True)
    step = policy.act(loaded, observation, None, np.random.default_rng(0), explore)
    assert (step.action != q.argmax(axis=1)).any()
    np.testing.assert_allclose(step.scores["q_taken"], q[np.arange(50), step.action], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(step.scores["q_max"], q.max(axis=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("set_epsilon", "distributed", "expected"),
    [
        (lambda epsilon: None, True, ladder(np.arange(4), 4)),
        (lambda epsilon: None, False, np.full(4, 0.1)),
        (lambda epsilon: epsilon.set_linear(100, 1.0, 0.0), True, np.full(4, 0.75)),
        (lambda epsilon: epsilon.set_linear(100, 1.0, 0.0), False, np.full(4, 0.75)),
    ],
)
def test_who_explores_how_much(set_epsilon: Callable[[Schedule], None], distributed: bool, expected: Any) -> None:
    config = small_config()
    set_epsilon(config.epsilon)
    policy = config.make_policy(SPACES)
    zeros = policy.load(jax.tree.map(np.zeros_like, config.make_learner(SPACES, 0).parameters))
    rng, observation = np.random.default_rng(0), np.ones((4, 1, 3), np.float32)
    explore = Exploration(25, np.arange(4), 4, distributed)
    # All values of the zero network are equal, so its greedy action is 0.
    drawn = np.array([policy.act(zeros, observation, None, rng, explore).action for _ in range(3000)])
    np.testing.assert_allclose((drawn > 0).mean(axis=0), expected * (ACTIONS - 1) / ACTIONS, atol=0.03)
    assert (policy.act(zeros, observation, None, rng, None).action == 0).all()


def test_parameters_of_another_network_are_refused_by_name() -> None:
    other = small_config()
    other.hidden_block.set_mlp((9,))
    with pytest.raises(CheckpointError, match="hidden_0/bias"):
        small_config().make_policy(SPACES).load(other.make_learner(SPACES, 0).parameters)


def td_error_by_hand(
    config: dqn.Config, rewards: list[float], end: End, start: int, q_taken: np.ndarray, q_max: np.ndarray
) -> float:
    total, k = 0.0, 0
    while k < config.n_step and start + k < len(rewards):
        reward = min(max(rewards[start + k], -1.0), 1.0) if config.enable_reward_clip else rewards[start + k]
        total += config.discount**k * reward
        k += 1
    if not (end is End.TERMINATED and start + k == len(rewards)):
        value = float(q_max[start + k])
        total += config.discount**k * (
            float(losses.inverse_value_rescale(np.array(value))) if config.enable_rescale else value
        )
    target = float(losses.value_rescale(np.array(total))) if config.enable_rescale else total
    return abs(target - float(q_taken[start]))


@pytest.mark.parametrize("end", list(End))
@pytest.mark.parametrize(("n_step", "clip", "rescale"), [(1, False, False), (3, True, False), (5, False, True)])
def test_initial_priorities_equal_a_brute_force(end: End, n_step: int, clip: bool, rescale: bool) -> None:
    config = small_config(n_step=n_step, discount=0.9, enable_reward_clip=clip, enable_rescale=rescale)
    config.memory.set_proportional_memory()
    policy = config.make_policy(SPACES)
    rng = np.random.default_rng(0)
    for steps in (1, 2, 9):
        rewards = rng.normal(size=steps).astype(np.float32) * 3
        scores = {name: rng.normal(size=steps + 1).astype(np.float32) for name in ("q_taken", "q_max")}
        scores["q_taken"][-1] = np.nan
        if end is End.TERMINATED:
            scores["q_max"][-1] = np.nan
        piece = segment(np.zeros((steps + 1, 3), np.float32), rewards, end)
        starts = piece.transitions(n_step)
        priorities = policy.priorities(piece.rewards, end, starts, scores)
        assert priorities is not None
        assert priorities.dtype == np.float32
        expected = [
            td_error_by_hand(config, rewards.tolist(), end, start, scores["q_taken"], scores["q_max"])
            for start in starts
        ]
        np.testing.assert_allclose(priorities, expected, rtol=1e-4, atol=1e-5)


def test_a_priority_is_unknown_where_the_reached_frame_was_not_acted_on() -> None:
    config = small_config(n_step=2)
    config.memory.set_rankbase_memory()
    policy = config.make_policy(SPACES)
    known = np.ones(5, np.float32)
    scores = {"q_taken": known, "q_max": np.array([1, 1, 1, 1, np.nan], np.float32)}
    priorities = policy.priorities(np.ones(4, np.float32), End.TRUNCATED, range(4), scores)
    assert priorities is not None
    np.testing.assert_array_equal(np.isnan(priorities), [False, False, True, True])


def test_a_uniform_memory_needs_no_priorities() -> None:
    scores = {"q_taken": np.ones(3, np.float32), "q_max": np.ones(3, np.float32)}
    assert small_config().make_policy(SPACES).priorities(np.ones(2, np.float32), End.CUT, range(2), scores) is None


def test_initial_priorities_are_the_learners_td_errors_of_the_same_network() -> None:
    config = small_config(n_step=3, enable_rescale=True, enable_reward_clip=True)
    config.memory.set_proportional_memory()
    policy, learner = config.make_policy(SPACES), config.make_learner(SPACES, 0)
    rng = np.random.default_rng(0)
    frames = rng.normal(size=(20, 3)).astype(np.float32)
    step = policy.act(policy.load(learner.parameters), frames[:, None], None, rng, None)
    rewards = rng.normal(size=19).astype(np.float32) * 2
    piece = segment(frames, rewards, End.TERMINATED, actions=step.action[:-1])
    priorities = policy.priorities(rewards, piece.end, piece.transitions(3), step.scores)
    assert priorities is not None
    by_frame = dict(zip(frames[:, 0].tolist(), priorities.tolist(), strict=False))
    memory = config.make_memory(SPACES, 0, None)
    memory.insert([piece])
    batches = memory.sample(1, 0).batches
    errors = learner.update(batches).priorities
    assert errors is not None
    expected = [by_frame[frame] for frame in batches["observation_tm1"][0, :, 0, 0].tolist()]
    np.testing.assert_allclose(errors[0], expected, rtol=1e-3, atol=1e-4)
