"""Convolutional layers over images, in the form that the machine at hand computes fastest.

`srl.rl.networks` puts them before the fully connected layers. Parameters are the same whatever the form, so that
checkpoints and published parameters move between machines.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn

from srl.rl.blocks import ImageBlock, ImageLayers

Form: TypeAlias = Literal["direct", "product"]
"""How a convolution is computed: by XLA's own operation, or as a matrix product, whose gradients are several times as
fast on a CPU."""


def convolve(images: jax.Array, kernel: jax.Array, stride: int, form: Form) -> jax.Array:
    """Return the convolution without padding (VALID) of images `[N, H, W, C]` with a kernel `[K, K, C, F]`.

    `product` needs a kernel size that is a multiple of the stride.
    """
    if form == "direct":
        return jax.lax.conv_general_dilated(
            images, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    if stride > 1:
        images, kernel = _blocks_to_channels(images, kernel, stride)
    return _by_rows(images, kernel)


def _blocks_to_channels(images: jax.Array, kernel: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """Turn blocks of `stride x stride` pixels into channels, so that the same convolution has stride 1."""
    count, _, _, channels = images.shape
    size, _, _, features = kernel.shape
    if size % stride:
        raise ValueError(f"a kernel of {size} is not a multiple of the stride {stride}")
    rows, columns = ((length - size) // stride + size // stride for length in images.shape[1:3])
    images = images[:, : rows * stride, : columns * stride]
    images = images.reshape(count, rows, stride, columns, stride, channels).transpose(0, 1, 3, 2, 4, 5)
    kernel = kernel.reshape(size // stride, stride, size // stride, stride, channels, features)
    kernel = kernel.transpose(0, 2, 1, 3, 4, 5)
    return (
        images.reshape(count, rows, columns, stride * stride * channels),
        kernel.reshape(size // stride, size // stride, stride * stride * channels, features),
    )


def _by_rows(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve as one matrix product: columns of the window side by side before it, rows summed after it.

    That needs `K` copies of the images and of the outputs, where laying whole windows side by side would need `K * K`
    copies; on CPUs copies cost more than the arithmetic.
    """
    count, height, width, channels = images.shape
    size, _, _, features = kernel.shape
    rows, columns = height - size + 1, width - size + 1
    strips = jnp.concatenate([images[:, :, j : j + columns] for j in range(size)], axis=-1)
    weights = kernel.transpose(1, 2, 0, 3).reshape(size * channels, size * features)
    products = (strips.reshape(-1, size * channels) @ weights).reshape(count, height, columns, size * features)
    parts = (products[:, i : i + rows, :, i * features : (i + 1) * features] for i in range(size))
    return functools.reduce(jnp.add, parts)


class Convolution(nn.Module):
    """A convolution with bias of `[N, H, W, C]`; parameters are float32 `kernel` `[K, K, C, F]` and `bias` `[F]`."""

    features: int
    size: int
    stride: int
    padding: int
    form: Form
    dtype: str

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Compute `[N, H', W', F]`."""
        shape = (self.size, self.size, images.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        if self.padding:
            around = (self.padding, self.padding)
            images = jnp.pad(images, ((0, 0), around, around, (0, 0)))
        kernel, bias = kernel.astype(self.dtype), bias.astype(self.dtype)
        return convolve(images.astype(self.dtype), kernel, self.stride, self.form) + bias


class NatureConvolutions(nn.Module):
    """The three convolutions of Mnih et al. 2015, https://doi.org/10.1038/nature14236."""

    activation: str
    form: Form
    dtype: str

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Compute `[N, H', W', 64]`, `[N, 7, 7, 64]` for pictures of 84 x 84."""
        activate = _activation(self.activation)
        for index, (features, size, stride) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1))):
            layer = Convolution(features, size, stride, 0, self.form, self.dtype, name=f"convolution_{index}")
            images = activate(layer(images))
        return images


class ResidualConvolutions(nn.Module):
    """The residual stack of IMPALA (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561), which R2D3 took over."""

    activation: str
    form: Form
    dtype: str

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Compute `[N, H', W', 32]`, `[N, 11, 11, 32]` for pictures of 84 x 84."""
        activate = _activation(self.activation)

        def layer(name: str, inputs: jax.Array, features: int) -> jax.Array:
            return Convolution(features, 3, 1, 1, self.form, self.dtype, name=name)(inputs)

        for section, features in enumerate((16, 32, 32)):
            images = max_pool(layer(f"section_{section}", images, features))
            for block in range(2):
                name = f"section_{section}_block_{block}"
                hidden = layer(f"{name}_0", activate(images), features)
                images = images + layer(f"{name}_1", activate(hidden), features)
        return activate(images)


class CustomConvolutions(nn.Module):
    """Layers of a user's own; `layers` is an `ImageLayers` as JSON text, since modules need hashable fields."""

    layers: str

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Compute what the user's layers do."""
        layers = ImageLayers.coerce(json.loads(self.layers))
        features: jax.Array = layers.features(images)
        return features


def image_layers(block: ImageBlock, form: Form) -> NatureConvolutions | ResidualConvolutions | CustomConvolutions:
    """Return the module that settings describe."""
    if block.custom is not None:
        return CustomConvolutions(json.dumps(block.custom.to_dict()))
    kind = ResidualConvolutions if block.kind == "r2d3" else NatureConvolutions
    return kind(block.activation, form, block.compute_dtype)


def max_pool(images: jax.Array) -> jax.Array:
    """Return the maxima of 3 x 3 windows at every second pixel, padded (SAME), of `[N, H, W, C]`.

    As maxima of slices, first of rows and then of columns: the gradient of XLA's own pooling is slow on CPUs.
    """
    for axis in (1, 2):
        length = images.shape[axis]
        outputs = -(-length // 2)
        total = max(2 * (outputs - 1) + 3 - length, 0)
        padding = [(0, 0)] * 4
        padding[axis] = (total // 2, total - total // 2)
        padded = jnp.pad(images, padding, constant_values=-jnp.inf)
        slices = [jax.lax.slice_in_dim(padded, i, i + 2 * outputs - 1, 2, axis) for i in range(3)]
        images = functools.reduce(jnp.maximum, slices)
    return images


def _activation(name: str) -> Callable[[Any], jax.Array]:
    activate: Callable[[Any], jax.Array] = getattr(nn, name)
    return activate
