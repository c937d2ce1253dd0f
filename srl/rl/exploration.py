"""Exploration over env lanes: who explores how much, and epsilon-greedy action choice.

Policies of algorithms with discrete actions call this for every step.
"""

import numpy as np


def ladder(lanes: np.ndarray, total_lanes: int, base: float = 0.4, alpha: float = 7.0) -> np.ndarray:
    """Return each lane's constant epsilon `[B]`: base ** (1 + alpha * i / (N - 1)).

    Lane 0 explores most (`base`), lane N - 1 least; a single lane gets `base`. Horgan et al., 2018
    (Ape-X), https://arxiv.org/abs/1803.00933.

    Args:
        lanes: `[B]` each lane's number i in the whole run.
        total_lanes: N.
    """
    exponents: np.ndarray = 1.0 + alpha * np.asarray(lanes) / max(total_lanes - 1, 1)
    return base**exponents


def epsilon_greedy(
    greedy_actions: np.ndarray, action_count: int, epsilon: np.ndarray | float, rng: np.random.Generator
) -> np.ndarray:
    """Return actions `[B]` int32: in each lane, independently, a uniform one with probability epsilon.

    Args:
        greedy_actions: `[B]`, taken otherwise (and with probability 1 / action_count also when exploring).
        epsilon: `[B]`, or one probability for all lanes.
    """
    lanes = len(greedy_actions)
    # Always the same number of draws, so that what one lane does never shifts another one's randomness.
    explores = rng.random(lanes) < epsilon
    uniform = rng.integers(action_count, size=lanes)
    return np.where(explores, uniform, greedy_actions).astype(np.int32)
