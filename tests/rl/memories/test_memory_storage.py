import errno
import os
from pathlib import Path

import numpy as np
import pytest
from memory_helpers import make_memory

from srl.base.algorithm import LARGE_FRAME_SEGMENT_LENGTH
from srl.base.errors import CheckpointError, ConfigError
from srl.base.spaces import DiscreteActions, ObservationSpec, Spaces
from srl.rl.memories import storage
from srl.rl.memories.config import MemoryConfig
from srl.rl.memories.sizes import required_bytes
from srl.rl.memories.storage import Layout, available_memory, open_arrays

ATARI = Spaces(ObservationSpec((84, 84), "uint8"), DiscreteActions(18), 4)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("kind", ["set_proportional_memory", "set_rankbase_memory"])
def test_a_million_atari_transitions_take_under_8_gb(kind: str, n_step: int) -> None:
    config = MemoryConfig(capacity=1_000_000)
    getattr(config, kind)()
    needed = required_bytes(ATARI, config, n_step=n_step, segment_length=LARGE_FRAME_SEGMENT_LENGTH)
    assert 1_000_000 * 84 * 84 < needed < 8e9


def test_required_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    make_memory(1000, directory=tmp_path, extras={"noise": ((3,), np.float32)})
    spaces = Spaces(ObservationSpec((2,), "int32"), DiscreteActions(2))
    config = MemoryConfig(capacity=1000, warmup_size=8)
    needed = required_bytes(spaces, config, n_step=1, segment_length=16, extras={"noise": ((3,), np.float32)})
    files = sum(path.stat().st_size for path in tmp_path.glob("*.bin"))
    assert needed == files + 8 * 8192  # the tree: 2,593 slots need 4,096 leaves and as many inner nodes


def test_too_little_memory_is_said_before_anything_is_allocated() -> None:
    with pytest.raises(ConfigError, match=r"needs [\d.]+ GB of memory, but [\d.]+ GB are available; lower memory\.cap"):
        make_memory(10**12, spaces=ATARI)


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "available_disk", lambda directory: 1000)
    with pytest.raises(ConfigError, match=r"of disk in .*run, but 0\.00 MB are free"):
        make_memory(1000, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_meanwhile_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(ConfigError, match=r"cannot reserve .* for .*frames\.bin: No space left"):
        make_memory(1000, directory=tmp_path)


def test_files_need_no_memory_but_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "available_memory", lambda: 8 * 8192)
    make_memory(1000, directory=tmp_path)
    with pytest.raises(ConfigError, match="of memory"):
        make_memory(1000)


GROUPS = {
    "version 2": ("0::/pod/run", "sys/fs/cgroup/pod/run", "memory.max", "anon"),
    "version 2, limit above": ("0::/pod/run", "sys/fs/cgroup/pod", "memory.max", "anon"),
    "version 1": ("4:cpu,memory:/pod", "sys/fs/cgroup/memory/pod", "memory.limit_in_bytes", "total_rss"),
    "version 1, seen from inside": ("4:memory:/docker/0", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_limit_of_the_control_group_counts(tmp_path: Path, case: str) -> None:
    line, group, limit_file, used = GROUPS[case]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"3:pids:/x\n{line}\n")
    assert available_memory(tmp_path) == 8000 * 1024
    directory = tmp_path / group
    directory.mkdir(parents=True)
    (directory / limit_file).write_text("max\n")
    assert available_memory(tmp_path) == 8000 * 1024
    (directory / limit_file).write_text("5000\n")
    (directory / "memory.stat").write_text(f"file 4000\n{used} 1200\n")
    assert available_memory(tmp_path) == 3800


def test_unknown_memory_is_unknown(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 200}, "capacity is 100 there and 200 now"),
        ({"n": 3}, "n_step is 1 there and 3 now"),
        ({"window": 4}, "window_length is 1 there and 4 now"),
        ({"kind": "rank"}, "ranking"),
        ({"spaces": Spaces(ObservationSpec((3,), "int32"), DiscreteActions(2))}, "frames"),
    ],
)
def test_another_layout_is_an_error_that_names_the_directory(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    make_memory(100, directory=tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        make_memory(**{"capacity": 100, "directory": tmp_path, **change})
    assert str(tmp_path) in str(error.value)


def test_a_missing_or_short_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    make_memory(directory=tmp_path)
    path = tmp_path / "frames.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"frames\.bin"):
        make_memory(directory=tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"frames\.bin"):
        make_memory(directory=tmp_path)
    (tmp_path / "layout.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"layout\.json"):
        make_memory(directory=tmp_path)


def test_files_without_a_layout_are_made_anew(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"interrupted")
    layout = Layout({"slots": 3}, {"a": ((3,), np.dtype(np.int64))})
    arrays = open_arrays(layout, tmp_path)
    np.testing.assert_array_equal(arrays["a"], 0)
    arrays["a"][1] = 5
    np.testing.assert_array_equal(open_arrays(layout, tmp_path)["a"], [0, 5, 0])
