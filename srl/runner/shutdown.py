"""Stopping in order: SIGINT and SIGTERM set an event that every loop watches.

A second signal does what it would have done without us, so nobody is ever stuck.
"""

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopEvent(threading.Event):
    """An event that knows which signal set it, if one did."""

    signal_number: int | None = None

    def raise_if_signalled(self) -> None:
        """End the program as the signal would have, now that everything is saved."""
        if self.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal_number is not None:
            raise SystemExit(128 + self.signal_number)


@contextlib.contextmanager
def stop_on_signals(also: threading.Event | None = None) -> Iterator[StopEvent]:
    """Give an event that SIGINT, SIGTERM and `also` set; outside the main thread signals are left alone."""
    stop = StopEvent()
    if also is not None:
        threading.Thread(target=_forward, args=(also, stop), name="srl-stop", daemon=True).start()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    # The handler runs in the middle of anything, even of a wait for this event, which holds the event's lock:
    # only another thread may set it. A simple queue may be used from handlers.
    signals: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    watcher = threading.Thread(target=_set_when_signalled, args=(signals, stop), name="srl-signals", daemon=True)
    watcher.start()
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        stop.signal_number = number
        restore()
        signals.put(number)

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()
        signals.put(None)


def _set_when_signalled(signals: "queue.SimpleQueue[int | None]", stop: StopEvent) -> None:
    if signals.get() is not None:
        stop.set()


def _forward(source: threading.Event, target: threading.Event) -> None:
    source.wait()
    target.set()
