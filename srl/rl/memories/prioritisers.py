"""How a transition's priority becomes its mass in the sum tree: the three kinds of replay.

Used by the replay memory only. A mass depends on nothing but the priority and, for ranks, on a stored
ranking, so masses can be computed again when a memory is reopened.
"""

from typing import Protocol

import numpy as np

EPSILON = 1e-6
"""Added to absolute TD errors, so that a transition without error can be drawn again."""


class Prioritiser(Protocol):
    """Turns priorities into masses."""

    def mass(self, priorities: np.ndarray) -> np.ndarray:
        """Return float64 masses `> 0` of priorities `>= 0`, any shape."""
        ...


class Uniform:
    """All transitions are drawn alike."""

    def mass(self, priorities: np.ndarray) -> np.ndarray:
        """Return ones."""
        return np.ones(priorities.shape)


class Proportional:
    """Mass `(priority + EPSILON) ** alpha` (Schaul et al. 2016, equation 1)."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def mass(self, priorities: np.ndarray) -> np.ndarray:
        """Return masses that grow with the priorities."""
        masses: np.ndarray = (priorities.astype(np.float64) + EPSILON) ** self._alpha
        return masses


class RankBased:
    """Mass `(1 / rank) ** alpha` (Schaul et al. 2016, section 3.3); rank 1 has the largest priority.

    Ranks are those in a ranking that was taken of all priorities some time ago. Equal priorities share
    the middle of their ranks. Before the first ranking all have rank 1.

    Args:
        ordered: float32 `[capacity]`, holds the ranking (priorities in rising order).
        state: int64 `[2]`, holds the length of the ranking and the clock it was taken at (0: none yet).
    """

    def __init__(self, alpha: float, ordered: np.ndarray, state: np.ndarray) -> None:
        self._alpha, self._ordered, self._state = alpha, ordered, state

    @property
    def clock(self) -> int:
        """The clock that the ranking was taken at, 0 where there is none."""
        return int(self._state[1])

    def rank(self, priorities: np.ndarray, clock: int) -> None:
        """Take the ranking of all `priorities` `[N]`, at a `clock` above 0."""
        # Whoever is killed in here leaves "no ranking" behind, not a mixture of two.
        self._state[1] = 0
        self._state[0] = len(priorities)
        self._ordered[: len(priorities)] = np.sort(priorities)
        self._state[1] = clock

    def mass(self, priorities: np.ndarray) -> np.ndarray:
        """Return masses that grow with the rank of the priorities."""
        count = int(self._state[0]) if self.clock else 0
        ordered = self._ordered[:count]
        above = count - ordered.searchsorted(priorities, side="right")
        not_below = count - ordered.searchsorted(priorities, side="left")
        ranks = np.maximum((above + not_below + 1) / 2, 1.0)
        masses: np.ndarray = ranks**-self._alpha
        return masses
