import numpy as np
import pytest

from srl.rl.memories.sum_tree import SumTree


@pytest.mark.parametrize("leaves", [1, 2, 3, 1000, 5000, 20_000])
def test_find_agrees_with_cumulated_masses(leaves: int) -> None:
    rng = np.random.default_rng(leaves)
    masses = rng.integers(0, 4, leaves).astype(float)  # integers, so that sums are exact
    masses[-1] = 2.0
    tree = SumTree(leaves)
    tree.set(rng.permutation(leaves), np.zeros(leaves))
    order = rng.permutation(leaves)
    tree.set(order, masses[order])
    values = rng.random(3000) * tree.total
    expected = np.searchsorted(np.cumsum(masses), values, side="right")
    np.testing.assert_array_equal(tree.find(values), expected)
    assert tree.total == masses.sum()
    np.testing.assert_array_equal(tree[np.arange(leaves)], masses)


def test_range_equals_single_leaves() -> None:
    rng = np.random.default_rng(0)
    single, ranged = SumTree(9000), SumTree(9000)
    for start, length in [(0, 9000), (17, 1), (4095, 2), (8000, 1000), (3, 0), (123, 4567)]:
        masses = rng.random(length)
        single.set(np.arange(start, start + length), masses)
        ranged.set_range(start, masses)
    values = rng.random(2000) * single.total
    assert single.total == ranged.total
    np.testing.assert_array_equal(single.find(values), ranged.find(values))


def test_last_mass_of_a_repeated_leaf_counts() -> None:
    tree = SumTree(5000)
    tree.set(np.array([7, 4999, 7, 7]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert tree.total == 6.0
    np.testing.assert_array_equal(tree[np.array([7, 4999])], [4.0, 2.0])


@pytest.mark.parametrize("leaves", [5, 3000, 40_000])
def test_leaves_without_mass_are_never_found(leaves: int) -> None:
    rng = np.random.default_rng(1)
    tree = SumTree(leaves)
    for _ in range(10):
        masses = rng.random(leaves) * 10.0 ** rng.integers(-12, 12, leaves) * (rng.random(leaves) < 0.3)
        masses[rng.integers(leaves)] = 0.1
        tree.set_range(0, masses)
        edges = np.cumsum(masses)
        values = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, np.inf), [0.0, tree.total]])
        assert (masses[tree.find(np.minimum(values, tree.total))] > 0).all()


def test_the_only_leaf_with_mass_is_found_from_both_edges() -> None:
    tree = SumTree(5000)
    for leaf in (0, 2047, 2048, 4999):
        tree.set_range(0, np.zeros(5000))
        tree.set(np.array([leaf]), np.array([0.1]))
        np.testing.assert_array_equal(tree.find(np.array([0.0, 0.05, 0.1])), leaf)


def test_sums_do_not_drift() -> None:
    rng = np.random.default_rng(2)
    tree = SumTree(6000)
    for _ in range(300):
        tree.set(rng.integers(0, 6000, 500), rng.random(500) * 10.0 ** rng.integers(-9, 9, 500))
    tree.set_range(0, np.zeros(6000))
    assert tree.total == 0.0
