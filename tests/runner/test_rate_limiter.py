import itertools
import json
from typing import Any

import pytest

from srl.base.errors import CheckpointError, ConfigError
from srl.runner.rate_limiter import RateLimiter


def warm(limiter: RateLimiter, transitions: int = 10) -> RateLimiter:
    limiter.inserted(transitions, transitions)
    return limiter


def test_nothing_is_due_and_everything_may_come_until_warm_up_ends() -> None:
    limiter = RateLimiter(10, 4, samples_per_insert=4.0, tolerance=4)
    for size in range(1, 10):
        limiter.inserted(1, size)
        assert limiter.updates_due(100) == 0
        assert limiter.may_insert()
        assert limiter.waiting_for(size) == f"warm-up: {size} of 10 transitions"
    limiter.inserted(1, 10)
    assert limiter.updates_due(100) == 0
    limiter.inserted(1, 11)
    assert limiter.updates_due(100) == 1
    limiter.updated(1)
    assert limiter.waiting_for(11) == "more transitions"


def test_a_smaller_memory_later_does_not_end_the_warm_up_again() -> None:
    limiter = warm(RateLimiter(10, 1, samples_per_insert=1.0))
    limiter.inserted(2, 5)
    assert limiter.updates_due(100) == 2


@pytest.mark.parametrize(
    ("batch", "ratio", "inserted", "updates"),
    [(4, 4.0, 7, 7), (32, 8.0, 9, 2), (8, 0.5, 31, 1), (8, 20.0, 3, 7), (32, 32.0, 4999, 4999)],
)
def test_the_ratio_is_exact(batch: int, ratio: float, inserted: int, updates: int) -> None:
    limiter = warm(RateLimiter(10, batch, samples_per_insert=ratio))
    for size in range(inserted):
        limiter.inserted(1, 11 + size)
    assert limiter.updates_due(10_000) == updates
    assert limiter.updates_due(1) == 1
    limiter.updated(updates)
    assert limiter.updates_due(10_000) == 0


def test_without_a_ratio_the_learner_runs_free() -> None:
    limiter = warm(RateLimiter(10, 4, tolerance=1))
    limiter.updated(1000)
    assert limiter.updates_due(16) == 16
    limiter.inserted(1000, 1000)
    assert limiter.may_insert()


def test_inserting_waits_when_it_is_a_tolerance_ahead() -> None:
    limiter = warm(RateLimiter(10, 4, samples_per_insert=2.0, tolerance=6))
    limiter.inserted(5, 15)
    assert limiter.may_insert()
    limiter.inserted(1, 16)
    assert not limiter.may_insert()
    limiter.updated(1)  # four samples are two transitions
    assert limiter.may_insert()
    limiter.inserted(2, 18)
    assert not limiter.may_insert()


def test_without_a_tolerance_inserting_never_waits() -> None:
    limiter = warm(RateLimiter(10, 4, samples_per_insert=1.0))
    limiter.inserted(10_000, 10_000)
    assert limiter.may_insert()


def test_settings_that_would_deadlock_are_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match="raise the tolerance to at least 17") as caught:
        RateLimiter(10, 32, samples_per_insert=2.0, tolerance=15)
    assert "wait for each other" in str(caught.value)
    RateLimiter(10, 32, samples_per_insert=2.0, tolerance=16)


def test_one_side_can_always_go_on() -> None:
    grid = itertools.product([1, 3, 8], [0.3, 1.0, 2.5, 7.0], [1, 2, 5, 11, 40])
    tried = 0
    for batch, ratio, tolerance in grid:
        try:
            limiter = warm(RateLimiter(10, batch, ratio, tolerance))
        except ConfigError:
            continue
        tried += 1
        inserted = updated = 0
        for _ in range(300):
            if limiter.may_insert():
                limiter.inserted(1, 10)
                inserted += 1
            else:
                assert limiter.updates_due(1) == 1
                limiter.updated(1)
                updated += 1
        # Both sides are held: the ratio is met within the tolerance.
        assert updated > 0
        assert 0 <= inserted - updated * batch / ratio <= tolerance + 1
    assert tried > 20


def test_state_round_trip() -> None:
    limiter = warm(RateLimiter(10, 4, samples_per_insert=4.0, tolerance=5))
    limiter.inserted(9, 19)
    limiter.updated(2)
    copy = RateLimiter(10, 4, samples_per_insert=4.0, tolerance=5)
    copy.set_state(json.loads(json.dumps(limiter.get_state())))
    assert copy.get_state() == limiter.get_state()
    assert copy.updates_due(100) == limiter.updates_due(100) == 7
    assert copy.may_insert() == limiter.may_insert() is False
    assert copy.waiting_for(0) == "more transitions"


@pytest.mark.parametrize("state", [{}, {"inserted": 1}, {"inserted": 1, "updated": 1, "warm_at": None, "x": 1}])
def test_another_state_is_refused(state: dict[str, Any]) -> None:
    limiter = RateLimiter(10, 4)
    with pytest.raises(CheckpointError, match="no rate limiter state"):
        limiter.set_state(state)
