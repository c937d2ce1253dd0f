"""How often processes of a run may end by themselves and be started again; workers and the embedded broker ask this."""

import time

WITHIN_S = 60.0


class Restarts:
    """Whether a process may be started again: not where it ended more than `most` times within a minute."""

    def __init__(self, most: int = 3) -> None:
        self.most = most
        self._ended_s: dict[str, list[float]] = {}

    def allows(self, name: str) -> bool:
        """Note that a process ended, and return whether it may be started again."""
        now_s = time.monotonic()
        recent = [ended_s for ended_s in self._ended_s.get(name, []) if now_s - ended_s < WITHIN_S]
        self._ended_s[name] = [*recent, now_s]
        return len(recent) < self.most
