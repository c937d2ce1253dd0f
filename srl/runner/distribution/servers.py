"""The workers' main loops: wait for tasks on the broker and serve one after the other.

`trainer_run_forever` and `actor_run_forever` are what containers, the command line and `train_mp` run.
"""

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from srl.base.errors import ProtocolError, SrlError
from srl.runner.distribution.broker import FINAL_STATES, Broker, Lease, LeaseLostError, TaskDefinition
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.plugins import load_plugins
from srl.runner.shutdown import stop_on_signals

logger = logging.getLogger("srl")

IDLE_S = 0.5
"""How often an idle worker looks for tasks."""

T = TypeVar("T")


def trainer_run_forever(
    redis_params: RedisParameters,
    experience: None = None,
    *,
    work_dir: str | Path | None = None,
    allow: Sequence[str] = (),
    stop: threading.Event | None = None,
) -> None:
    """Serve as the trainer of one task after the other until SIGTERM or SIGINT.

    Args:
        experience: reserved for another experience transport; `None` is the broker.
        work_dir: where memories keep their files; `None` keeps them in plain memory.
        allow: modules with own algorithms, processors or envs that tasks may name.
        stop: ends the loop when set, beside the signals.

    Raises:
        BrokerError: the broker cannot be reached within `connect_timeout_s` at the start, or is unsafe.
    """
    from srl.runner.distribution.trainer_server import TrainerSession

    def serve(broker: Broker, lease: Lease, definition: TaskDefinition, halt: threading.Event) -> None:
        directory = Path(work_dir) / lease.task if work_dir is not None else None
        TrainerSession(broker, lease, definition, directory, halt).run()

    _serve_forever("trainer", redis_params, serve, allow, stop)


def actor_run_forever(
    redis_params: RedisParameters,
    experience: None = None,
    *,
    allow: Sequence[str] = (),
    stop: threading.Event | None = None,
) -> None:
    """Serve as an actor of one task after the other until SIGTERM or SIGINT.

    Arguments and errors are those of `trainer_run_forever`.
    """
    configure_actor_process()
    from srl.runner.distribution.actor_server import ActorSession

    def serve(broker: Broker, lease: Lease, definition: TaskDefinition, halt: threading.Event) -> None:
        ActorSession(broker, lease, definition, halt).run()

    _serve_forever("actor", redis_params, serve, allow, stop)


def configure_actor_process() -> None:
    """Make JAX use one CPU thread and no accelerator in this process; has to happen before its import."""
    if "jax" not in sys.modules:
        os.environ.update(actor_environment())


def actor_environment() -> dict[str, str]:
    """Return the environment variables of an actor process: one thread for each numeric library."""
    flags = os.environ.get("XLA_FLAGS", "")
    single = "--xla_cpu_multi_thread_eigen=false"
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags if single in flags else f"{flags} {single}".strip(),
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def persist(call: Callable[[], T], broker: Broker, stop: threading.Event) -> T | None:
    """Call until the broker answers, with back-off and one log line each time it goes or comes back.

    Returns `None` when `stop` was set before that. Anything but a lost connection is raised.
    """
    import redis

    delay_s, lost = 0.1, False
    while True:
        try:
            answer = call()
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
            if isinstance(error, redis.exceptions.AuthenticationError):
                raise
            if not lost:
                logger.warning("broker %s does not answer (%s); trying on", broker.parameters.address, error)
            lost = True
            if stop.wait(delay_s):
                return None
            delay_s = min(2 * delay_s, 2.0)
        else:
            if lost:
                logger.info("broker %s answers again", broker.parameters.address)
            return answer


def _serve_forever(
    role: Literal["trainer", "actor"],
    redis_params: RedisParameters,
    serve: Callable[[Broker, Lease, TaskDefinition, threading.Event], None],
    allow: Sequence[str],
    stop: threading.Event | None,
) -> None:
    load_plugins(allow)
    with stop_on_signals() as signalled:
        halt = stop if stop is not None else signalled
        redis_params.wait_until_reachable(halt)
        broker = Broker(redis_params)
        refused: set[str] = set()
        logger.info("%s: waiting for tasks at %s", role, redis_params.address)
        while not (halt.is_set() or signalled.is_set()):
            lease = persist(lambda: _find_work(broker, role, refused), broker, halt)
            if lease is None:
                halt.wait(IDLE_S)
                continue
            logger.info("%s: serving task %s", lease.worker, lease.task)
            _serve_one(broker, lease, serve, signalled if stop is None else stop, refused)
        broker.close()


def _find_work(broker: Broker, role: Literal["trainer", "actor"], refused: set[str]) -> Lease | None:
    """Return a lease of the oldest unfinished task that has room for this role."""
    for task in broker.tasks():
        if task in refused:
            continue
        fields = broker.task_fields(task)
        if fields.get("state", "done") in FINAL_STATES:
            continue
        for slot in range(1 if role == "trainer" else int(fields["actor_num"])):
            lease = broker.acquire(task, role, slot)
            if lease is not None:
                return lease
    return None


def _serve_one(
    broker: Broker,
    lease: Lease,
    serve: Callable[[Broker, Lease, TaskDefinition, threading.Event], None],
    stop: threading.Event,
    refused: set[str],
) -> None:
    """Serve one task; what goes wrong with it reaches the client, and the worker lives on."""
    try:
        definition = persist(lambda: broker.definition(lease.task), broker, stop)
        if definition is not None:
            serve(broker, lease, definition, stop)
    except LeaseLostError as error:
        logger.warning("%s: %s", lease.worker, error)
    except ProtocolError as error:
        # Another worker may speak the task's version, so the task itself goes on waiting.
        refused.add(lease.task)
        message = str(error)
        logger.error("%s: %s", lease.worker, message)
        persist(lambda: broker.add_error(lease.task, lease.worker, message), broker, stop)
    except Exception as error:
        refused.add(lease.task)
        text = str(error) if isinstance(error, SrlError) else traceback.format_exc()
        logger.error("%s: task %s failed: %s", lease.worker, lease.task, text)
        persist(lambda: _report_failure(broker, lease, text), broker, stop)
    finally:
        persist(lambda: broker.release(lease), broker, stop)
        logger.info("%s: left task %s", lease.worker, lease.task)


def _report_failure(broker: Broker, lease: Lease, text: str) -> Any:
    broker.add_error(lease.task, lease.worker, text)
    return broker.finish(lease.task, "failed", f"{lease.worker}: {text}")
