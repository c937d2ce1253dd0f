"""The workers' main loops: wait for tasks on the broker and serve one after the other.

`trainer_run_forever` and `actor_run_forever` are what containers, the command line and `train_mp` run.
"""

import functools
import logging
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from srl.base.errors import ProtocolError, SrlError
from srl.runner.alive import give_sign_of_life
from srl.runner.distribution.broker import LEASE_MS, Broker, check_protocol
from srl.runner.distribution.keeper import restore_from_directories
from srl.runner.distribution.outages import persist
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.distribution.records import Lease, LeaseLostError, TaskDefinition, TaskOverError
from srl.runner.distribution.scripts import MOST_SLOTS
from srl.runner.distribution.work_dir import remove_finished, task_directory
from srl.runner.env_process import ONE_THREAD
from srl.runner.plugins import load_plugins
from srl.runner.shutdown import stop_on_signals

logger = logging.getLogger("srl")

IDLE_S = 0.5
"""How often an idle worker looks for tasks."""
SPARE_S = 1.5 * LEASE_MS / 1000
"""An actor that found no place for this long is no replacement for another: it joins beyond the number asked for."""


def trainer_run_forever(
    redis_params: RedisParameters,
    experience: None = None,
    *,
    work_dir: str | Path | None = None,
    allow: Sequence[str] = (),
    stop: threading.Event | None = None,
) -> None:
    """Serve as the trainer of one task after the other; returns after SIGTERM or SIGINT.

    At the start it waits for the broker as long as `redis_params.connect_timeout_s` says (`math.inf`: for ever);
    outages that come later are waited out. A stop leaves a checkpoint at the broker for the next trainer.

    Args:
        experience: reserved for another experience transport; `None` is the broker.
        work_dir: where memories keep their files while their task lasts; `None` keeps them in plain memory.
        allow: modules with own algorithms, processors or envs that tasks may name.
        stop: ends the loop when set, beside the signals.

    Raises:
        BrokerError: the broker cannot be reached in time, or is unsafe.
        ConfigError: a module of `allow` cannot be imported.
    """
    from srl.runner.distribution.trainer_server import serve_trainer

    def serve(broker: Broker, lease: Lease, definition: TaskDefinition, halt: threading.Event) -> None:
        if work_dir is None:
            serve_trainer(broker, lease, definition, None, halt)
            return
        persist(lambda: remove_finished(broker, Path(work_dir)), broker, halt)
        over = False  # an unfinished task's files serve its next trainer
        with task_directory(Path(work_dir), lease.task) as directory:
            try:
                over = serve_trainer(broker, lease, definition, directory, halt)
            except Exception as error:
                over = not isinstance(error, LeaseLostError)
                raise
            finally:
                if over and directory is not None:
                    shutil.rmtree(directory, ignore_errors=True)

    def look_after(broker: Broker) -> None:
        if work_dir is not None:
            restore_from_directories(broker, Path(work_dir))

    _serve_forever("trainer", redis_params, serve, allow, stop, look_after)


def actor_run_forever(
    redis_params: RedisParameters,
    experience: None = None,
    *,
    allow: Sequence[str] = (),
    stop: threading.Event | None = None,
) -> None:
    """Serve as an actor of one task after the other; returns after SIGTERM or SIGINT.

    A stop sends what was played but not yet sent. The rest is as in `trainer_run_forever`.
    """
    configure_actor_process()
    from srl.runner.distribution.actor_server import serve_actor

    _serve_forever("actor", redis_params, serve_actor, allow, stop)


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
        **ONE_THREAD,
        # An actor needs each answer at once; computing it behind its back only adds a hand-over.
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    }


def _serve_forever(
    role: Literal["trainer", "actor"],
    redis_params: RedisParameters,
    serve: Callable[[Broker, Lease, TaskDefinition, threading.Event], None],
    allow: Sequence[str],
    stop: threading.Event | None,
    look_after: Callable[[Broker], None] = lambda broker: None,
) -> None:
    """Serve one task after the other; `look_after` is called before this worker looks for its first."""
    load_plugins(allow)
    with stop_on_signals(stop) as halt:
        if not redis_params.wait_until_reachable(halt):
            return
        broker = Broker(redis_params)
        refused: set[str] = set()
        idle_since_s = time.monotonic()
        persist(lambda: look_after(broker), broker, halt)
        logger.info("%s: waiting for tasks at %s", role, redis_params.address)
        while not halt.is_set():
            spare = role == "actor" and time.monotonic() - idle_since_s > SPARE_S
            give_sign_of_life()
            find = functools.partial(_find_work, broker, role, refused, spare)
            lease = persist(find, broker, halt, meanwhile=give_sign_of_life)
            if lease is None:
                halt.wait(IDLE_S)
                continue
            logger.info("%s: serving task %s", lease.worker, lease.task)
            _serve_one(broker, lease, serve, halt, refused)
            idle_since_s = time.monotonic()
        broker.close()
        logger.info("%s: stopped", role)


def _find_work(broker: Broker, role: Literal["trainer", "actor"], refused: set[str], spare: bool) -> Lease | None:
    """Return a lease of the oldest unfinished task that has room for this role; a `spare` actor fits everywhere."""
    for task, fields in broker.open_tasks():
        wanted = broker.parameters.task_name
        if task in refused or not broker.is_safe(task) or (wanted and wanted not in (task, fields["name"])):
            continue
        try:
            check_protocol(task, int(fields["protocol"]), fields.get("made_by", ""))
        except ProtocolError as error:
            # Another worker may speak the task's version, so the task itself goes on waiting.
            refused.add(task)
            logger.error("%s: %s", role, error)
            broker.add_error(task, f"{role} on {socket.gethostname()}", str(error))
            continue
        joins = spare and fields["lockstep"] == "0"
        slots = 1 if role == "trainer" else MOST_SLOTS if joins else int(fields["actor_num"])
        lease = broker.acquire(task, role, slots)
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
    except TaskOverError as error:
        logger.info("%s: %s", lease.worker, error)
    except LeaseLostError as error:
        logger.warning("%s: %s", lease.worker, error)
    except Exception as error:
        refused.add(lease.task)
        text = str(error) if isinstance(error, SrlError) else traceback.format_exc()
        logger.error("%s: task %s failed: %s", lease.worker, lease.task, text)
        persist(lambda: _report_failure(broker, lease, text), broker, stop)
    finally:
        persist(lambda: broker.release(lease), broker, stop)
        logger.info("%s: left task %s", lease.worker, lease.task)


def _report_failure(broker: Broker, lease: Lease, text: str) -> None:
    # An actor's failure ends a run only where nobody else plays; its trainer decides that.
    if lease.role == "actor" or not broker.finish(lease.task, "failed", f"{lease.worker}: {text}", lease):
        broker.add_error(lease.task, lease.worker, text, fatal=True)
