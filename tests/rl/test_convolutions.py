"""Convolutions: every form computes the same, pooling as defined, and the stacks have the published shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from srl.rl.blocks import ImageBlock
from srl.rl.convolutions import convolve, image_layers, max_pool


@pytest.mark.parametrize(
    ("height", "width", "channels", "size", "stride"),
    [(84, 84, 4, 8, 4), (20, 20, 32, 4, 2), (9, 9, 64, 3, 1), (37, 50, 2, 8, 4), (13, 10, 3, 4, 2), (9, 8, 16, 3, 1)],
)
def test_the_product_form_equals_the_direct_one_with_its_gradients(
    height: int, width: int, channels: int, size: int, stride: int
) -> None:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(3, height, width, channels)).astype(np.float32)
    kernel = (rng.normal(size=(size, size, channels, 5)) / size / channels**0.5).astype(np.float32)

    def weighted(form: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def total(images: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
            outputs = convolve(images, kernel, stride, form)  # type: ignore[arg-type]
            return (outputs**2).sum(), outputs

        gradients, outputs = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(images, kernel)
        return outputs, gradients

    for direct, product in zip(*map(jax.tree.leaves, (weighted("direct"), weighted("product"))), strict=True):
        assert direct.shape == product.shape
        np.testing.assert_allclose(direct, product, rtol=1e-3, atol=1e-3)


def test_a_kernel_that_is_no_multiple_of_its_stride_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        convolve(jnp.zeros((1, 9, 9, 1)), jnp.zeros((3, 3, 1, 1)), 2, "product")


@pytest.mark.parametrize(("height", "width"), [(84, 84), (21, 42), (11, 5), (1, 2)])
def test_max_pool_equals_reduce_window(height: int, width: int) -> None:
    images = np.random.default_rng(0).normal(size=(2, height, width, 3)).astype(np.float32)

    def reference(images: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    np.testing.assert_array_equal(max_pool(images), reference(images))
    gradients = [
        jax.grad(lambda images, pool=pool: (pool(images) ** 2).sum())(images) for pool in (max_pool, reference)
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(6, 8), (7, 5), (1, 2)])
def test_the_gradient_of_equal_maxima_goes_to_one_of_them(height: int, width: int) -> None:
    images = jnp.ones((1, height, width, 1))
    gradient = jax.grad(lambda images: max_pool(images).sum())(images)
    assert gradient.sum() == max_pool(images).size
    np.testing.assert_array_equal(gradient, np.round(gradient))


@pytest.mark.parametrize(
    ("kind", "features"),
    [("dqn", (7, 7, 64)), pytest.param("r2d3", (11, 11, 32), marks=pytest.mark.slow)],
)
def test_stacks_have_the_published_shapes_and_parameters_that_fit_every_form(
    kind: str, features: tuple[int, int, int]
) -> None:
    block = ImageBlock(kind=kind)
    images = np.random.default_rng(0).random((2, 84, 84, 4), np.float32)
    direct, product = image_layers(block, "direct"), image_layers(block, "product")
    parameters = direct.init(jax.random.key(0), images)
    outputs = [np.asarray(jax.jit(layers.apply)(parameters, images)) for layers in (direct, product)]
    assert outputs[0].shape == (2, *features)
    np.testing.assert_allclose(*outputs, rtol=1e-3, atol=1e-4)
