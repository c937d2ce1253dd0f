"""Frames with text beside them, animations, and frames in a terminal."""

import io
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from srl.base.errors import ConfigError, EnvError, MissingExtraError
from srl.runner.render import RenderedStep, draw_frame, play_in_terminal, save_animation, terminal_text


def frame(value: int, height: int = 240, width: int = 160) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def steps(count: int, **shape: int) -> list[RenderedStep]:
    return [
        RenderedStep(frame(20 * index, **shape), index, index and np.array([0.5, -1]), 1.0, float(index))
        for index in range(count)
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_stands_beside_the_frame_and_leaves_it_whole() -> None:
    picture = frame(7)
    drawn = draw_frame(picture, ["step 12", "reward -0.5"])
    assert drawn.dtype == np.uint8 and drawn.shape[0] == 240 and drawn.shape[1] > 300
    assert (drawn[:, :160] == 7).all()
    panel = drawn[:, 160:]
    assert len(np.unique(panel.reshape(-1, 3), axis=0)) > 10
    assert (draw_frame(picture, ["step 13"])[:, 160:] != panel).any()
    assert len(np.unique(draw_frame(picture, [])[:, 160:].reshape(-1, 3), axis=0)) == 1


def test_small_frames_are_enlarged_by_whole_pixels() -> None:
    pixels = np.arange(84 * 84 * 3, dtype=np.uint32).astype(np.uint8).reshape(84, 84, 3)
    drawn = draw_frame(pixels, ["x"])
    assert drawn.shape[0] == 252
    assert (drawn[1 : 84 * 3 : 3, 1 : 84 * 3 : 3] == pixels).all()


def test_lines_tell_step_action_and_rewards() -> None:
    lines = RenderedStep(None, 1234, np.array([0.123456, -2.0]), -0.5, -99.25).lines()
    assert lines == ["step 1,234", "action [0.12 -2.00]", "reward -0.500", "total -99.250"]
    assert RenderedStep(None, 0, None, 0, 0).lines()[1] == "action -"
    assert RenderedStep(None, 0, 3, 0, 0).lines()[1] == "action 3"
    assert RenderedStep(None, 0, {"a": 1}, 0, 0).lines()[1] == "action {'a': 1}"


@pytest.mark.parametrize(("fps", "milliseconds"), [(10, 100), (30, 30), (1000, 20)])
def test_gif_has_every_step_at_the_right_pace(tmp_path: Path, fps: float, milliseconds: int) -> None:
    path = tmp_path / "new" / "episode.GIF"
    assert save_animation(path, iter(steps(5)), fps) == 5
    with Image.open(path) as gif:
        assert gif.n_frames == 5 and gif.info["duration"] == milliseconds and gif.info["loop"] == 0
        for index in range(5):
            gif.seek(index)
            assert np.abs(np.asarray(gif.convert("RGB"))[:, :160].astype(int) - 20 * index).max() <= 3


def test_mp4_is_a_film_of_all_frames_odd_sizes_included(tmp_path: Path) -> None:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "episode.mp4"
    assert save_animation(path, steps(6, height=241, width=161), 20) == 6
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(path))
    assert frames == 6 and seconds == pytest.approx(0.3, abs=0.06)


def test_a_film_is_written_as_it_comes(tmp_path: Path) -> None:
    """An episode of any length must fit, so no frame is kept."""
    seen: list[weakref.ref[np.ndarray]] = []

    def source():
        for index in range(12):
            picture = frame(index)
            seen.append(weakref.ref(picture))
            yield RenderedStep(picture, index, 0, 0.0, 0.0)
            assert sum(reference() is not None for reference in seen) <= 3

    assert save_animation(tmp_path / "x.gif", source()) == 12


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.gif or \.mp4"):
        save_animation(tmp_path / "x.avi", steps(1))
    with pytest.raises(ConfigError, match="fps"):
        save_animation(tmp_path / "x.gif", steps(1), 0)
    with pytest.raises(EnvError, match="no steps"):
        save_animation(tmp_path / "x.gif", [])
    for wrong in (None, "text", np.zeros((4, 4, 3)), np.zeros((4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(EnvError, match="rgb_array"):
            save_animation(tmp_path / "x.gif", [RenderedStep(wrong, 0, None, 0, 0)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("package", "name"), [("PIL", "x.gif"), ("imageio_ffmpeg", "x.mp4")])
def test_missing_packages_name_the_extra(tmp_path: Path, monkeypatch, package: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"srl\[plot\]"):
        save_animation(tmp_path / name, steps(2))


def test_pictures_become_half_blocks_of_their_colours() -> None:
    picture = np.zeros((4, 2, 3), np.uint8)
    picture[0], picture[3] = (255, 0, 0), (0, 0, 255)
    rows = terminal_text(picture).split("\n")
    assert len(rows) == 2 and all(row.count("▀") == 2 and row.endswith("\x1b[0m") for row in rows)
    assert "\x1b[38;2;255;0;0m\x1b[48;2;0;0;0m▀" in rows[0]
    assert "\x1b[38;2;0;0;0m\x1b[48;2;0;0;255m▀" in rows[1]


def test_large_pictures_are_shrunk_to_means() -> None:
    picture = np.zeros((500, 500, 3), np.uint8)
    picture[::2] = 200
    rows = terminal_text(picture, columns=50).split("\n")
    assert len(rows) == 25 and rows[0].count("▀") == 50
    assert set(re.findall(r"2;(\d+);", rows[0])) == {"100"}


def test_text_frames_are_printed_below_each_other_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    play_in_terminal([RenderedStep("ab\ncd\n", index, 1, 0.5, 0.5) for index in range(2)], 1e-3, stream)
    numbers = "action 1   reward 0.500   total 0.500\n"
    assert stream.getvalue() == f"ab\ncd\nstep 0   {numbers}ab\ncd\nstep 1   {numbers}"


def test_a_terminal_shows_one_frame_over_the_other() -> None:
    stream = Terminal()
    play_in_terminal([RenderedStep("ab", index, 1, 0, 0) for index in range(3)], 1000, stream)
    assert stream.getvalue().count("\x1b[2J") == 1
    assert stream.getvalue().count("\x1b[H") == 3


def test_importing_it_needs_none_of_the_optional_packages() -> None:
    program = (
        "import sys; import srl.runner.render, srl.runner.history, srl.runner.progress; "
        "print([name for name in ('PIL', 'pandas', 'matplotlib', 'imageio_ffmpeg', 'jax', 'rich.live') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
