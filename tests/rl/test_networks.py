"""Encoding of stored frames, and the Q-network's two shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from srl.base.errors import ConfigError, SpaceError
from srl.base.settings import set_by_path
from srl.base.spaces import ContinuousActions, DiscreteActions, ObservationSpec, Spaces, adapt_observation
from srl.rl import networks
from srl.rl.blocks import ACTIVATIONS, HiddenBlock, ImageBlock

VECTOR = Spaces(ObservationSpec((3,), "float32"), DiscreteActions(4))
FRAMES = np.random.default_rng(0).normal(size=(6, 1, 3)).astype(np.float32)


@pytest.mark.parametrize(
    ("spec", "stacked", "features"),
    [
        (ObservationSpec((2,), "float32"), [[1.5, -2.0], [3.0, 4.0]], [1.5, -2.0, 3.0, 4.0]),
        (ObservationSpec((2,), "uint8", scale=1 / 255), [[0, 255], [51, 102]], [0.0, 1.0, 0.2, 0.4]),
        (ObservationSpec((2,), "uint8"), [[0, 255], [51, 102]], [0.0, 255.0, 51.0, 102.0]),
        (ObservationSpec((1, 2), "int8"), [[[-128, 127]]], [-128.0, 127.0]),
        (ObservationSpec((), "float32"), [2.0, 3.0], [2.0, 3.0]),
        (ObservationSpec((), "int64", "discrete", (3,), (0,)), [2, 0], [0, 0, 1, 1, 0, 0]),
        (ObservationSpec((), "int64", "discrete", (3,), (-1,)), [-1], [1, 0, 0]),
        (ObservationSpec((), "int64", "discrete", (2,), (2**40,)), [2**40 + 1], [0, 1]),
        (ObservationSpec((2,), "int64", "discrete", (2, 3), (0, 5)), [[1, 5]], [0, 1, 1, 0, 0]),
        (ObservationSpec((3,), "int8", "binary"), [[1, 0, 1]], [1, 0, 1]),
        (ObservationSpec((2,), "bool"), [[True, False]], [1, 0]),
    ],
)
def test_encode(spec: ObservationSpec, stacked: Any, features: list[float]) -> None:
    observation = np.array(stacked, spec.dtype)
    encode = jax.jit(lambda x: networks.encode(spec, x))
    single = encode(observation)
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, features, rtol=1e-6)
    batched = encode(np.stack([[observation] * 3] * 2))
    assert batched.shape == (2, 3, len(features))
    np.testing.assert_allclose(batched[1, 2], features, rtol=1e-6)


def test_encode_fits_adapted_spaces() -> None:
    for space in (spaces.MultiDiscrete([3, 4]), spaces.MultiBinary((2, 2)), spaces.Discrete(5, start=2)):
        spec, adapt = adapt_observation(space)
        features = networks.encode(spec, jnp.asarray(adapt(space.sample())[None]))
        assert features.shape == (spaces.utils.flatdim(space),)


def test_encode_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="window"):
        networks.encode(VECTOR.observation, jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match="window"):
        networks.encode(VECTOR.observation, jnp.zeros(3))


def forward(block: HiddenBlock, parameters: Any = None, seed: int = 0) -> tuple[np.ndarray, Any]:
    network = networks.q_network(VECTOR, block, ImageBlock(), learning=True)
    parameters = parameters or networks.first_parameters(network, VECTOR, seed)
    return np.asarray(networks.q_values(network, parameters, FRAMES)), parameters


def test_mlp_is_the_product_of_its_layers() -> None:
    block = HiddenBlock()
    block.set_mlp((7, 5), activation="tanh")
    values, parameters = forward(block)
    x = FRAMES[:, 0]
    for layer in ("hidden_0", "hidden_1"):
        x = np.tanh(x @ parameters[layer]["kernel"] + parameters[layer]["bias"])
    expected = x @ parameters["q"]["kernel"] + parameters["q"]["bias"]
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_default_is_one_layer_of_512_and_no_layers_is_linear() -> None:
    _, parameters = forward(HiddenBlock())
    assert {name: layer["kernel"].shape for name, layer in parameters.items()} == {
        "hidden_0": (3, 512),
        "q": (512, 4),
    }
    block = HiddenBlock()
    block.set_mlp(())
    _, parameters = forward(block)
    assert {name: layer["kernel"].shape for name, layer in parameters.items()} == {"q": (3, 4)}


def test_dueling_subtracts_the_mean_advantage() -> None:
    block = HiddenBlock()
    block.set_dueling_network((7, 5))
    values, parameters = forward(block)
    relu = lambda x: np.maximum(x, 0)  # noqa: E731
    dense = lambda name, x: x @ parameters[name]["kernel"] + parameters[name]["bias"]  # noqa: E731
    shared = relu(dense("hidden_0", FRAMES[:, 0]))
    value = dense("value", relu(dense("value_hidden_0", shared)))
    advantages = dense("advantage", relu(dense("advantage_hidden_0", shared)))
    expected = value + advantages - advantages.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values.mean(axis=1, keepdims=True), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_every_activation_differs_from_relu(activation: str) -> None:
    block = HiddenBlock()
    block.set_mlp((8,))
    relu, parameters = forward(block)
    block.activation = activation
    assert np.abs(forward(block, parameters)[0] - relu).max() > 1e-4


def test_first_parameters_follow_from_the_seed() -> None:
    block = HiddenBlock()
    block.set_mlp((8,))
    same, again, other = (forward(block, seed=seed)[0] for seed in (2**40, 2**40, 1))
    np.testing.assert_array_equal(same, again)
    assert not np.array_equal(same, other)


def test_settings_are_checked() -> None:
    block = HiddenBlock()
    with pytest.raises(ConfigError, match="relu"):
        block.set_mlp((8,), activation="rleu")
    with pytest.raises(ConfigError, match="at least 1"):
        block.set_mlp((8, 0))
    set_by_path(block, "dueling_network", "64,32")
    assert (block.kind, block.layer_sizes) == ("dueling", (64, 32))
    assert HiddenBlock.from_dict(block.to_dict()) == block


def test_continuous_actions_are_refused() -> None:
    continuous = Spaces(VECTOR.observation, ContinuousActions((-1.0,), (1.0,)))
    with pytest.raises(SpaceError, match="discrete"):
        networks.q_network(continuous, HiddenBlock(), ImageBlock(), learning=True)


@pytest.mark.parametrize("channels", [(), (1,), (3,)])
def test_images_have_the_channels_of_all_frames_oldest_first(channels: tuple[int, ...]) -> None:
    spec = ObservationSpec((5, 7, *channels), "uint8", scale=0.5)
    stacked = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 7, *channels), np.uint8)
    images = np.asarray(networks.encode_images(spec, jax.numpy.asarray(stacked)))
    count = channels[0] if channels else 1
    assert images.shape == (2, 5, 7, 4 * count) and images.dtype == np.float32
    for frame in range(4):
        part = images[..., frame * count : (frame + 1) * count]
        np.testing.assert_array_equal(part, stacked[:, frame].reshape(2, 5, 7, count) * np.float32(0.5))
    with pytest.raises(ValueError, match="window"):
        networks.encode_images(spec, jax.numpy.asarray(stacked[0]))
