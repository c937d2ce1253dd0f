import os
import signal
import subprocess
import sys
import threading

import pytest

from srl.runner.shutdown import stop_on_signals

WAITING = """
import os, signal, threading
from srl.runner.shutdown import stop_on_signals

for _ in range(30):
    with stop_on_signals() as stop:
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
        while not stop.is_set():
            stop.wait(0)
    assert stop.signal_number == signal.SIGTERM
print("all noticed")
"""


def test_a_signal_in_the_middle_of_a_wait_is_noticed() -> None:
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=30)
    assert done.stdout == "all noticed\n", done.stderr


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["int", "term"]
)
def test_a_signal_ends_the_program_as_it_would_have(number: signal.Signals, ending: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), number)
        assert stop.wait(10)
        assert signal.getsignal(number) == before  # a second one is not held back
        with pytest.raises(ending) as raised:
            stop.raise_if_signalled()
    if isinstance(raised.value, SystemExit):
        assert raised.value.code == 143
    assert signal.getsignal(number) == before


def test_without_a_signal_nothing_happens() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert signal.getsignal(signal.SIGTERM) != before
    stop.raise_if_signalled()
    assert not stop.is_set()
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_event_stops_too_even_outside_the_main_thread() -> None:
    also = threading.Event()
    noticed: list[bool] = []

    def wait() -> None:
        with stop_on_signals(also) as stop:
            noticed.append(stop.wait(10))

    thread = threading.Thread(target=wait)
    thread.start()
    also.set()
    thread.join(10)
    assert noticed == [True]
