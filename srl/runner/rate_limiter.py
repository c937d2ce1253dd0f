"""The rate limiter: who waits for whom between inserting experience and sampling it.

An object of its own, asked by the trainer before every dispatch and every insertion. The idea is
Reverb's (Cassirer et al. 2021): keep `samples_per_insert` within an error budget.
"""

from typing import Any

from srl.base.errors import CheckpointError, ConfigError


class RateLimiter:
    """Decides when sampling waits for data and when inserting waits for sampling.

    Args:
        warmup_size: transitions in the memory before the first update.
        batch_size: samples that one update takes.
        samples_per_insert: samples allowed for each transition inserted since warm-up; `None` lets the
            learner run free.
        tolerance: transitions that inserting may run ahead of that ratio before it waits; `None` never
            makes inserting wait.
        credit: transitions whose samples a learner that fell behind may still catch up on; the rest is
            forgone, since a burst of updates on old data teaches little. `None` forgoes nothing.

    Raises:
        ConfigError: where both sides could wait for each other for ever.
    """

    def __init__(
        self,
        warmup_size: int,
        batch_size: int,
        samples_per_insert: float | None = None,
        tolerance: int | None = None,
        credit: int | None = None,
    ) -> None:
        if samples_per_insert is not None and tolerance is not None and tolerance * samples_per_insert < batch_size:
            raise ConfigError(
                f"a tolerance of {tolerance} transitions at {samples_per_insert:g} samples per insert is less than "
                f"one batch ({batch_size}): learner and actors would wait for each other; raise the tolerance to at "
                f"least {int(batch_size / samples_per_insert) + 1}"
            )
        self._warmup_size = warmup_size
        self._batch_size = batch_size
        self._samples_per_insert = samples_per_insert
        self._tolerance = tolerance
        self._credit = credit
        self._inserted = 0
        self._updated = 0
        self._warm_at: int | None = None  # what had been inserted when warm-up ended

    def inserted(self, transitions: int, memory_size: int) -> None:
        """Count transitions that were inserted; `memory_size` is what the memory holds now."""
        self._inserted += transitions
        if self._warm_at is None:
            if memory_size >= self._warmup_size:
                self._warm_at = self._inserted
        elif self._credit is not None:
            self._warm_at += max(0, int(self._ahead()) - self._credit)

    def updated(self, updates: int) -> None:
        """Count updates that were done."""
        self._updated += updates

    def updates_due(self, limit: int) -> int:
        """Return how many updates may be done now, at most `limit`."""
        if self._warm_at is None:
            return 0
        if self._samples_per_insert is None:
            return limit
        samples = (self._inserted - self._warm_at) * self._samples_per_insert
        return max(0, min(limit, int(samples / self._batch_size) - self._updated))

    @property
    def may_hold_back(self) -> bool:
        """Whether inserting may ever have to wait."""
        return self._samples_per_insert is not None and self._tolerance is not None

    def may_insert(self) -> bool:
        """Return whether inserting may go on."""
        if self._warm_at is None or not self.may_hold_back:
            return True
        assert self._tolerance is not None
        return self._ahead() < self._tolerance

    def _ahead(self) -> float:
        """Return how many transitions inserting is ahead of sampling."""
        assert self._warm_at is not None and self._samples_per_insert is not None
        return self._inserted - self._warm_at - self._updated * self._batch_size / self._samples_per_insert

    def waiting_for(self, memory_size: int) -> str:
        """Say what the learner waits for when nothing is due."""
        if self._warm_at is None:
            return f"warm-up: {memory_size:,} of {self._warmup_size:,} transitions"
        return "more transitions"

    def get_state(self) -> dict[str, Any]:
        """Return the counters."""
        return {"inserted": self._inserted, "updated": self._updated, "warm_at": self._warm_at}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `get_state`'s counters."""
        self.check_valid(state)
        self._inserted, self._updated, self._warm_at = state["inserted"], state["updated"], state["warm_at"]

    def check_valid(self, state: dict[str, Any]) -> None:
        """Raise `CheckpointError` where this is no state of a rate limiter."""
        if set(state) != {"inserted", "updated", "warm_at"}:
            raise CheckpointError(f"no rate limiter state: {sorted(state)}")
        counts = [state["inserted"], state["updated"], *([] if state["warm_at"] is None else [state["warm_at"]])]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise CheckpointError(f"no rate limiter state, its counters are {counts}")
