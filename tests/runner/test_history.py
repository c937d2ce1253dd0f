"""History files survive crashes and resumes; plots need no display."""

import json
import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

import srl.runner.history
from srl.base.errors import CheckpointError, ConfigError, MissingExtraError
from srl.runner.history import History, HistoryWriter


@pytest.fixture(autouse=True)
def no_display():
    """Plots are drawn as on a machine without a screen."""
    before = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    matplotlib.use(before)


def write(directory: Path, rows: list[dict]) -> None:
    with HistoryWriter(directory) as writer:
        for row in rows:
            writer.append(row)


def svg_text(path: Path, history: History, **arguments) -> str:
    """Return a plot as SVG, whose texts can be read."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        history.plot(save_path=path, **arguments)
    return path.read_text()


def test_rows_come_back_in_order_with_their_own_columns(tmp_path: Path) -> None:
    rows = [{"time": 1.5, "role": "trainer", "train": 10, "loss": 0.25}, {"time": 2, "role": "actor", "reward0": -3.5}]
    write(tmp_path / "new" / "deep", rows)
    history = History.load(tmp_path / "new" / "deep")
    assert history.rows == rows
    assert history.columns == ["time", "role", "train", "loss", "reward0"]


def test_a_row_is_on_disk_before_the_writer_closes(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer.append({"time": 1})
    assert History.load(tmp_path).rows == [{"time": 1}]
    writer.close()


def test_resume_appends_and_never_rewrites(tmp_path: Path) -> None:
    write(tmp_path, [{"time": 1, "id": "5-0"}])
    before = (tmp_path / "history.jsonl").read_bytes()
    for time in (2, 3):
        write(tmp_path, [{"time": time}])
    assert (tmp_path / "history.jsonl").read_bytes().startswith(before)
    assert [row["time"] for row in History.load(tmp_path).rows] == [1, 2, 3]


@pytest.mark.parametrize("cut", range(1, 9))
def test_half_a_line_is_ignored_by_readers_and_cut_off_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    write(tmp_path, [{"time": 1}])
    path = tmp_path / "history.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time":2}\n'[:cut])
    assert History.load(tmp_path).rows == [{"time": 1}]
    write(tmp_path, [{"time": 3}])
    assert path.read_bytes() == b'{"time":1}\n{"time":3}\n'


def test_a_returning_client_goes_on_after_the_last_id(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path) as writer:
        assert writer.last_id == ""
        writer.append({"id": "7-1", "time": 1})
        writer.append({"time": 2})
        assert writer.last_id == "7-1"
    (tmp_path / "history.jsonl").open("ab").write(b'{"id":"8-0","ti')
    with HistoryWriter(tmp_path) as writer:
        assert writer.last_id == "7-1"


def test_numpy_numbers_are_written_and_unknown_ones_left_out(tmp_path: Path) -> None:
    row = {"time": np.float32(0.5), "train": np.int64(3), "loss": math.nan, "reward0": None, "eval_reward0": np.inf}
    write(tmp_path, [row])
    assert json.loads((tmp_path / "history.jsonl").read_text()) == {"time": 0.5, "train": 3}
    with HistoryWriter(tmp_path) as writer, pytest.raises(TypeError, match="ndarray"):
        writer.append({"loss": np.zeros(3)})


def test_missing_history_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.*no such directory"):
        History.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no history\.jsonl"):
        History.load(tmp_path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"time":1}\n[2]\n{"time":3}\n')
    with pytest.raises(CheckpointError, match=r"line 2 of .*history\.jsonl"):
        History.load(tmp_path)


def test_table_has_a_line_a_row_and_nan_where_a_row_is_silent() -> None:
    table = History([{"time": 1, "loss": 0.5}, {"time": 2, "reward0": 7.0}]).get_df()
    assert list(table.columns) == ["time", "loss", "reward0"]
    assert table["loss"][0] == 0.5 and math.isnan(table["loss"][1])
    assert len(History([]).get_df()) == 0


@pytest.mark.parametrize(("package", "call"), [("pandas", "get_df"), ("matplotlib", "plot")])
def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch, package: str, call: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingExtraError, match=r"srl\[plot\]"):
        getattr(History([{"time": 1, "eval_reward0": 2}]), call)()


def test_plot_saves_a_picture_with_both_axes(tmp_path: Path) -> None:
    rows = [{"time": t, "train": 10 * t, "eval_reward0": -t} for t in range(20)]
    history = History([*rows, *({"time": t + 0.5, "loss": 1 / (t + 1)} for t in range(300))])
    history.plot(ylabel_left=["eval_reward0"], ylabel_right=["loss"], xlabel="time", save_path=tmp_path / "a" / "b.png")
    with Image.open(tmp_path / "a" / "b.png") as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 50
    text = svg_text(tmp_path / "c.svg", history, ylabel_right=["loss"], title="Two axes")
    for expected in ("Two axes", ">eval_reward0<", "time [min]", "loss (mean of 6)"):
        assert expected in text
    assert "loss" not in svg_text(tmp_path / "d.svg", history, ylabel_right=["loss"], plot_right=False)


def test_rows_without_the_counter_are_placed_by_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}

    def draw(axis, x, y, *rest):
        drawn[y.name] = x[y.notna()].tolist()
        axis.plot(x, y, label=y.name)

    monkeypatch.setattr(srl.runner.history, "_draw_line", draw)
    rows = [{"time": 0, "train": 0}, {"time": 10, "train": 100}, {"time": 2.5, "reward0": 1}]
    History(rows).plot(["reward0"], xlabel="train", save_path=tmp_path / "x.svg")
    assert drawn == {"reward0": [25.0]}


def test_unknown_columns_are_refused_with_the_nearest_and_all_names() -> None:
    history = History([{"time": 1, "role": "eval", "eval_reward0": 3.0, "loss": 0.1}])
    with pytest.raises(ConfigError, match=r"'evalreward0'; did you mean 'eval_reward0'\?.*time, eval_reward0, loss$"):
        history.plot(ylabel_left=["evalreward0"])
    for arguments in ({"ylabel_right": ["role"]}, {"xlabel": "zzz"}):
        with pytest.raises(ConfigError, match="It has: time"):
            history.plot(**arguments)


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([], {}, "is empty"),
        ([{"time": 1}], {"ylabel_left": []}, "nothing to plot"),
        ([{"time": 1}], {"plot_left": False}, "nothing to plot"),
        ([{"time": 1}], {"ylabel_left": ["time"], "aggregation_num": 0}, "aggregation_num"),
    ],
)
def test_plots_of_nothing_are_refused(rows: list[dict], arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        History(rows).plot(**arguments)


def test_without_a_display_the_log_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    History([{"time": 1, "eval_reward0": 2}]).plot()
    assert "save_path" in caplog.text
