"""The replay memory of off-policy algorithms: stores segments, draws batches of n-step transitions.

An algorithm's `Config.make_memory` builds it; the trainer inserts, samples and updates priorities. Frames
are stored once and stacked when they are sampled.
"""

import dataclasses
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from srl.base.algorithm import MemoryPosition, Sample
from srl.base.errors import CheckpointError, ConfigError, SpaceError
from srl.base.segment import End, Segment
from srl.base.spaces import Spaces
from srl.rl.memories.config import MemoryConfig
from srl.rl.memories.marks import check_mark
from srl.rl.memories.prioritisers import Prioritiser, Proportional, RankBased, Uniform
from srl.rl.memories.sizes import ExtraSpecs, check_layout_fits, ring_layout, spare_slots
from srl.rl.memories.storage import open_arrays
from srl.rl.memories.sum_tree import SumTree

_NO_TRANSITION = -1.0  # Stored as the priority of slots that start no transition.


class ReplayMemory:
    """A ring of frame slots with a sum tree over the transitions that start at them.

    Step `t` of a segment lies in the slot of frame `t`, so a transition is the slot of its first frame.
    A segment lies in contiguous slots: where the end of the ring has no room for one, it is skipped.
    Addresses count slots without ever wrapping (slot = address % slots); hence everything below the oldest
    segment's address is gone, and an address never means two transitions. Segments leave whole, oldest first.

    Whoever is killed, at any instruction, leaves a consistent memory in the files: space is given up by one
    store of the oldest segment's number, and filled by one store of the next segment's number once its data
    are complete. The rest follows from what is stored.

    Files are ahead of the newest checkpoint when a run is killed. The ring has spare slots, so what was stored at a
    checkpoint is not written over at once: `mark` and `go_back` bring it back as long as there is `room`.

    Not thread-safe: the trainer holds a lock around every call.
    """

    def __init__(
        self,
        spaces: Spaces,
        config: MemoryConfig,
        *,
        batch_size: int,
        n_step: int,
        discount: float,
        updates_per_dispatch: int,
        segment_length: int,
        reward_clip: tuple[float, float] | None = None,
        seed: int,
        directory: Path | None = None,
        extras: ExtraSpecs | None = None,
    ) -> None:
        """Make an empty memory, or open the one in `directory`.

        Args:
            spaces: frames, actions and how many frames are stacked.
            config: copied; later changes do not count.
            batch_size: transitions an update uses.
            n_step: steps a transition spans where its segment does not end before.
            discount: discount of one step.
            updates_per_dispatch: updates that are sampled for at once.
            segment_length: steps that a segment has at most; sizes the ring.
            reward_clip: bounds of every single reward, applied when it is sampled.
            seed: of the draws.
            directory: where the memory's files are or will be; `None` keeps it in plain memory.
            extras: per-step arrays that segments carry.

        Raises:
            ConfigError: settings contradict each other, the machine has no room, or `directory` holds a
                memory of another layout.
            CheckpointError: a file in `directory` is damaged.
        """
        config.validate()
        config.check_batch(batch_size)
        extras = extras or {}
        layout = ring_layout(spaces, config, n_step, segment_length, extras)
        self._config, self._spaces, self._extras = dataclasses.replace(config), spaces, dict(extras)
        self._frame = spaces.observation.shape, np.dtype(spaces.observation.dtype)
        self._n_step, self._reward_clip = n_step, reward_clip
        self._batch_size, self._updates_per_dispatch = batch_size, updates_per_dispatch
        # Whole segments leave, so a full memory is short of its capacity by up to one segment.
        self._warmup_size = min(config.warmup_size, config.capacity - segment_length)
        if self._warmup_size < 1:
            raise ConfigError(
                f"memory.capacity ({config.capacity}) must be above segment_length ({segment_length}); "
                "raise memory.capacity or lower segment_length"
            )
        self._slots = layout.settings["slots"]
        self._spare = spare_slots(config, segment_length)
        check_layout_fits(layout, config, directory)
        self._arrays = arrays = open_arrays(layout, directory)
        self._frames, self._actions, self._rewards = arrays["frames"], arrays["actions"], arrays["rewards"]
        self._priorities, self._counters = arrays["priorities"], arrays["counters"]
        self._in_files = directory is not None
        if not arrays["identity"][0]:  # just made
            arrays["identity"][0] = 1 + secrets.randbelow((1 << 53) - 1)
        self._tree = SumTree(self._slots)
        self._prioritiser = _prioritiser(config, arrays)
        self._rng = np.random.default_rng(seed)
        # [k, j]: how much reward j of a transition over k steps counts.
        exponents = np.arange(n_step)
        reached = exponents < np.arange(n_step + 1)[:, None]
        self._reward_weights = np.where(reached, float(discount) ** exponents, 0.0)
        self._discounts = (float(discount) ** np.arange(n_step + 1)).astype(np.float32)
        self._offsets = np.arange(spaces.window_length - 1, -1, -1)
        self._compute_masses()

    # ---- the Memory protocol -------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many transitions can be sampled; never more than the capacity."""
        return self._transitions_before(self._newest) - self._transitions_before(self._oldest)

    @property
    def position(self) -> MemoryPosition:
        """Which memory this is, the same when its files are opened again, and how many segments it has stored."""
        return MemoryPosition(int(self._arrays["identity"][0]), self._newest)

    @property
    def capacity(self) -> int:
        """Transitions it can hold."""
        return self._config.capacity

    @property
    def batch_size(self) -> int:
        """Transitions an update uses."""
        return self._batch_size

    @property
    def warmup_size(self) -> int:
        """Transitions that must be there before the first update.

        The setting, or one segment less than the capacity where that is lower.
        """
        return self._warmup_size

    @property
    def updates_per_dispatch(self) -> int:
        """Updates that are sampled for and done at once."""
        return self._updates_per_dispatch

    def insert(self, segments: Sequence[Segment]) -> int:
        """Store segments, in their order, and return how many transitions they added.

        A transition without a finite priority gets the largest priority so far, 1 where there was none.

        Raises:
            SpaceError: a segment does not fit the spaces or the ring; then none is stored.
        """
        self.check(segments)
        counts = [len(segment.transitions(self._n_step)) for segment in segments]
        address = self._start(self._newest)
        run: list[Segment] = []
        frames, transitions = 0, 0
        for segment, count in zip(segments, counts, strict=True):
            if count == 0:
                continue
            length = len(segment.frames)
            wraps = address % self._slots + frames + length > self._slots
            if wraps or transitions + count > self._config.capacity:
                self._write(run, address)
                address += frames
                run, frames, transitions = [], 0, 0
            if wraps:
                address += -address % self._slots
            run.append(segment)
            frames, transitions = frames + length, transitions + count
        self._write(run, address)
        return sum(counts)

    def check(self, segments: Sequence[Segment]) -> None:
        """Raise `SpaceError` where a segment does not fit the spaces or the ring."""
        for segment in segments:
            self._check(segment, len(segment.transitions(self._n_step)))

    def sample(self, updates: int, train_count: int) -> Sample:
        """Draw batches for `updates` updates, each stratified: one draw from every `1 / batch_size` of the mass.

        Args:
            updates: `K`.
            train_count: updates done so far, the clock of the importance correction and of rankings.

        Returns:
            Batches `[K, B, ...]`: `observation_tm1` and `observation_t` `[K, B, window_length, *frame]`, oldest
            frame first, an episode's first frame repeated before its start; `action_tm1`; `reward_t`, the
            discounted sum of the rewards up to `observation_t`; `discount_t`, the factor of the value of
            `observation_t`, 0 where the episode terminated there; `weight`, the importance weights
            `(N P)^-beta` over their maximum in the batch (Schaul et al. 2016, section 3.4); and the extras of
            the first step.

        Raises:
            ValueError: the memory is empty.
        """
        if not len(self):
            raise ValueError("nothing can be sampled from an empty memory")
        self._rank_again(train_count)
        strata = np.arange(self._batch_size) + self._rng.random((updates, self._batch_size))
        slots = self._tree.find(strata.ravel() * (self._tree.total / self._batch_size))
        shape = (updates, self._batch_size)

        steps = self._arrays["steps"].take(slots).astype(np.int64)
        back = self._arrays["back"].take(slots).astype(np.int64)
        end_back = np.minimum(back + steps, self._spaces.window_length - 1)
        discounts = self._discounts.take(steps) * self._arrays["bootstraps"].take(slots)
        batches = {
            "observation_tm1": self._stack(slots, back, shape),
            "action_tm1": _reshape(self._actions.take(slots, axis=0), shape),
            "reward_t": self._returns(slots, steps).reshape(shape),
            "discount_t": discounts.reshape(shape),
            "observation_t": self._stack(slots + steps, end_back, shape),
            "weight": self._importance_weights(slots.reshape(shape), train_count),
        }
        for name in self._extras:
            batches[name] = _reshape(self._arrays[f"extra_{name}"].take(slots, axis=0), shape)
        laps = (self._start(self._newest) - 1 - slots) // self._slots
        return Sample(batches, slots.reshape(shape), laps.reshape(shape))

    def example(self) -> dict[str, np.ndarray]:
        """Return zero batches of the shapes and dtypes that `sample` gives for a full dispatch."""
        shape = (self._updates_per_dispatch, self._batch_size)
        stacks = (*shape, self._spaces.window_length, *self._frames.shape[1:])
        batches = {
            "observation_tm1": np.zeros(stacks, self._frames.dtype),
            "action_tm1": np.zeros((*shape, *self._actions.shape[1:]), self._actions.dtype),
            "reward_t": np.zeros(shape, np.float32),
            "discount_t": np.zeros(shape, np.float32),
            "observation_t": np.zeros(stacks, self._frames.dtype),
            "weight": np.zeros(shape, np.float32),
        }
        for name in self._extras:
            values = self._arrays[f"extra_{name}"]
            batches[name] = np.zeros((*shape, *values.shape[1:]), values.dtype)
        return batches

    def update_priorities(self, sample: Sample, priorities: np.ndarray) -> None:
        """Set the priorities (absolute values of `[K, B]`) of sampled transitions; those gone are ignored.

        Of a transition that was sampled several times the last priority counts. One that is not finite
        becomes the largest priority so far.
        """
        if isinstance(self._prioritiser, Uniform):
            return
        slots = sample.slots.ravel()
        values = np.asarray(priorities).ravel()
        present = slots + sample.generations.ravel() * self._slots >= self._start(self._oldest)
        if not present.all():
            slots, values = slots[present], values[present]
        if len(slots):
            known = self._known(values)
            self._priorities[slots] = known
            self._tree.set(slots, self._prioritiser.mass(known))

    def get_state(self) -> dict[str, Any]:
        """Return JSON data that the draws depend on beyond the stored transitions.

        It does not hold the transitions: with a directory they are in its files, in plain memory they are
        lost with the process.
        """
        return {"rng": self._rng.bit_generator.state, "max_priority": float(self._arrays["max_priority"][0])}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `get_state`'s data; files that are newer than the state keep what they hold."""
        self.check_valid(state)
        self._rng.bit_generator.state = state["rng"]
        self._arrays["max_priority"][0] = max(float(state["max_priority"]), self._arrays["max_priority"][0])

    def check_valid(self, state: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` where this is no state of a replay memory."""
        try:
            np.random.default_rng(0).bit_generator.state = state["rng"]
            if not float(state["max_priority"]) >= 0.0:
                raise ValueError(f"max_priority is {state['max_priority']}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the checkpoint's state of the replay memory is damaged: {error!r}") from error

    # ---- going back ----------------------------------------------------------------------------------

    def mark(self) -> dict[str, Any] | None:
        """Return arrays that say what the files hold now, `None` for plain memory.

        Priorities are copied, as updates change them in place; frames and all else stay where they are until
        `room` is used up.
        """
        if not self._in_files:
            return None
        segments = np.array([self._oldest, self._newest], np.int64)
        spans = list(self._stored_spans())
        return {
            "identity": self._arrays["identity"].copy(),
            "segments": segments,
            "addresses": np.array([self._start(segment) for segment in segments.tolist()], np.int64),
            "priorities": np.concatenate([self._priorities[:0], *(self._priorities[span] for span in spans)]),
            **{name: self._arrays[name].copy() for name in self._small_arrays()},
        }

    def room(self, mark: Mapping[str, Any]) -> int:
        """Return how many more frames can be stored before what was there at `mark` is written over."""
        return int(mark["addresses"][0]) + self._slots - self._start(self._newest)

    def go_back(self, mark: Mapping[str, Any]) -> None:
        """Hold again what was stored at `mark`, with its priorities.

        Whoever is killed in here can go back to the same mark again.

        Raises:
            CheckpointError: these are other files, or what was stored then has been written over; nothing is changed.
        """
        self._check_mark(mark)
        start, end = mark["addresses"].tolist()
        oldest, newest = mark["segments"].tolist()
        done = 0
        for span in self._spans(start, end):
            length = span.stop - span.start
            self._priorities[span] = mark["priorities"][done : done + length]
            done += length
        for name in self._small_arrays():
            self._arrays[name][:] = mark[name]
        self._counters[0] = oldest
        self._counters[1] = newest
        starts = self._arrays["segment_starts"]
        starts[newest % len(starts)] = end  # a later segment that skipped the ring's end had moved it
        self._tree = SumTree(self._slots)
        self._compute_masses()

    def _small_arrays(self) -> list[str]:
        return [name for name in ("max_priority", "ranking", "ranking_state") if name in self._arrays]

    def _check_mark(self, mark: Mapping[str, Any]) -> None:
        check_mark(mark, self._arrays, self._small_arrays())
        oldest, newest = mark["segments"].tolist()
        start = int(mark["addresses"][0])
        is_late = not 0 <= oldest <= newest <= self._newest or self._reach - start > self._slots
        if is_late or self._start(oldest) != start:
            raise CheckpointError("the memory's files no longer hold what was stored at the checkpoint")

    # ---- the ring ------------------------------------------------------------------------------------

    @property
    def _oldest(self) -> int:
        """Number of the oldest segment that is stored."""
        return int(self._counters[0])

    @property
    def _newest(self) -> int:
        """Number that the next segment will have; its row in the table says where the last one ended."""
        return int(self._counters[1])

    @property
    def _reach(self) -> int:
        """No slot at this address or beyond was ever written, not even by a write that was not completed."""
        return int(self._counters[2])

    def _start(self, segment: int) -> int:
        starts = self._arrays["segment_starts"]
        return int(starts[segment % len(starts)])

    def _transitions_before(self, segment: int) -> int:
        totals = self._arrays["segment_totals"]
        return int(totals[segment % len(totals)])

    def _check(self, segment: Segment, count: int) -> None:
        frames, (shape, dtype) = segment.frames, self._frame
        if frames.shape[1:] != shape or frames.dtype != dtype:
            raise SpaceError(
                f"a segment of lane {segment.lane} has frames of {list(frames.shape[1:])} {frames.dtype}, the memory "
                f"holds {list(shape)} {dtype}; actors and trainer must use the same env and settings"
            )
        steps = len(frames) - 1
        extras, priorities = segment.extras, segment.priorities
        if (
            len(segment.actions) != steps
            or len(segment.rewards) != steps
            or any(len(values) != steps for values in extras.values())
            or (priorities is not None and len(priorities) != count)
        ):
            raise SpaceError(f"a segment of lane {segment.lane} has arrays of different lengths")
        if segment.extras.keys() != self._extras.keys():
            raise SpaceError(
                f"a segment of lane {segment.lane} has the extras {sorted(segment.extras)}, the memory needs "
                f"{sorted(self._extras)}; actors and trainer must run the same version"
            )
        for name, values in segment.extras.items():
            shape, dtype = self._extras[name]
            if values.shape[1:] != tuple(shape) or values.dtype != np.dtype(dtype):
                raise SpaceError(
                    f"a segment of lane {segment.lane} has {name} of {list(values.shape[1:])} {values.dtype}, the "
                    f"memory holds {list(shape)} {np.dtype(dtype)}"
                )
        if len(frames) > self._slots - self._spare or count > self._config.capacity:
            raise SpaceError(
                f"a segment of {count} transitions does not fit a memory of {self._config.capacity}; "
                "raise memory.capacity or lower segment_length"
            )

    def _write(self, run: list[Segment], address: int) -> None:
        """Store segments in contiguous slots from `address` on; whatever was there goes first."""
        if not run:
            return
        lengths = np.array([len(segment.frames) for segment in run])
        counts = np.array([len(segment.transitions(self._n_step)) for segment in run])
        ends = np.array([segment.end for segment in run])
        contexts = np.array([segment.context for segment in run])
        newest = self._newest
        starts = address + np.concatenate([[0], np.cumsum(lengths)])
        totals = self._transitions_before(newest) + np.concatenate([[0], np.cumsum(counts)])
        self._evict(int(starts[-1]), int(totals[-1]))
        self._counters[2] = max(self._reach, int(starts[-1]))

        # Skipped slots start no transition, whatever they held a lap ago.
        for span in self._spans(self._start(newest), address):
            self._priorities[span] = _NO_TRANSITION
        frame_count = int(lengths.sum())
        first = address % self._slots
        span = slice(first, first + frame_count)
        position = np.arange(frame_count) - np.repeat(starts[:-1] - address, lengths)
        remaining = np.repeat(lengths - 1, lengths) - position
        is_step = remaining > 0
        needed = np.where(ends == End.CUT, self._n_step, 1)
        starts_one = (position >= np.repeat(contexts, lengths)) & (remaining >= np.repeat(needed, lengths))

        np.concatenate([segment.frames for segment in run], out=self._frames[span])
        self._actions[span][is_step] = np.concatenate([segment.actions for segment in run])
        self._rewards[span][is_step] = np.concatenate([segment.rewards for segment in run])
        for name in self._extras:
            self._arrays[f"extra_{name}"][span][is_step] = np.concatenate([segment.extras[name] for segment in run])
        self._arrays["back"][span] = np.minimum(position, self._spaces.window_length - 1)
        self._arrays["steps"][span] = np.minimum(remaining, self._n_step)
        self._arrays["bootstraps"][span] = (np.repeat(ends, lengths) != End.TERMINATED) | (remaining > self._n_step)
        given = [
            np.full(count, np.nan) if segment.priorities is None else segment.priorities
            for segment, count in zip(run, counts, strict=True)
        ]
        known = self._known(np.concatenate(given))
        priorities = np.full(frame_count, _NO_TRANSITION, np.float32)
        priorities[starts_one] = known
        self._priorities[span] = priorities
        rows = (newest + np.arange(len(run) + 1)) % len(self._arrays["segment_starts"])
        self._arrays["segment_starts"][rows] = starts
        self._arrays["segment_totals"][rows] = totals
        self._counters[1] = newest + len(run)  # From here on the segments are stored.

        masses = np.zeros(frame_count)
        masses[starts_one] = self._prioritiser.mass(known)
        self._tree.set_range(first, masses)

    def _evict(self, end: int, total: int) -> None:
        """Forget the oldest segments until addresses below `end` fit, and `total` transitions ever stored."""

        def fits(segment: int) -> bool:
            within_ring = end - self._start(segment) <= self._slots - self._spare
            return within_ring and total - self._transitions_before(segment) <= self._config.capacity

        gone = self._start(self._oldest)
        oldest = bisect_left(range(self._oldest, self._newest), True, key=fits) + self._oldest
        self._counters[0] = oldest
        for span in self._spans(gone, self._start(oldest)):
            self._tree.set_range(span.start, np.zeros(span.stop - span.start))

    def _spans(self, start: int, end: int) -> Iterator[slice]:
        """Yield the slots of the addresses `start .. end - 1`, at most one lap, as one or two slices."""
        first = start % self._slots
        last = first + end - start
        yield slice(first, min(last, self._slots))
        if last > self._slots:
            yield slice(0, last - self._slots)

    # ---- priorities ----------------------------------------------------------------------------------

    def _known(self, priorities: np.ndarray) -> np.ndarray:
        """Return float32 absolute priorities, the largest so far where they are not finite, and remember that."""
        absolute = np.abs(np.asarray(priorities, np.float32))
        largest = self._arrays["max_priority"]
        finite = np.isfinite(absolute)
        if finite.all():
            largest[0] = max(float(largest[0]), float(absolute.max()))
            return absolute
        largest[0] = max(float(largest[0]), float(absolute.max(where=finite, initial=0.0)))
        return np.where(finite, absolute, np.float32(largest[0] or 1.0))

    def _rank_again(self, train_count: int) -> None:
        """Take the ranking where the one there is belongs to another interval of the clock."""
        clock = train_count // self._config.rank_interval + 1
        if isinstance(self._prioritiser, RankBased) and self._prioritiser.clock != clock:
            stored = np.concatenate([self._priorities[span] for span in self._stored_spans()])
            self._prioritiser.rank(stored[stored != _NO_TRANSITION], clock)
            self._compute_masses()

    def _compute_masses(self) -> None:
        for span in self._stored_spans():
            stored = self._priorities[span]
            masses = np.where(stored == _NO_TRANSITION, 0.0, self._prioritiser.mass(stored.clip(min=0.0)))
            self._tree.set_range(span.start, masses)

    def _stored_spans(self) -> Iterator[slice]:
        return self._spans(self._start(self._oldest), self._start(self._newest))

    # ---- batches -------------------------------------------------------------------------------------

    def _stack(self, slots: np.ndarray, back: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """Return the observations `[*shape, window_length, *frame]` whose newest frames are in `slots` `[N]`.

        `back` `[N]` is how many frames of the episode lie before those.
        """
        frames = slots[:, None]
        if len(self._offsets) > 1:
            frames = frames - np.minimum(self._offsets, back[:, None])
        return _reshape(self._frames.take(frames, axis=0), shape)

    def _returns(self, slots: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the discounted sums `[N]` float32 of the `steps` `[N]` rewards from `slots` on."""
        if self._n_step == 1:
            rewards = self._rewards.take(slots)
            return rewards if self._reward_clip is None else rewards.clip(*self._reward_clip)
        ahead = np.minimum(np.arange(self._n_step), steps[:, None] - 1)
        rewards = self._rewards.take(slots[:, None] + ahead)
        if self._reward_clip is not None:
            rewards = rewards.clip(*self._reward_clip)
        sums: np.ndarray = (rewards * self._reward_weights.take(steps, axis=0)).sum(axis=1)
        return sums.astype(np.float32)

    def _importance_weights(self, slots: np.ndarray, train_count: int) -> np.ndarray:
        """Return the weights `[K, B]` float32; `N` and the total mass cancel against the maximum."""
        if isinstance(self._prioritiser, Uniform):
            return np.ones(slots.shape, np.float32)
        masses = self._tree[slots]
        betas = [self._config.beta(train_count + update) for update in range(len(slots))]
        weights: np.ndarray = (masses.min(axis=1, keepdims=True) / masses) ** np.array(betas)[:, None]
        return weights.astype(np.float32)


def _prioritiser(config: MemoryConfig, arrays: Mapping[str, np.ndarray]) -> Prioritiser:
    if config.kind == "proportional":
        return Proportional(config.alpha)
    if config.kind == "rank":
        return RankBased(config.alpha, arrays["ranking"], arrays["ranking_state"])
    return Uniform()


def _reshape(values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return `[N, ...]` as `[K, B, ...]`."""
    reshaped: np.ndarray = values.reshape(*shape, *values.shape[1:])
    return reshaped
