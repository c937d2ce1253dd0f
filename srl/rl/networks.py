"""Networks in flax.linen, and the encoding of stored frames that they start with.

Learners and policies import this module when they are made; configs must not, as it imports JAX.
"""

import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from srl.base.spaces import ObservationSpec, Spaces
from srl.rl import convolutions
from srl.rl.blocks import HiddenBlock, ImageBlock


def encode(spec: ObservationSpec, observation: jax.Array) -> jax.Array:
    """Return float32 features `[..., features]` of stacked frames `[..., window, *frame]`.

    Numbers are multiplied by `spec.scale` (1/255 for bytes, unless a processor says otherwise), each discrete
    entry becomes one-hot (all zeros for a value outside its range), binary entries become 0 or 1. Raises
    `ValueError` for other shapes.
    """
    rank = len(spec.shape)
    if observation.ndim < rank + 1 or observation.shape[observation.ndim - rank :] != spec.shape:
        raise ValueError(f"observations must be [..., window, *{spec.shape}], not {observation.shape}")
    batch = observation.shape[: observation.ndim - rank - 1]
    if spec.kind == "discrete":
        return _one_hot(spec, observation.reshape(*batch, -1, len(spec.levels))).reshape(*batch, -1)
    numbers = observation.astype(jnp.float32)
    if spec.scale != 1.0:
        numbers = numbers * spec.scale
    return numbers.reshape(*batch, -1)


def encode_images(spec: ObservationSpec, observation: jax.Array) -> jax.Array:
    """Return float32 images `[N, H, W, channels]` of stacked frames `[N, window, H, W]` or `[N, window, H, W, C]`.

    All frames' channels stand beside each other, the oldest first; numbers are multiplied by `spec.scale`.
    """
    if observation.ndim != len(spec.shape) + 2 or observation.shape[2:] != spec.shape:
        raise ValueError(f"observations must be [N, window, *{spec.shape}], not {observation.shape}")
    frames = observation if observation.ndim == 5 else observation[..., None]
    count, window, height, width, channels = frames.shape
    images = frames.transpose(0, 2, 3, 1, 4).reshape(count, height, width, window * channels)
    return images.astype(jnp.float32) * spec.scale


def _one_hot(spec: ObservationSpec, entries: jax.Array) -> jax.Array:
    # JAX computes with int32: a start beyond it wraps as the entries do, and the difference is right.
    starts = np.asarray(spec.starts, np.int64).astype(np.int32)
    indices = entries.astype(jnp.int32) - starts
    hot = [jax.nn.one_hot(indices[..., entry], count) for entry, count in enumerate(spec.levels)]
    return jnp.concatenate(hot, axis=-1)


class QNetwork(nn.Module):
    """Action values `[..., action_count]` of stacked frames `[..., window, *frame]`.

    Attributes:
        dueling: value and advantage have streams of their own, the advantage with its mean subtracted
            (equation 9 of Wang et al., 2016).
        images: layers that frames go through first, as images; `None` for observations that are none.
    """

    observation: ObservationSpec
    action_count: int
    layer_sizes: tuple[int, ...]
    activation: str
    dueling: bool
    images: nn.Module | None = None

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Compute the values."""
        features = self._features(observation)
        if not self.dueling:
            hidden = self._layers("hidden", features, self.layer_sizes)
            return nn.Dense(self.action_count, name="q")(hidden)
        shared = self._layers("hidden", features, self.layer_sizes[:-1])
        value = nn.Dense(1, name="value")(self._layers("value_hidden", shared, self.layer_sizes[-1:]))
        stream = self._layers("advantage_hidden", shared, self.layer_sizes[-1:])
        advantage = nn.Dense(self.action_count, name="advantage")(stream)
        return value + advantage - advantage.mean(axis=-1, keepdims=True)

    def _features(self, observation: jax.Array) -> jax.Array:
        if self.images is None:
            return encode(self.observation, observation)
        rank = len(self.observation.shape) + 1
        batch, frames = observation.shape[: observation.ndim - rank], observation.shape[observation.ndim - rank :]
        images = encode_images(self.observation, observation.reshape(-1, *frames))
        return cast(jax.Array, self.images(images)).astype(jnp.float32).reshape(*batch, -1)

    def _layers(self, name: str, features: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        activate = convolutions.activation(self.activation)
        for index, size in enumerate(sizes):
            features = activate(nn.Dense(size, name=f"{name}_{index}")(features))
        return features


def q_network(spaces: Spaces, hidden: HiddenBlock, image: ImageBlock, *, learning: bool) -> QNetwork:
    """Return the network of action values that settings describe; `SpaceError` for spaces it cannot do.

    Networks for `learning` and for acting have the same parameters, and compute convolutions as is fastest for each.
    """
    images = None
    if image.applies_to(spaces.observation):
        form: convolutions.Form = "product" if learning and jax.default_backend() == "cpu" else "direct"
        images = convolutions.image_layers(image, form)
    return QNetwork(
        spaces.observation,
        spaces.action_count,
        hidden.layer_sizes,
        hidden.activation,
        hidden.kind == "dueling",
        images,
    )


def q_values(network: QNetwork, parameters: Mapping[str, Any], observation: Any) -> jax.Array:
    """Return action values `[..., A]` of stacked frames `[..., window, *frame]`."""
    return cast(jax.Array, network.apply({"params": parameters}, observation))


def first_parameters(network: nn.Module, spaces: Spaces, seed: int) -> dict[str, Any]:
    """Return a network's first parameters, which follow from `seed`."""
    frames = np.zeros((1, spaces.window_length, *spaces.observation.shape), spaces.observation.dtype)
    key = jax.random.key(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])
    return cast(dict[str, Any], _init(network, key, frames)["params"])


@functools.partial(jax.jit, static_argnums=0)
def _init(network: nn.Module, key: jax.Array, frames: jax.Array) -> Any:
    # Compiled as a whole, once for equal networks: most of a small learner's start-up time.
    return network.init(key, frames)
