"""The actor: plays the policy in its lanes and turns what happens into segments.

In one process `Runner.train` steps it beside the trainer; on a broker `ActorServer` does.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from srl.base.algorithm import Exploration, Policy, RLConfig, Step, Tree
from srl.base.errors import CheckpointError
from srl.base.segment import End, Segment, overlap
from srl.base.spaces import DiscreteActions, Spaces
from srl.runner.episodes import Episodes, check_array
from srl.runner.lanes import Lanes, Stacks, restarted

logger = logging.getLogger("srl")

TRAINING_STREAM = 0
"""Number of the random stream that training envs and exploration are seeded from."""
_BUILDER_ARRAYS = ("frames", "actions", "rewards", "count", "context", "sequence")


@dataclass
class Produced:
    """What some steps of an actor made."""

    segments: list[Segment] = field(default_factory=list)
    env_steps: int = 0
    episode_rewards: list[float] = field(default_factory=list)
    episode_lengths: list[int] = field(default_factory=list)


class Actor:
    """Steps `lanes` with `policy`; `step` is one vector step.

    Args:
        lane_numbers: of these lanes in the whole run; they decide seeds and, until `explore_as`, exploration.
        total_lanes: lanes of the whole run. distributed: whether the trainer is another process.
    """

    def __init__(
        self,
        lanes: Lanes,
        policy: Policy,
        config: RLConfig,
        *,
        seed: int,
        lane_numbers: Sequence[int],
        total_lanes: int,
        distributed: bool,
    ) -> None:
        self._lanes = lanes
        self._policy = policy
        self._config = config
        self._lane_numbers = np.asarray(lane_numbers)
        self._distributed = distributed
        self.explore_as(lane_numbers, total_lanes)
        self._rng = np.random.default_rng([seed, TRAINING_STREAM, *lane_numbers])
        self._episodes = Episodes(seed, lane_numbers, TRAINING_STREAM, lanes.spaces)
        frames = lanes.reset(self._episodes.seeds(), self._episodes.next_seed)
        self._stacks = Stacks(frames, config.window_length)
        self._state = policy.initial_state(len(lanes))
        self._builder = self._new_builder(self._lane_numbers)
        self._builder.begin(np.ones(len(lanes), np.bool_), frames)
        self._parameters: Any = None
        self._begun: tuple[Step, int]
        self.version = 0
        self.train_count = 0
        """Clock of exploration schedules; whoever owns the actor keeps it up to date."""

    def set_parameters(self, parameters: Tree, version: int) -> None:
        """Act with these parameters from the next step on."""
        self._parameters = self._policy.load(parameters)
        self.version = version

    def explore_as(self, lane_numbers: Sequence[int], total_lanes: int) -> None:
        """Explore as these of `total_lanes` lanes from the next step on: in a distributed run others come and go."""
        self._exploring, self._total_lanes = np.asarray(lane_numbers), total_lanes

    def step(self) -> Produced:
        """Act once in every lane; returns the segments that this completed."""
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """Choose actions and begin the envs' step; `finish` has to follow. Other lanes can be served in between."""
        explore = Exploration(self.train_count, self._exploring, self._total_lanes, self._distributed)
        chosen = self._policy.act(self._parameters, self._stacks.array, self._state, self._rng, explore)
        self._lanes.step_async(chosen.action)
        self._begun = chosen, self.version

    def finish(self) -> Produced:
        """Take what the envs' step led to; returns the segments that this completed."""
        chosen, version = self._begun
        segments = self._builder.score(chosen.scores)
        step = self._lanes.step_wait()
        self._builder.append(chosen, step.active, step.rewards, step.frames, version)
        segments += self._builder.end(step.terminated, step.truncated)
        if step.replaced.any():
            segments += self._builder.flush(step.replaced)
        self._episodes.record(chosen.action, step)
        self._stacks.push(step)
        self._state = chosen.state
        if step.started.any():
            self._builder.begin(step.started, step.first_frames)
            self._state = restarted(self._state, self._policy.initial_state(len(self._lanes)), step.started)
        return Produced(segments, int(step.active.sum()), list(step.episode_rewards), list(step.episode_lengths))

    def flush(self) -> list[Segment]:
        """Return the segments of unfinished episodes when the actor stops for good.

        They end as truncated: from here on nothing follows, and the last frame's value is bootstrapped.
        """
        return self._builder.flush(np.ones(len(self._lanes), np.bool_))

    def get_state(self) -> dict[str, Any]:
        """Return everything that the next step depends on, but for parameters and clock, as a tree of arrays.

        Not between `begin` and `finish`.
        """
        return {
            "lanes": self._lane_numbers.astype(np.int64),
            "rng": self._rng.bit_generator.state,
            "episodes": self._episodes.get_state(),
            "segments": self._builder.get_state(),
            "stacks": self._stacks.array.copy(),
            "policy": {} if self._state is None else _copied(self._state),
        }

    def set_state(self, state: Tree) -> list[Segment]:
        """Go on from `get_state`'s tree.

        Lanes whose env does not get to where it was begin new episodes, and the log says why. What such a lane had
        not handed out yet is returned, as `flush` does. That is everything where the state is of other lanes.
        """
        self.check_valid(state)
        if not np.array_equal(state["lanes"], self._lane_numbers):
            builder = self._new_builder(state["lanes"])
            builder.set_state(state["segments"])
            logger.warning("all lanes start new episodes: the run had %d lanes before", len(state["lanes"]))
            return builder.flush(np.ones(len(state["lanes"]), np.bool_))
        self._rng.bit_generator.state = state["rng"]
        self._episodes.set_state(state["episodes"])
        self._builder.set_state(state["segments"])
        self._stacks.array[:] = state["stacks"]
        self._state = _copied(state["policy"]) or None
        restored, why = self._episodes.replay(self._lanes, self._stacks.array[:, -1])
        if restored.all():
            return []
        logger.warning(
            "%d of %d lanes start new episodes: %s; all else goes on exactly", (~restored).sum(), len(restored), why
        )
        segments = self._builder.flush(~restored)
        frames = self._episodes.begin_anew(self._lanes, ~restored)
        self._builder.begin(~restored, frames)
        self._stacks.array[~restored] = frames[~restored, None]
        self._state = restarted(self._state, self._policy.initial_state(len(self._lanes)), ~restored)
        return segments

    def check_valid(self, state: Tree) -> None:
        """Raise `CheckpointError` where this is no state of such an actor."""
        names = {"lanes", "rng", "episodes", "segments", "stacks", "policy"}
        if set(state) != names:
            raise CheckpointError(f"no state of an actor: it has {sorted(state)}, not {sorted(names)}")
        lanes = state["lanes"]
        if np.ndim(lanes) != 1 or not len(lanes):
            raise CheckpointError(f"no state of an actor: its lanes are {lanes!r}")
        check_array(state, "lanes", (len(lanes),), np.int64)
        stacks = self._stacks.array
        check_array(state, "stacks", (len(lanes), *stacks.shape[1:]), stacks.dtype)
        Episodes(0, lanes, TRAINING_STREAM, self._lanes.spaces).check_valid(state["episodes"])
        self._new_builder(lanes).check_valid(state["segments"])
        _check_policy_state(state["policy"], self._policy.initial_state(len(lanes)) or {})
        try:
            np.random.default_rng(0).bit_generator.state = state["rng"]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"an actor's random generator is damaged: {error!r}") from error

    def _new_builder(self, lane_numbers: np.ndarray) -> "SegmentBuilder":
        return SegmentBuilder(self._lanes.spaces, self._config, lane_numbers, self._policy.priorities)

    def close(self) -> None:
        """Close the envs."""
        self._lanes.close()


