"""Pictures of an agent at work: text beside a frame, animations, and frames as terminal text.

The runner's `animation_save_gif` and `render_terminal` step an env and hand the steps over one by one; nothing
here knows envs or algorithms.
"""

import itertools
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from srl.base.errors import ConfigError, EnvError, MissingExtraError

if TYPE_CHECKING:
    from PIL import Image

PANEL_WIDTH = 230
"""Pixels of the text beside a frame; fixed, as all pictures of an animation have one size."""
MIN_HEIGHT = 240
"""Smaller frames are enlarged by a whole factor to about this many pixels, so that text fits beside them."""
TERMINAL_COLUMNS = 80


@dataclass(frozen=True)
class RenderedStep:
    """A moment of an episode.

    Attributes:
        frame: what `env.render()` returned after the step: `[height, width, 3]` uint8, or text.
        step: env steps since the episode began; 0 is the reset.
        action: the action that led here, `None` at the reset.
        reward: what it earned. total_reward: sum since the episode began.
    """

    frame: Any
    step: int
    action: Any
    reward: float
    total_reward: float

    def lines(self) -> list[str]:
        """Return the numbers as text."""
        return [
            f"step {self.step:,}",
            f"action {'-' if self.action is None else _number_text(self.action)}",
            f"reward {self.reward:.3f}",
            f"total {self.total_reward:.3f}",
        ]


class Total:
    """Passes rendered steps on and remembers the reward so far."""

    def __init__(self, steps: Iterable[RenderedStep]) -> None:
        self._steps = steps
        self.reward = 0.0

    def __iter__(self) -> Iterator[RenderedStep]:
        for step in self._steps:
            self.reward = step.total_reward
            yield step


