"""A client whose disk refuses what a task sends home."""

import logging
from pathlib import Path
from typing import Any

import pytest
from test_sessions import quick, start, working  # noqa: F401  # quick is a fixture

import srl
from srl.base.errors import CheckpointError
from srl.runner.checkpoint import load_checkpoint
from srl.runner.distribution import task_manager
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.history import HistoryWriter
from srl.runner.status import RunStatus


class Shown:
    """A progress that remembers what it was told."""

    statuses: list[RunStatus]

    def __init__(self, **_: Any) -> None:
        Shown.statuses = []

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def update(self, status: RunStatus) -> None:
        Shown.statuses.append(status)


@pytest.mark.parametrize("mended", [True, False])
def test_a_client_that_cannot_write_checkpoints_waits_on(
    mended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task_manager, "Progress", Shown)
    directory = tmp_path / "run"
    directory.write_text("in the way")

    def check() -> None:
        if mended and caplog.records and directory.is_file():
            directory.unlink()

    caplog.set_level(logging.ERROR)
    with EmbeddedBroker() as server, working(server.parameters, "trainer", "actor"):
        manager = start(server.parameters, timeout=4, checkpoint_interval_s=0.1)
        if mended:
            manager.train_wait(checkpoint_save_dir=directory, history_save_dir=tmp_path, check=check)
            assert load_checkpoint(directory).train_count == manager.get_status().train_count > 0
        else:
            with pytest.raises(CheckpointError, match="could not be written"):
                manager.train_wait(checkpoint_save_dir=directory, history_save_dir=tmp_path, check=check)
        assert manager.get_status().state == "done"
        manager.close()
    messages = [record.getMessage() for record in caplog.records]
    assert "checkpoints cannot be written, training goes on" in messages[0]
    assert messages[1:] == ["checkpoints can be written again"] * mended
    assert "checkpoints cannot be written" in next(each.warning for each in Shown.statuses if each.warning)
    assert bool(Shown.statuses[-1].warning) is not mended


def test_history_that_could_not_be_written_is_there_once_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append, refused = HistoryWriter.append, []

    def refusing(self: HistoryWriter, row: Any) -> None:
        append(self, row)
        if not refused:
            refused.append(row["id"])  # the row is in the writer's buffer, as with a full disk
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(HistoryWriter, "append", refusing)
    with EmbeddedBroker() as server, working(server.parameters, "trainer", "actor"):
        manager = start(server.parameters, max_train_count=3000)
        manager.train_wait(history_save_dir=tmp_path, progress=False)
        ids = [row["id"] for row in srl.Runner.load_history(tmp_path).rows]
        wanted = [row["id"] for row in manager._broker.history(manager.task)]
        manager.close()
    assert ids == wanted
    assert "history rows cannot be written, training goes on" in caplog.text
    assert "history rows can be written again" in caplog.text
