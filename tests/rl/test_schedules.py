"""Schedules: values at and between the ends, and what may be given in place of one."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from srl.base.errors import ConfigError
from srl.base.settings import Settings, set_by_path, setting
from srl.rl.schedules import Schedule


@dataclass
class Owner(Settings):
    rate: Schedule = setting(factory=lambda: Schedule("constant", 0.5), doc="a schedule")


def made(setter: Callable[[Schedule], None]) -> Schedule:
    schedule = Schedule()
    setter(schedule)
    return schedule


@pytest.mark.parametrize(
    ("setter", "values"),
    [
        (lambda s: s.set_constant(0.3), [0.3, 0.3, 0.3, 0.3, 0.3]),
        (lambda s: s.set_linear(100, 1.0, 0.2), [1.0, 0.8, 0.6, 0.2, 0.2]),
        (lambda s: s.set_cosine(100, 1.0, 0.0), [1.0, 0.5 + np.sqrt(0.125), 0.5, 0.0, 0.0]),
        (lambda s: s.set_polynomial(100, 1.0, 0.0), [1.0, 0.5625, 0.25, 0.0, 0.0]),
        (lambda s: s.set_polynomial(100, 0.0, 1.0, power=3.0), [0.0, 1 - 0.75**3, 0.875, 1.0, 1.0]),
    ],
)
def test_values(setter: Callable[[Schedule], None], values: list[float]) -> None:
    schedule = made(setter)
    counts = np.array([0, 25, 50, 100, 10**9])
    np.testing.assert_allclose(schedule.value(counts), values, atol=1e-12)
    for count, value in zip(counts.tolist(), values, strict=True):
        single = schedule.value(count)
        assert type(single) is float
        assert single == pytest.approx(value)


def test_ends_are_reached_exactly() -> None:
    for name in ("set_linear", "set_cosine", "set_polynomial"):
        schedule = Schedule()
        getattr(schedule, name)(7, 0.1, 0.7)
        assert schedule.value(0) == 0.1
        assert schedule.value(7) == 0.7


def test_counts_keep_their_shape() -> None:
    schedule = made(lambda s: s.set_linear(10, 0.0, 1.0))
    assert schedule.value(np.zeros((2, 3), int)).shape == (2, 3)


def test_a_number_is_a_constant_schedule() -> None:
    assert Owner(rate=0.1).rate.value(5) == 0.1
    owner = Owner()
    owner.rate = 1e-4  # type: ignore[assignment]
    assert owner.rate.value(10**6) == 1e-4
    owner.rate = np.float32(0.5)  # type: ignore[assignment]
    assert owner.rate.value(0) == 0.5
    with pytest.raises(ConfigError, match="rate"):
        owner.rate = True  # type: ignore[assignment]


def test_unset_has_no_value() -> None:
    assert not Schedule().is_set
    with pytest.raises(ConfigError, match="set_constant"):
        Schedule().value(0)


def test_bounds_are_the_extreme_values() -> None:
    assert made(lambda s: s.set_linear(10, 0.9, 0.1)).bounds == (0.1, 0.9)
    assert Schedule.coerce(0.4).bounds == (0.4, 0.4)


@pytest.mark.parametrize("setter", [lambda s: s.set_linear(0, 1, 0), lambda s: s.set_polynomial(9, 1, 0, power=0)])
def test_senseless_arguments_are_refused(setter: Callable[[Schedule], None]) -> None:
    with pytest.raises(ConfigError):
        made(setter)


def test_round_trip_and_command_line() -> None:
    owner = Owner()
    set_by_path(owner, "rate.polynomial", "100,1.0,0.1,3.0")
    assert (owner.rate.kind, owner.rate.steps, owner.rate.power) == ("polynomial", 100, 3.0)
    assert Owner.from_dict(owner.to_dict()) == owner
