"""Waiting in tests: for what is true, not for time to pass."""

import threading
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "it") -> Any:
    """Wait for something true and return it."""
    deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"{what} did not happen in {timeout_s:.0f} s"
        pause.wait(0.01)
    return found
