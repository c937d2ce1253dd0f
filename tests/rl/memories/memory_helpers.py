"""What the memory tests share: identifiable episodes, cut as an actor does, and a naive list of transitions.

Run as a program (`memory_helpers.py DIRECTORY`) it fills a memory until it is killed.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from srl.base.algorithm import Sample
from srl.base.segment import End, Segment
from srl.base.spaces import DiscreteActions, ObservationSpec, Spaces
from srl.rl.memories.config import MemoryConfig
from srl.rl.memories.replay import ReplayMemory

DISCOUNT = 0.9


@dataclass
class Episode:
    """Frame `t` of episode `e` is `[e, t]`, so no two frames are equal."""

    number: int
    rewards: np.ndarray
    end: End

    @property
    def frames(self) -> np.ndarray:
        steps = np.arange(len(self.rewards) + 1)
        return np.stack([np.full_like(steps, self.number), steps], axis=1).astype(np.int32)

    @property
    def actions(self) -> np.ndarray:
        return (np.arange(len(self.rewards)) + 100 * self.number).astype(np.int32)

    def segments(
        self, window: int = 1, n: int = 1, length: int = 16, priority: Callable[[int, int], float] | None = None
    ) -> list[Segment]:
        """Cut the episode into segments of at most `length` steps; `priority(episode, step)` are initial priorities."""
        segments, first, steps = [], 0, len(self.rewards)
        while True:
            start = max(first - (window - 1), 0)
            last = min(start + length, steps)
            end = self.end if last == steps else End.CUT
            segment = Segment(
                frames=self.frames[start : last + 1],
                actions=self.actions[start:last],
                rewards=self.rewards[start:last],
                end=end,
                context=first - start,
                lane=0,
                sequence=len(segments),
                version=0,
            )
            if priority is not None:
                values = [priority(self.number, start + step) for step in segment.transitions(n)]
                segment = replace_priorities(segment, np.array(values, np.float32))
            segments.append(segment)
            if last == steps:
                return segments
            first = last - n + 1

    def transitions(self, window: int, n: int, clip: tuple[float, float] | None = None) -> dict[tuple[int, int], Any]:
        """Return, by episode and step, what must be sampled; computed step by step from the whole episode."""
        found, steps = {}, len(self.rewards)
        for step in range(steps - n + 1 if self.end is End.CUT else steps):
            total, discount, at = 0.0, 1.0, step
            while at < steps and at < step + n:
                reward = float(self.rewards[at])
                total += discount * (reward if clip is None else min(max(reward, clip[0]), clip[1]))
                discount *= DISCOUNT
                at += 1
            if at == steps and self.end is End.TERMINATED:
                discount = 0.0
            found[self.number, step] = {
                "observation_tm1": [[self.number, max(step - back, 0)] for back in reversed(range(window))],
                "observation_t": [[self.number, max(at - back, 0)] for back in reversed(range(window))],
                "action_tm1": int(self.actions[step]),
                "reward_t": total,
                "discount_t": discount,
            }
        return found


def replace_priorities(segment: Segment, priorities: np.ndarray | None) -> Segment:
    fields = {name: getattr(segment, name) for name in Segment.__slots__}
    return Segment(**{**fields, "priorities": priorities})


def random_episodes(seed: int, longest: int = 40, first: int = 0) -> Iterator[Episode]:
    rng = np.random.default_rng(seed)
    for number in count(first):
        rewards = rng.normal(size=rng.integers(1, longest + 1)).astype(np.float32)
        yield Episode(number, rewards, End(int(rng.integers(3))))


def make_memory(
    capacity: int = 100,
    *,
    window: int = 1,
    n: int = 1,
    batch: int = 8,
    warmup: int | None = None,
    kind: str = "uniform",
    directory: Path | None = None,
    spaces: Spaces | None = None,
    segment_length: int = 16,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    **kwargs: Any,
) -> ReplayMemory:
    spaces = spaces or Spaces(ObservationSpec((2,), "int32"), DiscreteActions(1_000_000), window)
    config = MemoryConfig(capacity=capacity, warmup_size=warmup or batch, kind=kind, **(settings or {}))
    return ReplayMemory(
        spaces,
        config,
        batch_size=batch,
        n_step=n,
        discount=DISCOUNT,
        updates_per_dispatch=1,
        segment_length=segment_length,
        seed=seed,
        directory=directory,
        **kwargs,
    )


def keys(sample: Sample) -> list[tuple[int, int]]:
    """Return episode and step of each sampled transition of `Episode`s."""
    newest = sample.batches["observation_tm1"][:, :, -1].reshape(-1, 2)
    return [(int(episode), int(step)) for episode, step in newest]


def assert_holds(memory: ReplayMemory, expected: dict[tuple[int, int], Any]) -> None:
    """Check that a uniform memory holds just the newest transitions of `expected`, each as it must be."""
    # Every transition has mass 1, so drawing the batch this often misses none.
    sample = memory.sample(25 * len(memory) // memory.batch_size + 25, 0)
    found = keys(sample)
    assert set(found) == set(list(expected)[len(expected) - len(memory) :])
    batches = {name: values.reshape(-1, *values.shape[2:]) for name, values in sample.batches.items()}
    wanted = [expected[key] for key in found]
    for name in ("observation_tm1", "observation_t", "action_tm1"):
        np.testing.assert_array_equal(batches[name], np.array([item[name] for item in wanted]), name)
    for name in ("reward_t", "discount_t"):
        np.testing.assert_allclose(batches[name], [item[name] for item in wanted], atol=1e-6, err_msg=name)


def known_priority(episode: int, step: int) -> float:
    return 1.0 + (episode * 7 + step * 3) % 11


def _fill_until_killed(directory: Path) -> None:
    memory = make_memory(200, window=4, n=3, kind="proportional", directory=directory)
    for episode in random_episodes(seed=5):
        memory.insert(episode.segments(4, 3))
        sample = memory.sample(4, 0)
        values = [known_priority(*key) for key in keys(sample)]
        memory.update_priorities(sample, np.array(values).reshape(4, -1))
        print(episode.number, flush=True)


if __name__ == "__main__":
    _fill_until_killed(Path(sys.argv[1]))
