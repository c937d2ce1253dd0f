"""How large a replay memory is: its arrays, its ring's slots, and whether this machine has the room.

The replay memory makes its arrays from the layout; configs ask before anything is allocated.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from srl.base.algorithm import LARGE_FRAME_BYTES
from srl.base.segment import overlap
from srl.base.spaces import DiscreteActions, Spaces
from srl.rl.memories.config import MemoryConfig
from srl.rl.memories.storage import Layout, check_room, holds_files
from srl.rl.memories.sum_tree import SumTree

ExtraSpecs = Mapping[str, tuple[tuple[int, ...], Any]]
"""Shape (of one step) and dtype of each per-step array that an algorithm adds to segments."""


def required_bytes(
    spaces: Spaces, config: MemoryConfig, *, n_step: int, segment_length: int, extras: ExtraSpecs | None = None
) -> int:
    """Return the bytes that such a memory takes when it is full: all its arrays and the tree."""
    return _full_bytes(ring_layout(spaces, config, n_step, segment_length, extras or {}))


def check_fits(
    spaces: Spaces, config: MemoryConfig, *, n_step: int, segment_length: int, directory: Path | None
) -> int:
    """Return `required_bytes`; `ConfigError` where this machine has no room for them. Nothing is allocated."""
    layout = ring_layout(spaces, config, n_step, segment_length, {})
    check_layout_fits(layout, config, directory)
    return _full_bytes(layout)


def _full_bytes(layout: Layout) -> int:
    return layout.nbytes + SumTree.required_bytes(layout.settings["slots"])


def check_layout_fits(layout: Layout, config: MemoryConfig, directory: Path | None) -> None:
    """Raise `ConfigError` where this machine has no room for the arrays and the tree."""
    is_new = directory is not None and not holds_files(directory)
    check_room(
        SumTree.required_bytes(layout.settings["slots"]) + (layout.nbytes if directory is None else 0),
        layout.nbytes if is_new else 0,
        directory,
        f"lower memory.capacity (now {config.capacity}), store smaller frames, or run on a larger machine",
    )


def ring_layout(spaces: Spaces, config: MemoryConfig, n_step: int, segment_length: int, extras: ExtraSpecs) -> Layout:
    """Return the arrays of a memory's ring, and the settings that they depend on."""
    slots = _slot_count(spaces, config, n_step, segment_length)
    observation, action = spaces.observation, spaces.action
    if isinstance(action, DiscreteActions):
        actions: tuple[tuple[int, ...], Any] = (slots,), np.int32
    else:
        actions = (slots, len(action.low)), np.float32
    arrays: dict[str, tuple[tuple[int, ...], Any]] = {
        "frames": ((slots, *observation.shape), observation.dtype),
        "actions": actions,
        "rewards": ((slots,), np.float32),
        # Frames before this one in its segment and steps that a transition from it spans, each as far as needed.
        "back": ((slots,), np.int16),
        "steps": ((slots,), np.int16),
        "bootstraps": ((slots,), np.bool_),
        "priorities": ((slots,), np.float32),
        # A ring by segment number: address of its first frame, transitions of all segments before it. A stored
        # segment has two frames at least, and the next segment's row is used too.
        "segment_starts": ((slots // 2 + 2,), np.int64),
        "segment_totals": ((slots // 2 + 2,), np.int64),
        # Number of the oldest segment, of the next one, and the address up to which slots were ever written.
        "counters": ((3,), np.int64),
        "identity": ((1,), np.int64),
        "max_priority": ((1,), np.float64),
    }
    if config.kind == "rank":
        arrays["ranking"] = (config.capacity,), np.float32
        arrays["ranking_state"] = (2,), np.int64
    for name, (shape, dtype) in extras.items():
        arrays[f"extra_{name}"] = (slots, *shape), dtype
    settings = {
        "capacity": config.capacity,
        "window_length": spaces.window_length,
        "n_step": n_step,
        "slots": slots,
    }
    return Layout(settings, {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in arrays.items()})


def _slot_count(spaces: Spaces, config: MemoryConfig, n_step: int, segment_length: int) -> int:
    """Return how many frames the ring holds.

    Large frames: what `capacity` transitions of long episodes need. Small ones: room for episodes of one step
    too, which have two frames a transition. In any case the warm-up finds room, whatever the episodes' lengths:
    an actor's segments never have three frames a transition on average.
    """
    repeated = overlap(spaces.window_length, n_step)
    longest = segment_length + 1
    large = spaces.observation.nbytes >= LARGE_FRAME_BYTES and longest > 2 * repeated
    frames = ceil(config.capacity * longest / (longest - repeated)) if large else 2 * config.capacity
    # Lost at most: the skipped end of the ring, and the segment that left whole.
    return max(frames, 3 * config.warmup_size) + 2 * longest + spare_slots(config, segment_length)


def spare_slots(config: MemoryConfig, segment_length: int) -> int:
    """Return how many slots stay free of what can be sampled, so that it is a while before `go_back` cannot.

    They are there without files too: where a transition lies decides when it is drawn, and whether a run keeps
    checkpoints shall change nothing of what it learns.
    """
    return config.capacity // 64 + 32 * (segment_length + 1)
