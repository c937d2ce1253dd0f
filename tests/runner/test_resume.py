"""A run that was killed goes on as if it had not been: N + M updates are N, a kill, and M."""

import contextlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import resume_helpers
from resume_helpers import checkpoints, everything, make_runner, train_to

import srl
from srl.base.errors import CheckpointError
from srl.runner import local_run
from srl.runner.checkpoint import KEEP, load_checkpoint
from srl.runner.status import RunStatus

TOTAL = {"toy": 4001, "dqn": 4001}


def train_until_killed(arguments: list[str], directory: Path, wait_s: float) -> None:
    """Train in another process and kill it some time after its first checkpoint."""
    command = [sys.executable, str(resume_helpers.__file__), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not checkpoints(directory):
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.01)
            time.sleep(wait_s)
            assert process.poll() is None, "it was over before it was killed"
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize(
    ("algorithm", "kind", "env"),
    [
        ("toy", "uniform", "test/Script-v0"),
        ("toy", "rank", "CartPole-v1"),
        pytest.param("dqn", "uniform", "CartPole-v1", marks=pytest.mark.slow),
        pytest.param("dqn", "proportional", "CartPole-v1", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_bit_equal(
    algorithm: str, kind: str, env: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    total = TOTAL[algorithm]
    whole = make_runner(algorithm, kind, env, seed)
    train_to(whole, tmp_path / "whole", total)
    directory = tmp_path / "killed"
    arguments = [algorithm, kind, env, str(seed), str(directory), str(100 * total)]
    train_until_killed(arguments, directory, random.Random(time.time_ns()).uniform(0, 0.5))
    newest = checkpoints(directory)[-1]
    assert newest < total, "the kill came too late to be looked at"
    with caplog.at_level(logging.WARNING):
        resumed = make_runner(algorithm, kind, env, seed)
        resumed.load_checkpoint(directory)
        assert resumed.train_count == newest
        train_to(resumed, directory, total)
    assert not caplog.records
    assert everything(directory, resumed) == everything(tmp_path / "whole", whole)


def test_an_env_that_is_not_deterministic_starts_new_episodes_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "run"
    train_until_killed(["toy", "proportional", "test/Unseeded-v0", "0", str(directory), "1000000"], directory, 0.2)
    loaded = load_checkpoint(directory)
    runner = make_runner("toy", "proportional", "test/Unseeded-v0", 0)
    runner.load_checkpoint(directory)
    with caplog.at_level(logging.WARNING):
        train_to(runner, directory, loaded.train_count + 40)
    (record,) = caplog.records
    assert "of 3 lanes start new episodes: the env is not deterministic" in record.getMessage()
    assert runner.train_count == loaded.train_count + 40
    # Update by update goes on from where it was: each step is counted once, and all that was open was closed.
    state = load_checkpoint(directory).state
    assert state["limiter"]["inserted"] == state["env_steps"] == runner.env_steps
    assert runner.env_steps - loaded.state["env_steps"] < 60
    assert not [name for name in everything(directory, runner)["run"]["memory"] if name == "ranking"]


def test_resuming_many_times_keeps_size_and_appends(tmp_path: Path) -> None:
    process = psutil.Process()
    sizes, files, names, rows = [], [], [], []
    for turn in range(1, 5):
        runner = make_runner("toy", "proportional", "test/Script-v0", 0)
        if turn > 1:
            runner.load_checkpoint(tmp_path)
            assert runner.train_count == 1000 * (turn - 1)
        train_to(runner, tmp_path, 1000 * turn, checkpoint_interval_s=1e6)
        found = srl.Runner.load_history(tmp_path / "history").rows
        assert found[: len(rows)] == rows and len(found) > len(rows)
        rows = found
        names.append(checkpoints(tmp_path))
        files.append(sum(path.stat().st_size for path in (tmp_path / "memory").iterdir()))
        sizes.append((found[-1]["memory"], process.memory_info().rss))
    assert [each[-1] for each in names] == [1000, 2000, 3000, 4000]
    assert all(0 < len(each) <= KEEP for each in names)
    assert len(set(files)) == 1
    assert {250 <= held <= 300 for held, _ in sizes} == {True}
    assert sizes[-1][1] < sizes[1][1] * 1.05 + 10e6


def test_a_run_that_begins_does_not_take_another_ones_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for run in range(2):
        runner = make_runner("toy", "uniform", "test/Script-v0", run)
        train_to(runner, tmp_path / "a", 100)
        if run == 0:
            for count in checkpoints(tmp_path / "a"):
                shutil.rmtree(tmp_path / "a" / str(count))
    train_to(make_runner("toy", "uniform", "test/Script-v0", 1), tmp_path / "b", 100)
    assert everything(tmp_path / "a", runner) == everything(tmp_path / "b", runner)
    # Nor does a run that is resumed.
    shutil.rmtree(tmp_path / "a" / "memory")
    shutil.copytree(tmp_path / "b" / "memory", tmp_path / "a" / "memory")
    resumed = make_runner("toy", "uniform", "test/Script-v0", 1)
    resumed.load_checkpoint(tmp_path / "a")
    with caplog.at_level(logging.WARNING):
        train_to(resumed, tmp_path / "a", 110)
    (record,) = caplog.records
    assert (
        "goes on with the 0 transitions" in record.getMessage() and "not those of the checkpoint" in record.getMessage()
    )
    assert resumed.train_count == 110
    assert load_checkpoint(tmp_path / "a").run_state["memory"]["addresses"][1] < 300


def test_a_checkpoint_comes_early_where_the_memory_could_not_go_back(tmp_path: Path) -> None:
    runner = make_runner("toy", "uniform", "test/Script-v0", 0)
    train_to(runner, tmp_path, 200, checkpoint_interval_s=1e6)
    train_to(runner, tmp_path, 9000, checkpoint_interval_s=1e6)
    counts = checkpoints(tmp_path)
    assert len(counts) == 5 and counts[0] > 200
    for count in reversed(counts[-2:]):
        mark = load_checkpoint(tmp_path / str(count)).run_state["memory"]
        memory: Any = runner.config.make_memory(runner.spaces, 0, tmp_path / "memory")
        assert memory.room(mark) >= 0
        memory.go_back(mark)


def test_runs_with_and_without_checkpoints_learn_the_same(tmp_path: Path) -> None:
    learned = []
    for arguments in ({}, {"checkpoint_save_dir": None}):
        runner = make_runner("toy", "proportional", "test/Script-v0", 0)
        train_to(runner, tmp_path, 2000, **arguments)
        learned.append({name: values.tolist() for name, values in runner.parameters.items()})
    assert learned[0] == learned[1]


def test_checkpoints_without_the_state_of_a_run_still_load(tmp_path: Path) -> None:
    runner = make_runner("toy", "uniform", "test/Script-v0", 0)
    train_to(runner, tmp_path, 100)
    runner.load_checkpoint(tmp_path)
    other = make_runner("toy", "uniform", "test/Script-v0", 0)
    other.restore(runner.learner.get_state(), load_checkpoint(tmp_path).state)
    train_to(other, tmp_path, 120)
    assert checkpoints(tmp_path)[-1] == 120


# --- disks that refuse ------------------------------------------------------------------------------------


def break_after(
    count: int, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[], None], mend: Callable[[], None]
) -> None:
    """Call `spoil` before the checkpoint of that number and `mend` two later."""
    save, calls = local_run.save_checkpoint, []

    def counted(*arguments: Any, **named: Any) -> Path:
        calls.append(1)
        if len(calls) == count:
            spoil()
        if len(calls) == count + 2:
            mend()
        return save(*arguments, **named)

    monkeypatch.setattr(local_run, "save_checkpoint", counted)


class Shown:
    """A progress that remembers what it was told."""

    def __init__(self, **_: Any) -> None:
        SHOWN.clear()

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def update(self, status: RunStatus) -> None:
        SHOWN.append(status)


SHOWN: list[RunStatus] = []


@pytest.mark.parametrize("at_the_end", [False, True])
def test_training_goes_on_where_checkpoints_cannot_be_written(
    at_the_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner("toy", "uniform", "test/Script-v0", 0)
    directory = tmp_path / "run"

    def spoil() -> None:
        directory.rename(tmp_path / "aside")
        directory.write_text("no directory")

    def mend() -> None:
        if not at_the_end:
            directory.unlink()
            (tmp_path / "aside").rename(directory)

    break_after(3, monkeypatch, spoil, mend)
    monkeypatch.setattr("srl.runner.progress.Progress", Shown)
    with caplog.at_level(logging.ERROR):
        if at_the_end:
            with pytest.raises(CheckpointError, match="could not be written"):
                train_to(runner, directory, 200, checkpoint_interval_s=1e-9, history_save_dir=tmp_path)
        else:
            train_to(runner, directory, 200, checkpoint_interval_s=1e-9, history_save_dir=tmp_path)
    assert runner.train_count == 200
    messages = [record.getMessage() for record in caplog.records]
    assert "checkpoints cannot be written, training goes on" in messages[0]
    assert messages[1:] == ([] if at_the_end else ["checkpoints can be written again"])
    warned = [status for status in SHOWN if status.warning]
    assert warned and "checkpoints cannot be written" in warned[0].warning
    assert (SHOWN[-1].state, bool(SHOWN[-1].error)) == (("failed", True) if at_the_end else ("done", False))
    kept = tmp_path / "aside" if at_the_end else directory
    resumed = make_runner("toy", "uniform", "test/Script-v0", 0)
    resumed.load_checkpoint(kept)
    assert (resumed.train_count == 200) is not at_the_end
    train_to(resumed, kept, 210)


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        runner = make_runner("toy", "uniform", "test/Script-v0", 0)
        train_to(runner, disk, 100, work_dir=tmp_path / "memory")
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
        with caplog.at_level(logging.ERROR), pytest.raises((CheckpointError, OSError), match="No space left"):
            train_to(runner, disk, 300, work_dir=tmp_path / "memory")
        assert runner.train_count == 300
        assert "cannot be written, training goes on" in caplog.records[0].getMessage()
        resumed = make_runner("toy", "uniform", "test/Script-v0", 0)
        resumed.load_checkpoint(disk)
        assert resumed.train_count == 100
        filler.unlink()
        train_to(runner, disk, 310, work_dir=tmp_path / "memory")
        assert checkpoints(disk)[-1] == 310
        assert srl.Runner.load_history(disk / "history").rows[-1]["train"] == 310
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_checkpoint_before_a_damaged_one_is_gone_on_from_in_its_directory(tmp_path: Path) -> None:
    runner = make_runner("toy", "uniform", "test/Script-v0", 0)
    train_to(runner, tmp_path, 100)
    train_to(runner, tmp_path, 200)
    path = tmp_path / "200" / "learner.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    older = max(count for count in checkpoints(tmp_path) if count != 200)
    resumed = make_runner("toy", "uniform", "test/Script-v0", 0)
    resumed.load_checkpoint(tmp_path)
    assert resumed.train_count == older
    train_to(resumed, tmp_path, 200)
    whole = make_runner("toy", "uniform", "test/Script-v0", 0)
    train_to(whole, tmp_path / "whole", 100)
    train_to(whole, tmp_path / "whole", 200)
    assert everything(tmp_path, resumed) == everything(tmp_path / "whole", whole)
