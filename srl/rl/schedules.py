"""Schedules: numbers that change with the run's train count, such as a learning rate or an epsilon.

Algorithms' configs hold them; learners and policies ask for the value at their clock.
"""

from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from srl.base.errors import ConfigError
from srl.base.settings import Settings, setting


@dataclass
class Schedule(Settings):
    """A number as a function of the train count; a plain number may be given in its place."""

    kind: str = setting(
        "unset",
        choices=("unset", "constant", "linear", "cosine", "polynomial"),
        doc="shape of the way from start to end; unset leaves the choice to the algorithm",
    )
    start: float = setting(0.0, doc="value at train count 0, and always for constant")
    end: float = setting(0.0, doc="value from `steps` updates on; unused for constant")
    steps: int = setting(1, low=1, doc="updates the way takes; few change the value early and fast")
    power: float = setting(2.0, above=0, doc="exponent of polynomial; above 1 the value changes faster at first")

    @classmethod
    def coerce(cls, value: Any) -> Any:
        """Turn a number into a constant schedule."""
        if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
            return cls("constant", float(value))
        return value

    def set_constant(self, value: float) -> None:
        """Always `value`."""
        self._set("constant", 1, value, value)

    def set_linear(self, steps: int, start: float, end: float) -> None:
        """Go from `start` to `end` in a straight line over `steps` updates."""
        self._set("linear", steps, start, end)

    def set_cosine(self, steps: int, start: float, end: float) -> None:
        """Go from `start` to `end` along half a cosine wave: slow at both ends (Loshchilov & Hutter, 2017)."""
        self._set("cosine", steps, start, end)

    def set_polynomial(self, steps: int, start: float, end: float, power: float = 2.0) -> None:
        """Go from `start` to `end`; the rest of the way is `(1 - count / steps) ** power` of it."""
        self.power = power
        self._set("polynomial", steps, start, end)

    @property
    def is_set(self) -> bool:
        """Whether the schedule has a value."""
        return self.kind != "unset"

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value that is ever taken."""
        ends = (self.start, self.start if self.kind == "constant" else self.end)
        return min(ends), max(ends)

    @overload
    def value(self, count: int) -> float: ...
    @overload
    def value(self, count: np.ndarray) -> np.ndarray: ...
    def value(self, count: int | np.ndarray) -> float | np.ndarray:
        """Return the value at a train count, or the values `[...]` at counts `[...]`.

        Raises `ConfigError` for an unset schedule.
        """
        if not self.is_set:
            raise ConfigError("this schedule has no value; set one with set_constant(value) or set_linear(...)")
        if self.kind == "constant":
            rest = np.ones(np.shape(count))
        else:
            rest = 1.0 - np.clip(np.asarray(count) / self.steps, 0.0, 1.0)
        if self.kind == "cosine":
            rest = 0.5 * (1.0 - np.cos(np.pi * rest))
        elif self.kind == "polynomial":
            rest = rest**self.power
        # Both weights are exact at the ends, so that `start` and `end` are reached without rounding.
        values = self.start * rest + (0.0 if self.kind == "constant" else self.end) * (1.0 - rest)
        return values if isinstance(count, np.ndarray) else float(values)

    def _set(self, kind: str, steps: int, start: float, end: float) -> None:
        self.steps, self.start, self.end = steps, start, end
        self.kind = kind
