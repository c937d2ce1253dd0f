"""Losses against values computed by hand and against rlax, plain, jitted and with any batch shape."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from srl.rl import losses

RNG = np.random.default_rng(0)
BATCH, ACTIONS = 16, 5
Q_TM1, Q_T, SELECTOR = (RNG.normal(size=(BATCH, ACTIONS)).astype(np.float32) * 10 for _ in range(3))
A_TM1 = RNG.integers(ACTIONS, size=BATCH).astype(np.int32)
R_T = RNG.normal(size=BATCH).astype(np.float32)
DISCOUNT_T = np.where(RNG.random(BATCH) < 0.3, 0.0, 0.99).astype(np.float32)

variants = pytest.mark.parametrize("variant", [lambda f: f, jax.jit], ids=["plain", "jitted"])


@variants
@pytest.mark.parametrize(
    ("a_tm1", "r_t", "discount_t", "single", "double"),
    [
        # q_tm1 [1, 2]; q_t [3, 5] chooses action 1, the selector [9, 0] action 0.
        (0, 0.5, 0.9, 0.5 + 0.9 * 5 - 1, 0.5 + 0.9 * 3 - 1),
        (1, -2.0, 0.5, -2 + 0.5 * 5 - 2, -2 + 0.5 * 3 - 2),
        (1, 1.0, 0.0, 1 - 2, 1 - 2),
    ],
)
def test_td_errors_by_hand(
    variant: Callable[..., Any], a_tm1: int, r_t: float, discount_t: float, single: float, double: float
) -> None:
    q_tm1, q_t, selector = jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0]), jnp.array([9.0, 0.0])
    rest = (jnp.array(a_tm1), jnp.array(r_t), jnp.array(discount_t))
    assert variant(losses.q_learning)(q_tm1, *rest, q_t) == pytest.approx(single)
    assert variant(losses.double_q_learning)(q_tm1, *rest, q_t, selector) == pytest.approx(double)


@variants
def test_td_errors_equal_rlax(variant: Callable[..., Any]) -> None:
    expected = jax.vmap(rlax.q_learning)(Q_TM1, A_TM1, R_T, DISCOUNT_T, Q_T)
    result = variant(losses.q_learning)(Q_TM1, A_TM1, R_T, DISCOUNT_T, Q_T)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    expected = jax.vmap(rlax.double_q_learning)(Q_TM1, A_TM1, R_T, DISCOUNT_T, Q_T, SELECTOR)
    result = variant(losses.double_q_learning)(Q_TM1, A_TM1, R_T, DISCOUNT_T, Q_T, SELECTOR)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_rescaled_td_error_equals_rlax() -> None:
    pair = rlax.SIGNED_HYPERBOLIC_PAIR

    def one(q_tm1: Any, a_tm1: Any, r_t: Any, discount_t: Any, q_t: Any) -> Any:
        return pair.apply(r_t + discount_t * pair.apply_inv(q_t.max())) - q_tm1[a_tm1]

    expected = jax.vmap(one)(Q_TM1, A_TM1, R_T, DISCOUNT_T, Q_T)
    result = losses.q_learning(Q_TM1, A_TM1, R_T, DISCOUNT_T, Q_T, rescale=True)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


def test_any_batch_shape() -> None:
    flat = losses.double_q_learning(Q_TM1, A_TM1, R_T, DISCOUNT_T, Q_T, SELECTOR)
    folded = [array.reshape(4, 4, *array.shape[1:]) for array in (Q_TM1, A_TM1, R_T, DISCOUNT_T, Q_T, SELECTOR)]
    np.testing.assert_array_equal(losses.double_q_learning(*folded).reshape(-1), flat)


def test_target_has_no_gradient() -> None:
    def total(q_tm1: Any, q_t: Any, selector: Any) -> Any:
        return losses.double_q_learning(q_tm1, A_TM1, R_T, DISCOUNT_T, q_t, selector, rescale=True).sum()

    to_q, to_target, to_selector = jax.grad(total, argnums=(0, 1, 2))(Q_TM1, Q_T, SELECTOR)
    np.testing.assert_array_equal(to_q, -np.eye(ACTIONS)[A_TM1])
    assert not to_target.any()
    assert not to_selector.any()


@pytest.mark.parametrize(
    ("x", "h"),
    [(0.0, 0.0), (3.0, 1.003), (-3.0, -1.003), (8.0, 2.008), (99.0, 9.099), (1e6, 1999.0005)],
)
def test_value_rescale_by_hand(x: float, h: float) -> None:
    for make in (np.array, jnp.array):
        assert float(losses.value_rescale(make(x))) == pytest.approx(h, rel=1e-5)
        assert float(losses.inverse_value_rescale(make(h))) == pytest.approx(x, rel=1e-4, abs=1e-6)


def test_value_rescale_equals_rlax_and_inverts_in_float32() -> None:
    x = np.concatenate([np.linspace(-1e4, 1e4, 101), np.linspace(-1, 1, 101)]).astype(np.float32)
    np.testing.assert_allclose(losses.value_rescale(x), rlax.signed_hyperbolic(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses.inverse_value_rescale(x), rlax.signed_parabolic(x), rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(losses.inverse_value_rescale(losses.value_rescale(x)), x, rtol=1e-5, atol=1e-5)


@variants
@pytest.mark.parametrize("delta", [0.5, 1.0, 3.0])
def test_huber_equals_rlax(variant: Callable[..., Any], delta: float) -> None:
    errors = np.linspace(-5, 5, 41).astype(np.float32)
    result = variant(lambda x: losses.huber_loss(x, delta))(errors)
    np.testing.assert_allclose(result, rlax.huber_loss(errors, delta), rtol=1e-6)


def test_huber_and_square_by_hand() -> None:
    errors = jnp.array([0.5, -1.0, 3.0])
    np.testing.assert_allclose(losses.huber_loss(errors), [0.125, 0.5, 2.5])
    np.testing.assert_allclose(losses.squared_loss(errors), [0.125, 0.5, 4.5])
    np.testing.assert_allclose(jax.vmap(jax.grad(losses.huber_loss))(errors), [0.5, -1.0, 1.0])


@pytest.mark.parametrize("loss", [losses.huber_loss, losses.squared_loss])
def test_weights_scale_loss_and_gradient_linearly(loss: Callable[..., Any]) -> None:
    errors, weight = jnp.array([0.3, -4.0, 20.0]), jnp.array([0.1, 0.5, 0.25])
    gradient = jax.grad(lambda e, w: losses.weighted_mean(loss(e), w))
    np.testing.assert_allclose(gradient(errors, weight), weight * gradient(errors, jnp.ones(3)), rtol=1e-6)
    assert losses.weighted_mean(loss(errors), weight) == pytest.approx(float((weight * loss(errors)).mean()))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"r_t": R_T[:-1]}, "r_t"),
        ({"discount_t": DISCOUNT_T[:, None]}, "discount_t"),
        ({"q_t": Q_T[:, :-1]}, "q_t"),
        ({"a_tm1": A_TM1.astype(np.float32)}, "a_tm1"),
    ],
)
def test_wrong_shapes_are_named(changes: dict[str, Any], names: str) -> None:
    arguments = {"q_tm1": Q_TM1, "a_tm1": A_TM1, "r_t": R_T, "discount_t": DISCOUNT_T, "q_t": Q_T}
    with pytest.raises(ValueError, match=names):
        losses.q_learning(**{**arguments, **changes})
