"""Segments: the unit of experience, made by actors and stored whole by memories.

A segment is a contiguous piece of one episode of one env lane and is complete in itself: frame stacks,
n-step returns and bootstrapping never need anything outside it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


class End(enum.IntEnum):
    """How a segment's last step ended."""

    TERMINATED = 0
    """The episode reached a terminal state: no value is bootstrapped from the last frame."""
    TRUNCATED = 1
    """The episode was stopped from outside (a time limit): the last frame's value is bootstrapped."""
    CUT = 2
    """The episode goes on in the lane's next segment, which repeats the last
    `window_length - 1 + n_step` frames, so that every transition is in exactly one segment."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """`F` frames of one episode and the `F - 1` steps between them.

    Step `t` took `actions[t]` at `frames[t]`, received `rewards[t]` and arrived at `frames[t + 1]`.

    Attributes:
        frames: `[F, *observation shape]`, single frames in the space's dtype, each stored once.
        actions: `[F - 1, ...]`, int32 for discrete actions, float32 otherwise.
        rewards: `[F - 1]` float32, as the env gave them.
        end: how the last step ended.
        context: leading frames that only fill frame stacks (0 at an episode's start, where the first
            frame is repeated instead); the first transition of the segment starts at this frame.
        lane: the env lane's number in the whole run.
        sequence: number of this segment within its lane; increases by one.
        version: parameter version the last action was chosen with.
        priorities: `[T]` float32 initial priorities of the segment's transitions (absolute TD errors);
            NaN where the actor cannot know one, `None` where the algorithm has none.
        extras: further per-step arrays `[F - 1, ...]` that the algorithm declares.
    """

    frames: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    end: End
    context: int
    lane: int
    sequence: int
    version: int
    priorities: np.ndarray | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def transitions(self, n_step: int) -> range:
        """Return the steps that start an n-step transition in this segment.

        At a cut the last `n_step - 1` steps are left to the next segment, which has their rewards.
        """
        steps = len(self.frames) - 1
        return range(self.context, steps - (n_step - 1) if self.end is End.CUT else steps)


def overlap(window_length: int, n_step: int) -> int:
    """Return how many frames a segment repeats from the one that was cut before it."""
    return window_length - 1 + n_step
