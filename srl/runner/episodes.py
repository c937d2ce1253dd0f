"""Open episodes: which seed each episode of a lane begins with, and how an unfinished one is brought back.

An actor has one `Episodes`. Envs cannot be saved, but one that is deterministic gets to the same place again from
its episode's seed and actions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from srl.base.algorithm import Tree
from srl.base.env import as_seeds
from srl.base.errors import CheckpointError
from srl.base.spaces import DiscreteActions, Spaces
from srl.runner.lanes import Lanes, LaneStep

REPLAYED_STEPS = 100_000
"""Steps of the longest episode that is brought back; longer ones would take long to play again, and much memory."""
_FORGOTTEN = -1
_FIRST_ROWS = 256


class Episodes:
    """The open episode of each of `B` lanes.

    An episode is one of the env: where a processor ends the agent's episodes more often, at a lost life, it goes on.

    Args:
        stream: of random numbers that the seeds are of.
    """

    def __init__(self, seed: int, lane_numbers: Sequence[int], stream: int, spaces: Spaces) -> None:
        lanes = len(lane_numbers)
        self._seed, self._stream, self._lane_numbers = seed, stream, list(lane_numbers)
        self._numbers = np.zeros(lanes, np.int64)
        self._rewards = np.zeros(lanes, np.float64)
        # One row a step, with the actions of all lanes; each lane's episode began before the row of its start.
        if isinstance(spaces.action, DiscreteActions):
            self._actions = np.zeros((_FIRST_ROWS, lanes), np.int32)
        else:
            self._actions = np.zeros((_FIRST_ROWS, lanes, len(spaces.action.low)), np.float32)
        self._count = 0
        self._starts = np.zeros(lanes, np.int64)

    def seeds(self) -> list[int]:
        """Return the seed of each lane's episode."""
        return [self._seed_of(lane) for lane in range(len(self._lane_numbers))]

    def next_seed(self, lane: int) -> int:
        """Go on to a lane's next episode and return its seed."""
        self._numbers[lane] += 1
        return self._seed_of(lane)

    def record(self, actions: np.ndarray, step: LaneStep) -> None:
        """Note the actions `[B, ...]` of a step and what it led to."""
        if self._count == len(self._actions):
            self._make_room()
        self._actions[self._count] = actions
        self._count += 1
        self._rewards += np.where(step.active, step.rewards, 0.0)
        if step.started.any():
            began = np.zeros(len(self._starts), np.bool_)
            began[list(step.episode_lanes)] = True
            self._begin(began & step.started)

    def get_state(self) -> dict[str, Any]:
        """Return a tree of arrays."""
        first = self._first()
        return {
            "seed": self._seed,
            "numbers": self._numbers.copy(),
            "rewards": self._rewards.copy(),
            "starts": np.where(self._starts == _FORGOTTEN, _FORGOTTEN, self._starts - first),
            "actions": self._actions[first : self._count].copy(),
        }

    def set_state(self, state: Tree) -> None:
        """Go on from `get_state`'s tree; `replay` has to follow."""
        self.check_valid(state)
        self._seed = state["seed"]
        self._numbers, self._rewards = state["numbers"].copy(), state["rewards"].copy()
        self._starts, self._count = state["starts"].copy(), len(state["actions"])
        self._actions = state["actions"].copy()

    def check_valid(self, state: Tree) -> None:
        """Raise `CheckpointError` where this is no state of the episodes of so many lanes."""
        if set(state) != {"seed", "numbers", "rewards", "starts", "actions"} or not isinstance(state["seed"], int):
            raise CheckpointError(f"no state of open episodes: {sorted(state)}")
        for name, own in (("numbers", self._numbers), ("rewards", self._rewards), ("starts", self._starts)):
            check_array(state, name, own.shape, own.dtype)
        count = len(state["actions"]) if np.ndim(state["actions"]) else 0
        check_array(state, "actions", (count, *self._actions.shape[1:]), self._actions.dtype)
        if (state["starts"] > count).any() or (state["starts"] < _FORGOTTEN).any():
            raise CheckpointError("open episodes begin where no step was recorded")

    def replay(self, lanes: Lanes, frames: np.ndarray) -> tuple[np.ndarray, str]:
        """Bring the lanes to where they were, which is where `frames` `[B, *frame]` were seen.

        Returns:
            `[B]` bool, the lanes that are there again, and why others are not. These have been left anywhere;
            `begin_anew` has to follow.
        """
        restored = np.zeros(len(self._starts), np.bool_)
        if not lanes.can_replay:
            return restored, "single lanes of this env cannot be played again"
        why = ""
        for lane, start in enumerate(self._starts):
            if start == _FORGOTTEN:
                why = why or f"episodes of more than {REPLAYED_STEPS:,} steps are not played again"
                continue
            reached = lanes.replay(lane, self._seed_of(lane), self._actions[start : self._count, lane])
            restored[lane] = (
                reached is not None
                and bool(np.array_equal(reached[0], frames[lane]))
                and reached[1] == self._rewards[lane]
            )
            if not restored[lane]:
                why = "the env is not deterministic: the same seed and actions led elsewhere"
        return restored, why

    def begin_anew(self, lanes: Lanes, chosen: np.ndarray) -> np.ndarray:
        """Begin the next episode in the lanes of a mask; returns frames `[B, *frame]`, those of the mask count."""
        for lane in np.flatnonzero(chosen):
            self.next_seed(int(lane))
        self._begin(chosen)
        seeds = self.seeds()
        if chosen.all():
            return lanes.reset(seeds, self.next_seed)
        frames = np.zeros((len(chosen), *lanes.spaces.observation.shape), lanes.spaces.observation.dtype)
        for lane in np.flatnonzero(chosen):
            reached = lanes.replay(int(lane), seeds[lane], ())
            assert reached is not None  # no step, no end
            frames[lane] = reached[0]
        return frames

    def _seed_of(self, lane: int) -> int:
        return as_seeds(self._seed, [self._lane_numbers[lane]], self._stream, int(self._numbers[lane]))[0]

    def _begin(self, began: np.ndarray) -> None:
        self._starts[began] = self._count
        self._rewards[began] = 0.0

    def _first(self) -> int:
        """Return the first row that is still needed."""
        return int(self._starts.min(where=self._starts != _FORGOTTEN, initial=self._count))

    def _make_room(self) -> None:
        self._starts[self._count - self._starts > REPLAYED_STEPS] = _FORGOTTEN
        first = self._first()
        kept = self._actions[first : self._count]
        self._actions = np.zeros((max(_FIRST_ROWS, 2 * len(kept)), *kept.shape[1:]), kept.dtype)
        self._actions[: len(kept)] = kept
        self._starts[self._starts != _FORGOTTEN] -= first
        self._count = len(kept)


def check_array(state: Tree, name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise `CheckpointError` where a state lacks an array of this name, shape and dtype."""
    array = state.get(name)
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
        found = "missing" if array is None else f"{list(np.shape(array))} {getattr(array, 'dtype', type(array))}"
        raise CheckpointError(
            f"{name} of the stored state is {found} where {list(shape)} {np.dtype(dtype)} is needed; it was made with "
            "other settings or for another env"
        )
