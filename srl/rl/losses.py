"""Losses of value-based algorithms: pure functions in rlax's time notation.

`q_tm1` are the values where action `a_tm1` was taken, `r_t` and `discount_t` what followed, `q_t` the
values there. Leading dimensions `[...]` are any batch. Learners call these inside their jitted update.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

ArrayT = TypeVar("ArrayT")

RESCALE_EPSILON = 1e-3


def q_learning(
    q_tm1: jax.Array,
    a_tm1: jax.Array,
    r_t: jax.Array,
    discount_t: jax.Array,
    q_t: jax.Array,
    *,
    rescale: bool = False,
) -> jax.Array:
    """Return TD errors `[...]` of Q-learning: target minus `q_tm1[a_tm1]`. The target has no gradient.

    Args:
        q_tm1: `[..., A]`. a_tm1: `[...]` integers. r_t, discount_t: `[...]`. q_t: `[..., A]`.
        rescale: values are in the space of `rescale`; rewards are not.

    Source: Watkins & Dayan, 1992; Mnih et al., 2015, where `q_t` is the target network's.
    """
    return double_q_learning(q_tm1, a_tm1, r_t, discount_t, q_t, q_t, rescale=rescale)


def double_q_learning(
    q_tm1: jax.Array,
    a_tm1: jax.Array,
    r_t: jax.Array,
    discount_t: jax.Array,
    q_t_value: jax.Array,
    q_t_selector: jax.Array,
    *,
    rescale: bool = False,
) -> jax.Array:
    """Return TD errors `[...]` of double Q-learning: `q_t_selector` `[..., A]` chooses the next action.

    Its value is `q_t_value`'s `[..., A]`; everything else is as in `q_learning`.
    Source: van Hasselt et al., 2016, https://arxiv.org/abs/1509.06461.
    """
    _check_shapes(q_tm1.shape, q_t_value=q_t_value, q_t_selector=q_t_selector)
    _check_shapes(q_tm1.shape[:-1], a_tm1=a_tm1, r_t=r_t, discount_t=discount_t)
    if not jnp.issubdtype(a_tm1.dtype, jnp.integer):
        raise ValueError(f"a_tm1 must hold integers, not {a_tm1.dtype}")
    target = q_target(r_t, discount_t, _pick(q_t_value, q_t_selector.argmax(axis=-1)), rescale=rescale)
    return jax.lax.stop_gradient(target) - _pick(q_tm1, a_tm1)


def q_target(r_t: ArrayT, discount_t: ArrayT, value_t: ArrayT, *, rescale: bool = False) -> ArrayT:
    """Return `r_t + discount_t * value_t`, all `[...]`, numpy or JAX; a rescaled value for a rescaled one."""
    reward: Any = r_t
    discount: Any = discount_t
    if not rescale:
        return reward + discount * value_t  # type: ignore[no-any-return]
    return value_rescale(reward + discount * inverse_value_rescale(value_t))  # type: ignore[no-any-return]


def huber_loss(td_error: jax.Array, delta: float = 1.0) -> jax.Array:
    """Return losses `[...]`: half the square up to `|error| = delta`, a straight line beyond (Huber, 1964)."""
    size = jnp.abs(td_error)
    quadratic = jnp.minimum(size, delta)
    return 0.5 * quadratic**2 + delta * (size - quadratic)


def squared_loss(td_error: jax.Array) -> jax.Array:
    """Return losses `[...]`: half the square."""
    return 0.5 * td_error**2


def weighted_mean(losses: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the mean of `weight * loss` over `[B]`, so that a weight scales a loss and its gradient linearly."""
    _check_shapes(losses.shape, weight=weight)
    return jnp.mean(weight * losses)


def value_rescale(x: ArrayT, epsilon: float = RESCALE_EPSILON) -> ArrayT:
    """Return `h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x`, elementwise, of a numpy or JAX array.

    Source: Pohlen et al., 2018, https://arxiv.org/abs/1805.11593.
    """
    array: Any = x
    xp = array.__array_namespace__()
    return xp.sign(array) * (xp.sqrt(xp.abs(array) + 1.0) - 1.0) + epsilon * array  # type: ignore[no-any-return]


def inverse_value_rescale(x: ArrayT, epsilon: float = RESCALE_EPSILON) -> ArrayT:
    """Return `h^-1(x)`, elementwise, of a numpy or JAX array.

    The paper's `(sqrt(1 + 4 epsilon c) - 1) / (2 epsilon)` loses four of float32's seven digits; this
    equal form loses none.
    """
    array: Any = x
    xp = array.__array_namespace__()
    c = xp.abs(array) + 1.0 + epsilon
    root = 2.0 * c / (xp.sqrt(1.0 + 4.0 * epsilon * c) + 1.0)
    return xp.sign(array) * (root - 1.0) * (root + 1.0)  # type: ignore[no-any-return]


def _pick(q: jax.Array, action: jax.Array) -> jax.Array:
    """Return `q[..., action]` `[...]` by a product: XLA's gather is slow on a CPU, and its gradient slower."""
    hot = action[..., None] == jnp.arange(q.shape[-1])
    return jnp.sum(jnp.where(hot, q, 0.0), axis=-1)


def _check_shapes(expected: tuple[int, ...], **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if array.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, not {array.shape}")
