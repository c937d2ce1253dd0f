"""Faults of envs: an env that raises, hangs or dies costs a run that env, not more.

Actors on a broker make their lanes with an `EnvWatch`. Then a faulty env is replaced by a new one, and the watch
keeps what there is to tell. Without a watch (`Runner.train`, evaluations) a fault is raised at once.
"""

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium
import numpy as np

from srl.base.env import AgentEnv, as_seeds
from srl.base.errors import EnvError, SrlError
from srl.base.spaces import Spaces

logger = logging.getLogger("srl")

T = TypeVar("T")

REPLACED = "srl_replaced"
"""Key of Gymnasium's info: the lane's env was replaced, and the frame is the first one of its replacement."""

MOST_IN_A_ROW = 3
"""Faults of one lane without a step between them after which a new env would not help either."""

REPLACEMENT_STREAM = 2
"""Number of the random stream that replacements are seeded from."""


class EnvWatch:
    """What happens to the envs of one playing thread, for another thread to tell.

    Args:
        timeout_s: seconds that a step or reset in the playing thread may take.

    Attributes:
        faults: a text for each, oldest first; whoever tells them takes them out.
    """

    def __init__(self, timeout_s: float) -> None:
        self.faults: deque[str] = deque()
        self._timeout_s = timeout_s
        self._call: tuple[float, LaneRecord, str, int] | None = None

    def call(self, record: "LaneRecord", what: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call a function of a lane's env; meanwhile `overdue` looks at the time."""
        self._call = time.monotonic(), record, what, threading.get_ident()
        try:
            return function(*arguments, **named)
        finally:
            self._call = None

    def overdue(self) -> str | None:
        """Return which call of an env takes too long, with the stack of the playing thread; `None` if none does."""
        call = self._call
        if call is None or time.monotonic() - call[0] <= self._timeout_s:
            return None
        _, record, what, thread = call
        frame = sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        if self._call is not call:
            return None  # it has just come back
        return (
            f"{record.label}: a {what} takes longer than env_timeout_s = {self._timeout_s:g} s, at {record.where}. Its "
            f"stack:\n{stack}"
        )


class LaneRecord:
    """What one lane has gone through: where it is, and how often its env failed.

    Args:
        label: env and lane in words. watch: takes the faults; `None` where a fault is to be raised.
    """

    def __init__(self, label: str, lane: int, watch: EnvWatch | None) -> None:
        self.label = label
        self._lane = lane
        self._watch = watch
        self._seed = self._faults = self._in_a_row = 0
        self._episode = self._step = 0

    @property
    def where(self) -> str:
        """The step that is next, 0 for a reset; as `AgentEnv` counts, but over all envs of this lane."""
        return f"step {self._step} of its episode {self._episode}"

    def resets(self, seed: int | None = None) -> None:
        """Note that an episode is about to begin; replacements derive their seeds from the last one given."""
        self._seed = self._seed if seed is None else seed
        self._episode, self._step = self._episode + (self._step > 0), 0

    def began(self) -> None:
        """Note that a reset gave a first frame."""
        self._step = 1

    def stepped(self, ended: bool) -> None:
        """Count a step, which may have ended an episode; the env works."""
        self._step += 1
        self._in_a_row = 0
        if ended:
            self.resets()

    def failed(self, what: str, details: str) -> int:
        """Count a fault and return the seed of the replacement.

        Args:
            what: what failed ("a step raised"). details: the traceback, or what else there is.

        Raises:
            EnvError: there is no watch, or these are too many faults in a row.
        """
        self._faults += 1
        self._in_a_row += 1
        text = f"{self.label}: {what}, at {self.where}"
        if self._watch is None:
            raise EnvError(f"{text}:\n{details}")
        if self._in_a_row >= MOST_IN_A_ROW:
            raise EnvError(
                f"{text}. That is fault {self._in_a_row} in a row without one step between them, so another new env "
                f"would not help:\n{details}"
            )
        self._watch.faults.append(f"{text}; its env is replaced:\n{details}")
        self.resets()
        # Another seed for each: what led to the fault must not come again.
        return as_seeds(self._seed, [self._lane], REPLACEMENT_STREAM + (self._faults << 8))[0]


class GuardedEnv(gymnasium.Wrapper[np.ndarray, Any, Any, Any]):
    """An agent env that replaces itself by a new one where it raises; wrong data (`EnvError`) stays an error.

    Args:
        make: makes another one.
    """

    def __init__(self, env: AgentEnv, make: Callable[[], AgentEnv], record: LaneRecord, watch: EnvWatch) -> None:
        super().__init__(env)
        self.spaces = env.spaces
        self._make, self._record, self._watch = make, record, watch

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode, if need be in a new env."""
        self._record.resets(seed)
        try:
            first = self._watch.call(self._record, "reset", self.env.reset, seed=seed, options=options)
        except SrlError:
            raise
        except Exception as error:
            return self._replaced("a reset raised", error), {}
        self._record.began()
        return first

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Step; a fault gives the first frame of a replacement and `REPLACED` in the info."""
        try:
            stepped = self._watch.call(self._record, "step", self.env.step, action)
        except SrlError:
            raise
        except Exception as error:
            return self._replaced("a step raised", error), 0.0, False, False, {REPLACED: True}
        frame, reward, terminated, truncated, info = stepped
        self._record.stepped(terminated or truncated)
        return frame, float(reward), terminated, truncated, info

    def close(self) -> None:
        """Close the env."""
        self._watch.call(self._record, "close", self.env.close)

    def _replaced(self, what: str, error: Exception) -> np.ndarray:
        record, call = self._record, self._watch.call
        while True:
            seed = record.failed(what, "".join(traceback.format_exception(error)))
            try:
                call(record, "close", self.env.close)
            except Exception as failure:
                logger.warning("%s: the faulty env could not be closed: %s", record.label, failure)
            try:
                made = call(record, "constructor", self._make)
            except Exception as raised:
                what, error = "a new env could not be made", raised
                continue
            self.env = made
            check_same(record, self.spaces, made.spaces)
            try:
                frame, _ = call(record, "reset", made.reset, seed=seed)
            except SrlError:
                raise
            except Exception as raised:
                what, error = "the first reset of a new env raised", raised
                continue
            record.began()
            return frame


def check_same(record: LaneRecord, spaces: Spaces, others: Spaces) -> None:
    """Raise where a replacement has other spaces than the env had."""
    if spaces != others:
        raise EnvError(f"{record.label}: a new env has other spaces, {others} in place of {spaces}")
