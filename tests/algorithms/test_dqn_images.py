"""DQN on images: which observations get image layers, and that learners and actors compute the same with them."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

import srl
from srl.algorithms import dqn
from srl.base.errors import ConfigError, SpaceError
from srl.base.segment import End, Segment
from srl.base.settings import setting
from srl.base.spaces import DiscreteActions, ObservationSpec, Spaces
from srl.rl import networks
from srl.rl.blocks import ImageLayers

VECTORS = Spaces(ObservationSpec((3,), "float32"), DiscreteActions(4))
IMAGES = Spaces(ObservationSpec((40, 36), "uint8", scale=1 / 255), DiscreteActions(4), window_length=2)
BATCH = 8


@dataclass
class OneConvolution(ImageLayers):
    """Layers as a user would write them."""

    features_num: int = setting(4, low=1, doc="channels")

    def features(self, images: jax.Array) -> jax.Array:
        return nn.relu(nn.Conv(self.features_num, (8, 8), strides=8)(images))


def small_config(**settings: Any) -> dqn.Config:
    config = dqn.Config(**{"batch_size": BATCH, "window_length": 2, "lr": 0.01, **settings})
    config.memory.warmup_size = BATCH
    config.hidden_block.set_mlp((6,))
    return config


def random_batches(updates: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (updates, BATCH)
    return {
        "observation_tm1": rng.integers(0, 256, (*shape, 2, 40, 36), np.uint8),
        "action_tm1": rng.integers(4, size=shape).astype(np.int32),
        "reward_t": rng.normal(size=shape).astype(np.float32),
        "discount_t": np.full(shape, 0.9, np.float32),
        "observation_t": rng.integers(0, 256, (*shape, 2, 40, 36), np.uint8),
        "weight": rng.random(shape).astype(np.float32),
    }


@pytest.mark.parametrize("kind", [pytest.param("auto", marks=pytest.mark.slow), "custom"])
def test_updates_of_image_networks_at_once_equal_single_ones(kind: str) -> None:
    config = small_config(target_model_update_interval=3)
    if kind == "custom":
        config.image_block.set_custom(OneConvolution(features_num=3))
    else:
        config.image_block.kind = kind
    batches = random_batches(4)
    at_once, singly = (config.make_learner(IMAGES, 0) for _ in range(2))
    at_once.prepare(batches)
    info = at_once.update(batches)
    steps = [singly.update({name: array[k : k + 1] for name, array in batches.items()}) for k in range(4)]
    jax.tree.map(np.testing.assert_array_equal, at_once.get_state(), singly.get_state())
    assert info.priorities is not None
    np.testing.assert_array_equal(info.priorities, np.concatenate([step.priorities for step in steps]))
    learned, first = (
        jax.tree.leaves(learner.parameters["images"]) for learner in (at_once, config.make_learner(IMAGES, 0))
    )
    assert not any(np.array_equal(a, b) for a, b in zip(learned, first, strict=True))


def test_actors_and_learners_agree_on_the_values_of_images() -> None:
    config = small_config()
    learner, policy = config.make_learner(IMAGES, 0), config.make_policy(IMAGES)
    observation = random_batches(1)["observation_tm1"][0]
    step = policy.act(policy.load(learner.parameters), observation, None, np.random.default_rng(0), None)
    network = dqn.make_network(config, IMAGES, learning=True)
    q = np.asarray(networks.q_values(network, learner.parameters, observation))
    np.testing.assert_allclose(step.scores["q_max"], q.max(axis=1), rtol=1e-4, atol=1e-5)


def test_images_are_done_in_smaller_dispatches_and_longer_segments() -> None:
    config = dqn.Config()
    assert (config.dispatch_size(VECTORS), config.dispatch_size(IMAGES)) == (16, 4)
    assert (config.steps_per_segment(VECTORS), config.steps_per_segment(IMAGES)) == (16, 64)
    config = dqn.Config(updates_per_dispatch=7, segment_length=9)
    assert (config.dispatch_size(IMAGES), config.steps_per_segment(IMAGES)) == (7, 9)


@pytest.mark.parametrize(
    ("kind", "observation", "says"),
    [
        ("dqn", ObservationSpec((3,), "float32"), "shape .3,.*leave image_block"),
        ("r2d3", ObservationSpec((), "int64", "discrete", (4,), (0,)), "leave image_block"),
        ("dqn", ObservationSpec((3, 84, 84), "uint8"), "at least 36 x 36, not 3 x 84; channels must come last"),
        ("dqn", ObservationSpec((20, 60), "uint8"), "not 20 x 60; resize with an ImageProcessor"),
    ],
)
def test_image_layers_on_what_is_no_image_are_refused(kind: str, observation: ObservationSpec, says: str) -> None:
    config = dqn.Config()
    config.image_block.kind = kind
    with pytest.raises(SpaceError, match=says):
        config.check_spaces(Spaces(observation, DiscreteActions(2)))


def test_image_layers_on_a_vector_env_are_refused_before_anything_starts() -> None:
    config = dqn.Config()
    config.image_block.set_dqn_image()
    with pytest.raises(SpaceError, match="image_block"):
        srl.Runner("CartPole-v1", config)


@pytest.mark.parametrize(
    ("observation", "applies"),
    [
        (ObservationSpec((84, 84), "uint8"), True),
        (ObservationSpec((84, 60, 3), "uint8"), True),
        (ObservationSpec((84, 84, 1), "uint8"), True),
        (ObservationSpec((84, 84, 5), "uint8"), False),
        (ObservationSpec((84, 84), "float32"), False),
        (ObservationSpec((20, 84), "uint8"), False),
        (ObservationSpec((84,), "uint8"), False),
    ],
)
def test_images_get_convolutions_by_themselves(observation: ObservationSpec, applies: bool) -> None:
    spaces = Spaces(observation, DiscreteActions(2), window_length=2)
    assert (dqn.make_network(small_config(), spaces, learning=True).images is not None) is applies


def test_own_layers_survive_json_and_unknown_ones_are_refused() -> None:
    config = small_config()
    config.image_block.set_custom(OneConvolution(features_num=3))
    data = config.to_dict()
    data.pop("algorithm")
    copy = dqn.Config.from_dict(data)
    assert copy == config and copy.image_block.custom == OneConvolution(features_num=3)
    data["image_block"]["custom"]["image_layers"] = "Missing"
    with pytest.raises(ConfigError, match=r"no image_layers is called 'Missing'; known here: .*OneConvolution"):
        dqn.Config.from_dict(data)


def test_a_kind_and_own_layers_that_contradict_each_other_are_refused() -> None:
    config = small_config()
    config.image_block.kind = "custom"
    with pytest.raises(ConfigError, match="set_custom"):
        config.validate()


def test_convolutions_may_compute_with_bfloat16_while_parameters_stay_float32() -> None:
    config = small_config()
    exact = config.make_learner(IMAGES, 0)
    config.image_block.compute_dtype = "bfloat16"
    coarse = config.make_learner(IMAGES, 0)
    batches = random_batches(1)
    losses = [learner.update(batches).metrics["loss"] for learner in (exact, coarse)]
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.05)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(coarse.parameters))


def test_a_config_says_what_it_needs() -> None:
    config = small_config()
    config.memory.capacity = 10_000
    line = config.preflight(IMAGES, None)
    numbers = [int(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdigit()]
    megabytes, capacity, wire_bytes, device_megabytes = numbers
    assert capacity == 10_000 and 10_000 * 36 * 40 / 1e6 < megabytes < 10_000 * 36 * 40 * 1.35 / 1e6
    assert 36 * 40 < wire_bytes < 36 * 40 * 1.2
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(config.make_learner(IMAGES, 0).parameters))
    assert device_megabytes == round((5 * parameters + 4 * 2 * BATCH * 2 * 36 * 40) / 1e6)


def test_saying_what_is_needed_leaves_the_accelerator_to_the_trainer() -> None:
    script = (
        "from srl.algorithms import dqn\n"
        "from srl.base.spaces import *\n"
        "spaces = Spaces(ObservationSpec((84, 84), 'uint8'), DiscreteActions(4))\n"
        "print(dqn.Config().preflight(spaces, None))\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}  # asking for any device would fail
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("needs "), done.stderr


@pytest.mark.parametrize("train", ["train", "train_mp"])
def test_a_memory_that_cannot_fit_is_refused_before_anything_starts(
    train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dqn.Config()
    config.memory.capacity = 10**12
    runner = srl.Runner("CartPole-v1", config)
    monkeypatch.setattr("srl.runner.distribution.embedded.EmbeddedBroker.__enter__", pytest.fail)
    with pytest.raises(ConfigError, match=r"needs .* of memory, but .* lower memory\.capacity"):
        getattr(runner, train)(max_train_count=1)


def test_resident_memory_stays_flat_once_the_replay_memory_is_full() -> None:
    resource = pytest.importorskip("resource")
    config = small_config(updates_per_dispatch=2)
    config.memory.capacity, config.memory.warmup_size = 2_000, 100
    config.memory.set_proportional_memory()
    memory = config.make_memory(IMAGES, 0, None)
    rng = np.random.default_rng(0)

    def fill(times: int) -> int:
        """Return the largest resident size so far, in bytes."""
        for sequence in range(times * 2_000 // 60):
            frames = rng.integers(0, 256, (65, 40, 36), np.uint8)
            rewards = np.zeros(64, np.float32)
            memory.insert([Segment(frames, np.zeros(64, np.int32), rewards, End.TRUNCATED, 0, 0, sequence, 0)])
            sample = memory.sample(2, 0)
            memory.update_priorities(sample, np.ones((2, BATCH)))
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024

    twice = fill(2)
    assert fill(8) - twice < 0.2 * 2_000 * 40 * 36
