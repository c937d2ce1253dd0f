"""The memory of a run in one process: where its files are, whose they are, and back to a checkpoint.

`Runner.train` makes its memory with `open_memory`.
"""

import logging
import shutil
from pathlib import Path

import numpy as np

from srl.base.algorithm import Memory, RLConfig, Tree
from srl.base.errors import CheckpointError
from srl.base.spaces import Spaces

logger = logging.getLogger("srl")

DIRECTORY = "memory"
"""Name of the memory's directory among a run's checkpoints."""


def memory_directory(work_dir: Path | None, checkpoint_dir: Path | None) -> Path | None:
    """Return where the memory's files are: as asked, else beside the checkpoints, which need them to be resumed."""
    if work_dir is not None or checkpoint_dir is None:
        return work_dir
    return checkpoint_dir / DIRECTORY


def open_memory(
    config: RLConfig, spaces: Spaces, seed: int, directory: Path | None, mark: Tree | None, *, shared: bool
) -> Memory:
    """Return the memory as it was at a checkpoint, as far as its files still say.

    Args:
        mark: what the checkpoint says of the memory, `None` where it says nothing or a run begins.
        shared: whether files that no checkpoint speaks of may be used: somebody named the directory. Otherwise
            the directory is the run's own, and what is there of another run is removed.

    Raises:
        ConfigError: the files were made with other settings, or the machine has no room.
    """
    own = directory if not shared else None
    if own is not None and mark is None:
        _remove(own)
    try:
        memory = config.make_memory(spaces, seed, directory)
    except CheckpointError as error:
        if own is None:
            raise
        logger.warning("the run goes on with an empty memory: %s", error)
        _remove(own)
        return config.make_memory(spaces, seed, own)
    if mark is None:
        return memory
    try:
        memory.go_back(mark)
    except CheckpointError as error:
        if own is not None and memory.position.identity not in np.ravel(mark.get("identity", ())):
            _remove(own)
            memory = config.make_memory(spaces, seed, own)
        logger.warning("the run goes on with the %d transitions that its memory has: %s", len(memory), error)
    return memory


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
