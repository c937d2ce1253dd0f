"""What workers and clients do while the broker does not answer, or has lost their task: they wait, and go on."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from srl.base.errors import BrokerError, BrokerUnreachableError
from srl.runner.distribution.broker import Broker
from srl.runner.distribution.records import ScriptsMissingError, TaskGoneError

logger = logging.getLogger("srl")

T = TypeVar("T")

GONE_S, GONE_POLL_S = 60.0, 0.5
"""How long a worker or client waits for a task that the broker lost to be restored by its trainer, and how it looks."""


def persist(
    call: Callable[[], T], broker: Broker, stop: threading.Event, meanwhile: Callable[[], None] | None = None
) -> T | None:
    """Call until the broker answers, with back-off and jitter, so that many do not come back at the same moment.

    Returns `None` when `stop` was set before that. Anything but a lost connection is raised, and what
    `meanwhile`, called before each new try, raises.
    """
    import redis

    delay_s = 0.1
    while True:
        try:
            answer = call()
        except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError, ScriptsMissingError) as error:
            if isinstance(error, redis.AuthenticationError):
                raise BrokerError(f"the broker at {broker.parameters.address} refused the log-in: {error}") from error
            if isinstance(error, redis.ResponseError) and not _passes(error):
                raise
            broker.note_whether_it_answers(error)
            if stop.wait(delay_s * random.uniform(0.5, 1.0)):
                return None
            if meanwhile is not None:
                meanwhile()
            delay_s = min(2 * delay_s, 2.0)
        else:
            broker.note_whether_it_answers(None)
            return answer


def outlast(
    call: Callable[[], T],
    broker: Broker,
    stop: threading.Event,
    meanwhile: Callable[[], None] | None = None,
) -> T | None:
    """Call as `persist` does, and wait where the broker lost the task until its trainer has restored it.

    Raises `TaskGoneError` where nobody does so within `GONE_S`.
    """
    since_s: float | None = None
    while True:
        try:
            return persist(call, broker, stop, meanwhile)
        except TaskGoneError as error:
            if since_s is None:
                since_s = time.monotonic()
                logger.warning("%s; waiting for its trainer to restore it", error)
            if time.monotonic() - since_s > GONE_S or stop.wait(GONE_POLL_S):
                raise
        if meanwhile is not None:
            meanwhile()


def once(call: Callable[[], T], broker: Broker) -> T:
    """Call, with a lost connection as a `BrokerUnreachableError`; for clients that do not wait."""
    import redis

    try:
        return call()
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise BrokerUnreachableError(f"the broker at {broker.parameters.address} does not answer: {error}") from error


def _passes(error: Exception) -> bool:
    """Whether a server's answer is about a state that it will leave.

    While one server takes over from another, the old one is read-only; one whose disk or memory is full refuses writes.
    """
    import redis

    return isinstance(error, redis.ReadOnlyError | redis.exceptions.OutOfMemoryError) or "MISCONF" in str(error)
