"""Epsilon over lanes: the Ape-X ladder's values, and draws that are independent between lanes."""

import numpy as np
import pytest

from srl.rl.exploration import epsilon_greedy, ladder


@pytest.mark.parametrize("total", [2, 3, 8, 360])
def test_ladder_is_the_formula_for_every_lane(total: int) -> None:
    expected = [0.4 ** (1 + 7 * i / (total - 1)) for i in range(total)]
    np.testing.assert_allclose(ladder(np.arange(total), total), expected)


def test_ladder_ends_and_single_lane() -> None:
    np.testing.assert_allclose(ladder(np.array([0, 7]), 8), [0.4, 0.4**8])
    np.testing.assert_allclose(ladder(np.array([0]), 1), [0.4])


def test_ladder_follows_a_changed_total() -> None:
    lanes = np.array([2, 3])
    np.testing.assert_allclose(ladder(lanes, 4), [0.4 ** (1 + 14 / 3), 0.4**8])
    np.testing.assert_allclose(ladder(lanes, 8), [0.4**3, 0.4**4])


def test_lanes_draw_independently() -> None:
    rng = np.random.default_rng(0)
    draws = np.array([epsilon_greedy(np.zeros(2, int), 1000, 0.5, rng) > 0 for _ in range(4000)])
    assert draws.mean(axis=0) == pytest.approx([0.5, 0.5], abs=0.04)
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.06
    both = epsilon_greedy(np.zeros(1000, int), 1000, 1.0, rng)
    assert len(np.unique(both)) > 500


def test_each_lane_has_its_own_epsilon() -> None:
    rng = np.random.default_rng(1)
    epsilon = np.array([0.0, 0.1, 0.6, 1.0])
    draws = np.array([epsilon_greedy(np.array([3, 3, 3, 3]), 4, epsilon, rng) for _ in range(8000)])
    # A uniform draw is the greedy action once in four times.
    np.testing.assert_allclose((draws != 3).mean(axis=0), epsilon * 0.75, atol=0.02)
    counts = np.bincount(draws[:, 3], minlength=4)
    assert counts == pytest.approx([2000] * 4, abs=160)


def test_actions_are_int32_and_repeatable() -> None:
    first, second = (epsilon_greedy(np.arange(5), 9, 0.5, np.random.default_rng(7)) for _ in range(2))
    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, second)