def _copied(tree: Tree) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else np.array(value) for name, value in tree.items()}


def _check_policy_state(state: Any, expected: Tree) -> None:
    if not isinstance(state, Mapping) or set(state) != set(expected):
        raise CheckpointError("the stored state of the policy is of another policy")
    for name, value in expected.items():
        if isinstance(value, Mapping):
            _check_policy_state(state[name], value)
        else:
            check_array(state, name, np.shape(value), np.asarray(value).dtype)


class SegmentBuilder:
    """Collects the steps of lanes in arrays and cuts them into segments."""

    def __init__(
        self,
        spaces: Spaces,
        config: RLConfig,
        lane_numbers: np.ndarray,
        priorities: Callable[[np.ndarray, End, range, Mapping[str, np.ndarray]], np.ndarray | None],
    ) -> None:
        lanes, length = len(lane_numbers), config.steps_per_segment(spaces)
        self._length = length
        self._n_step = config.n_step_frames
        self._window = config.window_length
        self._priorities = priorities
        self._lane_numbers = lane_numbers
        frame = spaces.observation
        self._frames = np.zeros((lanes, length + 1, *frame.shape), frame.dtype)
        if isinstance(spaces.action, DiscreteActions):
            self._actions = np.zeros((lanes, length), np.int32)
        else:
            self._actions = np.zeros((lanes, length, len(spaces.action.low)), np.float32)
        self._rewards = np.zeros((lanes, length), np.float32)
        self._scores: dict[str, np.ndarray] = {}
        self._extras: dict[str, np.ndarray] = {}
        self._count = np.zeros(lanes, np.int64)  # frames each lane holds
        self._context = np.zeros(lanes, np.int64)
        self._sequence = np.zeros(lanes, np.int64)
        self._rows = np.arange(lanes)
        self._version = 0  # that the last step was chosen with; parameters may have come since

    def begin(self, started: np.ndarray, first_frames: np.ndarray) -> None:
        """Start an episode in the lanes of a mask."""
        self._frames[started, 0] = first_frames[started]
        self._count[started] = 1
        self._context[started] = 0

    def score(self, scores: Mapping[str, np.ndarray]) -> list[Segment]:
        """Note what the policy thinks of the current frames, then cut the lanes that are full.

        Cutting waits for this moment because only now the value of a segment's last frame is known.
        """
        for name, values in scores.items():
            if name not in self._scores:
                self._scores[name] = np.full((len(self._rows), self._length + 1), np.nan, np.float32)
            self._scores[name][self._rows, self._count - 1] = values
        full = np.flatnonzero(self._count == self._length + 1)
        return [self._cut(int(lane)) for lane in full]

    def append(self, chosen: Step, active: np.ndarray, rewards: np.ndarray, frames: np.ndarray, version: int) -> None:
        """Add a step, chosen with parameters of `version`, to the lanes of a mask."""
        self._version = version
        rows = self._rows if active.all() else np.flatnonzero(active)
        at = self._count[rows]
        self._frames[rows, at] = frames[rows]
        self._actions[rows, at - 1] = chosen.action[rows]
        self._rewards[rows, at - 1] = rewards[rows]
        for name, values in chosen.extras.items():
            if name not in self._extras:
                shape = (len(self._rows), self._length, *values.shape[1:])
                self._extras[name] = np.zeros(shape, values.dtype)
            self._extras[name][rows, at - 1] = values[rows]
        for values in self._scores.values():
            # The frame just reached is not scored yet; an old segment's value must not stand in for it.
            values[rows, at] = np.nan
        self._count[rows] += 1

    def end(self, terminated: np.ndarray, truncated: np.ndarray) -> list[Segment]:
        """Finish the segments of lanes whose episode ended; a terminal state outweighs a time limit."""
        lanes = np.flatnonzero(terminated | truncated)
        ends = [End.TERMINATED if terminated[lane] else End.TRUNCATED for lane in lanes]
        segments = [self._segment(int(lane), end) for lane, end in zip(lanes, ends, strict=True)]
        self._count[lanes] = 0  # nothing more can be cut or flushed until the lane begins again
        return segments

    def flush(self, mask: np.ndarray) -> list[Segment]:
        """Finish the lanes of a mask that have steps of their own, in the middle of their episodes."""
        lanes = np.flatnonzero(mask & (self._count - 1 > self._context))
        segments = [self._segment(int(lane), End.TRUNCATED) for lane in lanes]
        self._count[lanes] = 1
        return segments

    def get_state(self) -> dict[str, Any]:
        """Return the steps that are in no segment yet, and the segments' numbers, as a tree of arrays."""
        return {
            **{name: getattr(self, f"_{name}").copy() for name in _BUILDER_ARRAYS},
            "scores": _copied(self._scores),
            "extras": _copied(self._extras),
            "version": self._version,
        }

    def set_state(self, state: Tree) -> None:
        """Go on from `get_state`'s tree."""
        self.check_valid(state)
        for name in _BUILDER_ARRAYS:
            getattr(self, f"_{name}")[:] = state[name]
        self._scores, self._extras = _copied(state["scores"]), _copied(state["extras"])
        self._version = state["version"]

    def check_valid(self, state: Tree) -> None:
        """Raise `CheckpointError` where this is no state of a builder of so many lanes and such segments."""
        if set(state) != {*_BUILDER_ARRAYS, "scores", "extras", "version"} or not isinstance(state["version"], int):
            raise CheckpointError(f"no state of unfinished segments: {sorted(state)}")
        for name in _BUILDER_ARRAYS:
            own = getattr(self, f"_{name}")
            check_array(state, name, own.shape, own.dtype)
        lanes, frames = self._frames.shape[:2]
        for name in state["scores"]:
            check_array(state["scores"], name, (lanes, frames), np.float32)
        for name, values in state["extras"].items():
            check_array(state["extras"], name, (lanes, frames - 1, *np.shape(values)[2:]), values.dtype)
        if (state["count"] > frames).any() or (state["count"] < 0).any() or (state["context"] >= frames).any():
            raise CheckpointError("unfinished segments hold more frames than segments have")

    def _cut(self, lane: int) -> Segment:
        segment = self._segment(lane, End.CUT)
        kept = overlap(self._window, self._n_step)
        count = self._count[lane]
        for array, length in [
            (self._frames, kept),
            *((values, kept) for values in self._scores.values()),
            (self._actions, kept - 1),
            (self._rewards, kept - 1),
            *((values, kept - 1) for values in self._extras.values()),
        ]:
            stop = count if length == kept else count - 1
            array[lane, :length] = array[lane, stop - length : stop].copy()
        self._count[lane] = kept
        self._context[lane] = self._window - 1
        return segment

    def _segment(self, lane: int, end: End) -> Segment:
        count = int(self._count[lane])
        segment = Segment(
            frames=self._frames[lane, :count].copy(),
            actions=self._actions[lane, : count - 1].copy(),
            rewards=self._rewards[lane, : count - 1].copy(),
            end=end,
            context=int(self._context[lane]),
            lane=int(self._lane_numbers[lane]),
            sequence=int(self._sequence[lane]),
            version=self._version,
            extras={name: values[lane, : count - 1].copy() for name, values in self._extras.items()},
        )
        self._sequence[lane] += 1
        scores = {name: values[lane, :count] for name, values in self._scores.items()}
        priorities = self._priorities(segment.rewards, end, segment.transitions(self._n_step), scores)
        return segment if priorities is None else replace(segment, priorities=priorities.astype(np.float32))
