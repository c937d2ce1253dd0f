"""A sum tree in one array: draws leaves in proportion to their mass, many at once.

The replay memory has one leaf a slot. A binary tree gives every node the sum of its two children;
near the root, where a level has few nodes, whole levels are computed because that is faster than
following single paths.
"""

import numpy as np

_DENSE = 2048  # Nodes up to which computing a whole level beats following 500 paths through it.


class SumTree:
    """Masses `>= 0` of `leaves` leaves, all zero at first.

    An inner node is always computed from its children, never changed by a difference, so rounding does
    not accumulate and the tree is a function of its leaves alone.
    """

    def __init__(self, leaves: int) -> None:
        self._size = _power_of_two(leaves)
        # Node i has the children 2i and 2i + 1; the root is node 1, the leaves follow the inner nodes.
        self._nodes = np.zeros(2 * self._size)
        self._pairs = self._nodes.reshape(-1, 2)
        self._top = min(self._size, _DENSE)
        self._edges = np.zeros(self._top + 1)

    @staticmethod
    def required_bytes(leaves: int) -> int:
        """Return the bytes that a tree takes."""
        return 16 * _power_of_two(leaves)

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._nodes[1])

    def __getitem__(self, leaves: np.ndarray) -> np.ndarray:
        """Return the masses of `leaves` (any shape)."""
        return self._nodes.take(leaves + self._size)

    def set(self, leaves: np.ndarray, masses: np.ndarray) -> None:
        """Set the masses `[N]` of `leaves` `[N]`; of a leaf that appears twice the last mass counts."""
        nodes = leaves + self._size
        self._nodes[nodes] = masses
        level = self._size
        while level > self._top:
            nodes >>= 1
            level >>= 1
            pairs = self._pairs.take(nodes, axis=0)
            self._nodes[nodes] = pairs[:, 0] + pairs[:, 1]
        self._sum_above(level, 2 * level)

    def set_range(self, start: int, masses: np.ndarray) -> None:
        """Set the masses `[N]` of the leaves from `start` on."""
        first, last = self._size + start, self._size + start + len(masses)
        self._nodes[first:last] = masses
        if first < last:
            self._sum_above(first, last)

    def find(self, values: np.ndarray) -> np.ndarray:
        """Return the leaves `[N]` in whose part of the cumulated masses `values` `[N]` lie.

        Values lie in `[0, total]`. A leaf without mass is never found, also where rounding puts a value
        on an edge; the tree must have some mass.
        """
        top = self._nodes[self._top : 2 * self._top]
        np.cumsum(top, out=self._edges[1:])
        edges = self._edges
        nodes = edges[1:].searchsorted(values, side="right")
        np.minimum(nodes, edges[1:].searchsorted(edges[-1]), out=nodes)  # the last node that has mass
        rest = values - edges.take(nodes)
        nodes += self._top
        level = self._top
        while level < self._size:
            pairs = self._pairs.take(nodes, axis=0)
            left = pairs[:, 0]
            # Staying left although `rest` is beyond it happens by rounding, where nothing lies right.
            right = (rest >= left) & (pairs[:, 1] > 0.0)
            rest -= left * right
            nodes <<= 1
            nodes += right
            level <<= 1
        nodes -= self._size
        return nodes

    def _sum_above(self, first: int, last: int) -> None:
        """Compute all ancestors of the nodes `first .. last - 1` of one level."""
        nodes = self._nodes
        while first > 1:
            first, last = first >> 1, (last + 1) >> 1
            np.add(nodes[2 * first : 2 * last : 2], nodes[2 * first + 1 : 2 * last : 2], out=nodes[first:last])


def _power_of_two(leaves: int) -> int:
    return 1 << max(leaves - 1, 1).bit_length()