def draw_frame(frame: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """Return a frame `[height, width, 3]` uint8 with a panel of text on its right side.

    Small frames are enlarged. Raises `EnvError` for other arrays, `MissingExtraError` without Pillow.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise MissingExtraError("animations need Pillow: pip install 'srl[plot]'") from error
    picture = Image.fromarray(_check_frame(frame))
    factor = max(1, round(MIN_HEIGHT / picture.height))
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    canvas = Image.new("RGB", (picture.width + PANEL_WIDTH, picture.height), (24, 26, 32))
    canvas.paste(picture, (0, 0))
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=15)
    y = 12
    for line in lines:
        for index, part in enumerate(textwrap.wrap(line, 21) or [""]):
            name, space, value = part.partition(" ") if not index else ("", "", part)
            x = picture.width + 14
            draw.text((x, y), name, font=font, fill=(140, 150, 170))
            draw.text(
                (x + max(62, draw.textlength(name + space, font=font)), y), value, font=font, fill=(240, 240, 245)
            )
            y += 22
    return np.asarray(canvas)


def save_animation(path: str | Path, steps: Iterable[RenderedStep], fps: float = 30) -> int:
    """Write steps as they come into a `.gif` or `.mp4` file and return how many there were.

    Args:
        fps: frames a second; a GIF shows at most 50.

    Raises:
        ConfigError: another suffix, or no frames a second. EnvError: there were no steps, or a frame is no picture.
        MissingExtraError: what writes the format is not installed.
    """
    path = Path(path)
    writers = {".gif": _write_gif, ".mp4": _write_mp4}
    if path.suffix.lower() not in writers:
        raise ConfigError(f"an animation can be saved as .gif or .mp4, not as {path.name!r}")
    if not fps > 0:
        raise ConfigError(f"fps must be above 0, not {fps!r}")
    count = 0

    def draw() -> Iterator[np.ndarray]:
        nonlocal count
        for step in steps:
            count += 1
            yield draw_frame(step.frame, step.lines())

    frames = draw()
    # Nothing is written before there is something to write.
    first = next(frames, None)
    if first is None:
        raise EnvError("there is nothing to save: the episode had no steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    writers[path.suffix.lower()](path, itertools.chain([first], frames), fps)
    return count


def play_in_terminal(steps: Iterable[RenderedStep], fps: float = 30, stream: TextIO | None = None) -> None:
    """Print steps one over the other at `fps`, or below each other and at once where `stream` is no terminal.

    Text frames are printed as they are, pictures as coloured half blocks. Raises `EnvError` for other frames.
    """
    stream = stream or sys.stdout
    terminal = stream.isatty()
    never = threading.Event()
    for index, step in enumerate(steps):
        if terminal:
            if index:
                never.wait(1 / fps)
            stream.write("\x1b[2J\x1b[H" if index == 0 else "\x1b[H")
        text = "\n".join([terminal_text(step.frame), "   ".join(step.lines())])
        # What an earlier, longer line left is erased.
        stream.write((text.replace("\n", "\x1b[K\n") + "\x1b[K\x1b[J" if terminal else text) + "\n")
        stream.flush()


def terminal_text(frame: Any, columns: int = TERMINAL_COLUMNS) -> str:
    """Return a frame as text: text as it is, `[height, width, 3]` uint8 as at most `columns` coloured half blocks."""
    if isinstance(frame, str):
        return frame.rstrip("\n")
    picture = _check_frame(frame)
    height, width = picture.shape[:2]
    columns = min(columns, width)
    rows = max(2, round(height * columns / width) // 2 * 2)
    # The mean of each cell, as single pixels would lose thin lines.
    small = np.stack([part.mean(0) for part in _bands(picture, rows)])
    small = np.stack([part.mean(0) for part in _bands(small.swapaxes(0, 1), columns)], axis=1).astype(int)
    return "\n".join(
        "".join(
            f"\x1b[38;2;{top[0]};{top[1]};{top[2]}m\x1b[48;2;{bottom[0]};{bottom[1]};{bottom[2]}m▀"
            for top, bottom in zip(small[row], small[row + 1], strict=True)
        )
        + "\x1b[0m"
        for row in range(0, rows, 2)
    )


def _check_frame(frame: Any) -> np.ndarray:
    array = np.asarray(frame) if frame is not None else None
    if array is None or array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or array.size == 0:
        what = "nothing" if array is None else f"{type(frame).__name__} {array.shape} {array.dtype}"
        raise EnvError(
            f"env.render() returned {what}, not a picture [height, width, 3] of uint8; "
            "the env must be made with render_mode='rgb_array' and support it"
        )
    return np.ascontiguousarray(array)


def _bands(array: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Return `count` parts of an array's first axis, each of one row at least."""
    edges = np.linspace(0, len(array), count + 1)
    for low, high in itertools.pairwise(edges):
        start = min(int(low), len(array) - 1)
        yield array[start : max(int(high), start + 1)]


def _write_gif(path: Path, frames: Iterator[np.ndarray], fps: float) -> None:
    from PIL import Image

    def quantized() -> "Iterator[Image.Image]":
        for frame in frames:
            yield Image.fromarray(frame).quantize(method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)

    pictures = quantized()
    # GIFs count hundredths of a second, and viewers take less than two of them for a mistake.
    milliseconds = max(20, round(100 / fps) * 10)
    next(pictures).save(path, save_all=True, append_images=pictures, duration=milliseconds, loop=0)


def _write_mp4(path: Path, frames: Iterator[np.ndarray], fps: float) -> None:
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise MissingExtraError(".mp4 files need imageio-ffmpeg: pip install 'srl[plot]'; or save a .gif") from error
    writer = None
    try:
        for frame in frames:
            # The usual pixel format needs even sides.
            even = np.pad(frame, [(0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)])
            if writer is None:
                height, width = even.shape[:2]
                writer = imageio_ffmpeg.write_frames(str(path), (width, height), fps=fps, macro_block_size=1)
                writer.send(None)
            writer.send(np.ascontiguousarray(even))
    finally:
        if writer is not None:
            writer.close()


def _number_text(value: Any) -> str:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        return str(value)
    numbers = [f"{number:.2f}" if array.dtype.kind == "f" else str(number) for number in array.flat]
    return numbers[0] if array.ndim == 0 else f"[{' '.join(numbers)}]"
