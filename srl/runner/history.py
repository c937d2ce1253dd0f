"""A run's history: rows of numbers in `history.jsonl`, appended while it trains, read and plotted afterwards.

Trainers, task managers and in-process training write with `HistoryWriter`; `srl.Runner.load_history` and the
command line read with `History.load`.
"""

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import msgspec
import numpy as np

from srl.base.errors import CheckpointError, ConfigError, MissingExtraError

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

FILE_NAME = "history.jsonl"
SMOOTH_ABOVE = 2
"""Lines of more than this many times `aggregation_num` points also get a rolling mean."""

logger = logging.getLogger("srl")


class HistoryWriter:
    """Appends rows to a directory's history; what was written by an earlier process stays.

    A row is a flat JSON object. Rows are sparse: each worker writes the columns it knows. Usual ones are `time`
    (s since the run's start), `train` (updates), `step` (env steps), `role`, `worker`, `reward0` (mean raw reward
    of the training episodes since the last row), `eval_reward0` and `loss`. `id` marks how far a source was read.
    """

    def __init__(self, directory: str | Path) -> None:
        """Open the history in `directory`, which is made; a half-written last line is cut off."""
        self.path = Path(directory) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_id = ""
        if self.path.exists():
            rows, whole_bytes = _read(self.path)
            self._last_id = next((str(row["id"]) for row in reversed(rows) if "id" in row), "")
            if whole_bytes < self.path.stat().st_size:
                os.truncate(self.path, whole_bytes)
        self._file: BinaryIO = self.path.open("ab")
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)

    @property
    def last_id(self) -> str:
        """The `id` of the last row that has one, or `""`: where a returning client goes on reading."""
        return self._last_id

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row; it survives the death of this process. `None` and NaN entries are left out.

        Raises `OSError` where the disk refuses; the row is then kept and written with the next one.
        """
        known = {name: value for name, value in row.items() if value is not None and not _is_nan(value)}
        self._file.write(self._encoder.encode(known) + b"\n")
        if "id" in known:
            self._last_id = str(known["id"])
        self._file.flush()

    def flush(self) -> None:
        """Make the rows survive a power failure too."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class History:
    """The rows of a run, oldest first; see `HistoryWriter` for what is in them."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], source: str = "this history") -> None:
        self.rows = [dict(row) for row in rows]
        self._source = source

    @classmethod
    def load(cls, directory: str | Path) -> "History":
        """Read the history in `directory`; a half-written last line is left out.

        Raises `CheckpointError` where there is none or a line is damaged.
        """
        path = Path(directory) / FILE_NAME
        if not path.is_file():
            missing = "it has no history.jsonl" if path.parent.is_dir() else "there is no such directory"
            raise CheckpointError(
                f"no history in {path.parent}: {missing}; give what was history_save_dir (--history-dir)"
            )
        return cls(_read(path)[0], str(path))

    @property
    def columns(self) -> list[str]:
        """Names that occur in the rows, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def get_df(self) -> "pandas.DataFrame":
        """Return a pandas table with one line a row; entries a row does not have are NaN.

        Raises `MissingExtraError` without pandas.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("history tables need pandas: pip install 'srl[plot]'") from error
        return pandas.DataFrame(self.rows, columns=self.columns)

    def plot(
        self,
        ylabel_left: Sequence[str] = ("eval_reward0",),
        ylabel_right: Sequence[str] = (),
        xlabel: str = "time",
        aggregation_num: int = 50,
        left_ymin: float | None = None,
        left_ymax: float | None = None,
        right_ymin: float | None = None,
        right_ymax: float | None = None,
        plot_left: bool = True,
        plot_right: bool = True,
        title: str = "",
        save_path: str | Path | None = None,
        show: bool | None = None,
    ) -> None:
        """Draw columns over another one, on a left and a right axis.

        Args:
            ylabel_left, ylabel_right: columns of each axis. xlabel: column along the bottom; counters such as
                `train` are interpolated for rows that lack them.
            aggregation_num: about how many separate means a long line is smoothed to; more follow it closer.
            left_ymin, left_ymax, right_ymin, right_ymax: limits of the axes; `None` fits the data.
            plot_left, plot_right: `False` leaves that axis out.
            save_path: picture file, `.png`, `.svg` or `.pdf`.
            show: whether a window opens (or the notebook shows it); by default when nothing is saved.

        Raises:
            ConfigError: a column does not exist or has no numbers; the message names the nearest and all others.
            MissingExtraError: matplotlib or pandas is not installed.
        """
        axes = [
            (columns, low, high)
            for columns, low, high, wanted in [
                (list(ylabel_left), left_ymin, left_ymax, plot_left),
                (list(ylabel_right), right_ymin, right_ymax, plot_right),
            ]
            if wanted and columns
        ]
        if not axes:
            raise ConfigError("nothing to plot: name at least one column in ylabel_left or ylabel_right")
        if aggregation_num < 1:
            raise ConfigError(f"aggregation_num must be at least 1, not {aggregation_num!r}")
        if not self.rows:
            raise ConfigError(f"{self._source} is empty: the run has not reported anything yet")
        for name in [xlabel, *(column for columns, _, _ in axes for column in columns)]:
            self._check_column(name)
        try:
            import matplotlib
            from matplotlib import pyplot
        except ImportError as error:
            raise MissingExtraError("plots need matplotlib: pip install 'srl[plot]'") from error

        table = self.get_df()
        x, x_title = _x_axis(table, xlabel)
        with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.axisbelow": True}):
            figure, first = pyplot.subplots(figsize=(9, 5), layout="constrained")
            axis, color = first, 0
            for number, (columns, low, high) in enumerate(axes):
                if number:
                    axis = first.twinx()
                for column in columns:
                    _draw_line(axis, x, table[column], f"C{color % 10}", "--" if number else "-", aggregation_num)
                    color += 1
                axis.set_ylabel(", ".join(columns))
                axis.set_ylim(low, high)
            first.set_xlabel(x_title)
            first.grid(alpha=0.3)
            first.set_title(title or f"{', '.join(column for columns, _, _ in axes for column in columns)} by {xlabel}")
            lines = [
                line for each in figure.axes for line in each.get_lines() if not str(line.get_label()).startswith("_")
            ]
            figure.legend(handles=lines, loc="outside lower center", ncols=min(len(lines), 4), frameon=False)
            if save_path is not None:
                Path(save_path).parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(save_path, dpi=120)
        if show if show is not None else save_path is None:
            if pyplot.get_backend().lower() == "agg":
                logger.warning("there is no display to show the plot on; give save_path='history.png'")
            else:
                pyplot.show()
        pyplot.close(figure)

    def _check_column(self, name: str) -> None:
        numeric = [
            column
            for column in self.columns
            if any(isinstance(row.get(column), (int, float)) and not isinstance(row[column], bool) for row in self.rows)
        ]
        if name not in numeric:
            near = difflib.get_close_matches(name, numeric, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"{self._source} has no numbers called {name!r}{hint} It has: {', '.join(numeric)}")


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return a file's rows and how many bytes the whole lines take."""
    content = path.read_bytes()
    whole_bytes = content.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(content[:whole_bytes].splitlines(), 1):
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"line {number} of {path} is damaged ({error}); remove that line") from error
    return rows, whole_bytes


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)) and np.ndim(value) == 0:
        return value.item()
    raise TypeError(f"a history row cannot hold {type(value).__name__}")


