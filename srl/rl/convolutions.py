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

_FEW_CHANNELS = 32  # up to here XLA's own operation is faster on a CPU than the product, though its gradients are not


def convolve(images: jax.Array, kernel: jax.Array, stride: int, form: Form) -> jax.Array:
    """Return the convolution without padding (VALID) of images `[N, H, W, C]` with a kernel `[K, K, C, F]`.

    `product` needs a kernel size that is a multiple of the stride.
    """
    if form == "direct":
        return _directly(images, kernel, stride)
    if stride > 1:
        images, kernel = _blocks_to_channels(images, kernel, stride)
    return _with_gradients_by_rows(images, kernel) if images.shape[-1] <= _FEW_CHANNELS else _by_rows(images, kernel)


def _directly(images: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return jax.lax.conv_general_dilated(
        images, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


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


@jax.custom_vjp
def _with_gradients_by_rows(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve by XLA's own operation; gradients are those of the product."""
    return _directly(images, kernel, 1)


def _forward(images: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _directly(images, kernel, 1), (images, kernel)


def _backward(inputs: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The product itself is not used, so the compiler leaves it out.
    _, gradients = jax.vjp(_by_rows, *inputs)
    for_images, for_kernel = gradients(gradient)
    return for_images, for_kernel


_with_gradients_by_rows.defvjp(_forward, _backward)


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
        activate = activation(self.activation)
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
        activate = activation(self.activation)

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

    Rows first, then columns, with a gradient of its own: that of XLA's pooling is slow on CPUs.
    """
    return _halve(_halve(images, 1), 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _halve(images: jax.Array, axis: int) -> jax.Array:
    """Return the maxima of three neighbours at every second place of an axis, padded (SAME)."""
    return functools.reduce(jnp.maximum, _neighbours(images, axis))


def _halve_forward(images: jax.Array, axis: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    maxima = _halve(images, axis)
    return maxima, (images, maxima)


def _halve_backward(axis: int, saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array]:
    """Give each gradient to the first of the three that is the maximum."""
    images, maxima = saved
    length, outputs = images.shape[axis], maxima.shape[axis]
    first, second, _ = _neighbours(images, axis)
    to_first = jnp.where(first == maxima, gradient, 0)
    to_second = jnp.where((first < maxima) & (second == maxima), gradient, 0)
    to_third = jnp.where((first < maxima) & (second < maxima), gradient, 0)
    # A third neighbour is the next one's first. Both kinds of places in turn are the padded axis.
    even = _pad(to_first, axis, 0, 1, 0.0) + _pad(to_third, axis, 1, 0, 0.0)
    odd = _pad(to_second, axis, 0, 1, 0.0)
    padded = jnp.stack([even, odd], axis + 1).reshape(*even.shape[:axis], 2 * (outputs + 1), *even.shape[axis + 1 :])
    return (jax.lax.slice_in_dim(padded, length % 2, length % 2 + length, 1, axis),)


_halve.defvjp(_halve_forward, _halve_backward)


def _neighbours(images: jax.Array, axis: int) -> list[jax.Array]:
    length = images.shape[axis]
    outputs, before = -(-length // 2), length % 2
    padded = _pad(images, axis, before, 2 * outputs + 1 - length - before, -jnp.inf)
    return [jax.lax.slice_in_dim(padded, i, i + 2 * outputs - 1, 2, axis) for i in range(3)]


def _pad(images: jax.Array, axis: int, before: int, after: int, value: float) -> jax.Array:
    widths = [(before, after) if dimension == axis else (0, 0) for dimension in range(images.ndim)]
    return jnp.pad(images, widths, constant_values=value)


def activation(name: str) -> Callable[[Any], jax.Array]:
    """Return the function that settings call by one of `srl.rl.blocks.ACTIVATIONS`."""
    activate: Callable[[Any], jax.Array] = getattr(nn, name)
    return activate
