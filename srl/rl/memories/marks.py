"""What a replay memory's mark has to be before the memory goes back to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from srl.base.errors import CheckpointError


def check_mark(mark: Mapping[str, Any], arrays: Mapping[str, np.ndarray], copied: Sequence[str]) -> None:
    """Raise `CheckpointError` where this is no mark of the memory that has these arrays.

    Args:
        copied: names of the arrays that a mark has whole.
    """
    if set(mark) != {"identity", "segments", "addresses", "priorities", *copied}:
        raise CheckpointError(f"no mark of such a replay memory, it has {sorted(mark)}")
    _check_arrays(mark, {"identity": ((1,), np.int64), "segments": ((2,), np.int64), "addresses": ((2,), np.int64)})
    _check_arrays(mark, {name: (arrays[name].shape, arrays[name].dtype) for name in copied})
    start, end = mark["addresses"].tolist()
    _check_arrays(mark, {"priorities": ((max(end - start, 0),), np.float32)})
    if mark["identity"][0] != arrays["identity"][0]:
        raise CheckpointError("the memory's files are not those of the checkpoint")


def _check_arrays(mark: Mapping[str, Any], expected: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
    for name, (shape, dtype) in expected.items():
        array = mark[name]
        if np.shape(array) != shape or array.dtype != dtype:
            raise CheckpointError(
                f"{name} of a replay memory's mark has shape {np.shape(array)}, not {shape}, or another dtype"
            )