def _is_nan(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and not np.isfinite(value)


def _x_axis(table: "pandas.DataFrame", name: str) -> tuple["pandas.Series[float]", str]:
    """Return each row's place on the x axis and the axis' title."""
    x = table[name].astype(float)
    if name == "time":
        scale, unit = next(
            (scale, unit)
            for scale, unit in [(86400, "days"), (3600, "h"), (60, "min"), (0, "s")]
            if x.max() > 3 * scale
        )
        return x / (scale or 1), f"time [{unit}]"
    if "time" in table and x.isna().any():
        known = table.loc[x.notna() & table["time"].notna(), ["time", name]].sort_values("time").astype(float)
        if len(known):
            between = np.interp(table["time"].astype(float), known["time"], known[name])
            x = x.where(x.notna(), between)
    return x, name


def _draw_line(
    axis: "Axes",
    x: "pandas.Series[float]",
    y: "pandas.Series[float]",
    color: str,
    style: str,
    aggregation_num: int,
) -> None:
    """Draw a column; a long one thin, with its rolling mean on top."""
    given = x.notna() & y.notna()
    x, y = x[given].astype(float), y[given].astype(float)
    order = np.argsort(x.to_numpy(), kind="stable")
    x, y = x.iloc[order], y.iloc[order]
    name = str(y.name)
    if len(y) <= SMOOTH_ABOVE * aggregation_num:
        axis.plot(x, y, style, color=color, linewidth=1.8, marker="o", markersize=3, label=name)
        return
    window = len(y) // aggregation_num
    axis.plot(x, y, "-", color=color, linewidth=0.6, alpha=0.3, label="_raw")
    mean = y.rolling(window, min_periods=1, center=True).mean()
    axis.plot(x, mean, style, color=color, linewidth=2, label=f"{name} (mean of {window})")
