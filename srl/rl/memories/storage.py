"""Where a memory's arrays live: plain memory, or files that survive the process.

The replay memory declares its arrays as a `Layout`; opening one checks first that the machine has the
room, and that files found in the directory were made for the same layout.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from srl.base.errors import CheckpointError, ConfigError

LAYOUT_FILE = "layout.json"
_FORMAT = 1


@dataclass(frozen=True)
class Layout:
    """Arrays by name, all zero at first, and the settings that give their contents a meaning."""

    settings: Mapping[str, int]
    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(_nbytes(shape, dtype) for shape, dtype in self.arrays.values())

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data; equal data means that files can be read."""
        arrays = {name: [list(shape), dtype.str] for name, (shape, dtype) in self.arrays.items()}
        return {"format": _FORMAT, **self.settings, **arrays}


def open_arrays(layout: Layout, directory: Path | None) -> dict[str, np.ndarray]:
    """Return the arrays, with the contents that files under `directory` have.

    What is written to file arrays is there after the process was killed; it is not there for certain
    after the machine went down.

    Raises:
        ConfigError: `directory` holds another layout, or the disk has no room.
        CheckpointError: a file is missing or damaged.
    """
    if directory is None:
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.arrays.items()}
    if holds_files(directory):
        _check_layout(layout, directory)
    else:
        _create(layout, directory)
    return {name: _map(directory / f"{name}.bin", shape, dtype) for name, (shape, dtype) in layout.arrays.items()}


def holds_files(directory: Path) -> bool:
    """Return whether a memory was completely made in `directory`."""
    return (directory / LAYOUT_FILE).exists()


def check_room(memory_bytes: int, disk_bytes: int, directory: Path | None, advice: str) -> None:
    """Raise `ConfigError`, ending with `advice`, where the machine has less memory or disk than needed."""
    memory = available_memory()
    if memory is not None and memory_bytes > memory:
        raise ConfigError(
            f"the replay memory needs {_readable(memory_bytes)} of memory, but {_readable(memory)} are "
            f"available; {advice}"
        )
    if directory is not None:
        free = available_disk(directory)
        if disk_bytes > free:
            raise ConfigError(
                f"the replay memory needs {_readable(disk_bytes)} of disk in {directory}, but {_readable(free)} "
                f"are free; {advice}"
            )


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes this process may still use, `None` where the system does not say.

    That is the least of what the kernel says is available and, for this process's control group (version
    1 or 2) and every group above it, the limit less what is used and cannot be given back.
    """
    known = [limit - used for limit, used in _group_limits(root)]
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            known.append(int(line.split()[1]) * 1024)
    return max(min(known), 0) if known else None


def available_disk(directory: Path) -> int:
    """Return the bytes free where `directory` is or would be made."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def _create(layout: Layout, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, (shape, dtype) in layout.arrays.items():
        path = directory / f"{name}.bin"
        size = _nbytes(shape, dtype)
        try:
            with path.open("wb") as file:
                # Reserved now: a full disk found out later would kill the process (SIGBUS).
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size)
        except OSError as error:
            raise ConfigError(f"cannot reserve {_readable(size)} for {path}: {error.strerror}") from error
    # Written last and whole: a directory without it is made anew.
    temporary = directory / f"{LAYOUT_FILE}.new"
    temporary.write_text(json.dumps(layout.to_dict(), indent=1))
    temporary.replace(directory / LAYOUT_FILE)


def _check_layout(layout: Layout, directory: Path) -> None:
    try:
        found = json.loads((directory / LAYOUT_FILE).read_text())
    except ValueError as error:
        raise CheckpointError(f"{directory / LAYOUT_FILE} is damaged; remove {directory}") from error
    wanted = layout.to_dict()
    if found != wanted:
        keys = [key for key in {**wanted, **found} if found.get(key) != wanted.get(key)]
        differences = ", ".join(f"{key} is {found.get(key)} there and {wanted.get(key)} now" for key in keys)
        raise ConfigError(
            f"the replay memory in {directory} was made with other settings ({differences}); "
            "restore them, or remove that directory to start with an empty memory"
        )


def _map(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if not path.exists() or path.stat().st_size != _nbytes(shape, dtype):
        raise CheckpointError(f"{path} is missing or damaged; remove {path.parent} to start with an empty memory")
    # As a plain array: indexing a memmap object costs several times as much.
    return np.asarray(np.memmap(path, dtype, "r+", shape=shape))


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of the memory control groups that this process is in."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, limit_file, used_key = root / "sys/fs/cgroup", "memory.max", "anon"
        elif "memory" in controllers.split(","):
            base, limit_file, used_key = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss"
        else:
            continue
        # In a container the group's name may be the host's; its own group is then what `base` shows.
        group = base / name.strip("/")
        for path in [group, *group.parents]:
            for limit in _lines(path / limit_file):
                if limit.isdigit():
                    yield int(limit), _entry(path / "memory.stat", used_key)
            if path == base:
                break


def _entry(path: Path, key: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{key} ")), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return prod(shape) * dtype.itemsize


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
