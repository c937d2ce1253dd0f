"""The client's side of a task: create it, watch it, wait for it, and take its results home."""

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from srl.base.algorithm import RLConfig, Tree
from srl.base.env import EnvConfig
from srl.base.errors import BrokerError, WorkerError
from srl.base.spaces import Spaces
from srl.runner.checkpoint import save_checkpoint
from srl.runner.distribution.broker import FINAL_STATES, MESSAGE_STEPS, Broker
from srl.runner.distribution.outages import once, outlast, persist
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.distribution.records import Event, Refused, TaskDefinition
from srl.runner.distribution.wire import decode_tree, encode_tree
from srl.runner.history import HistoryWriter
from srl.runner.plugins import config_from_dict, load_plugins
from srl.runner.progress import Progress
from srl.runner.run_config import RunConfig
from srl.runner.saving import Saving
from srl.runner.shutdown import stop_on_signals
from srl.runner.status import ActorStatus, Bill, Evaluation, RunState, RunStatus, TrainerStatus

if TYPE_CHECKING:
    from srl.runner.runner import Runner

logger = logging.getLogger("srl")

T = TypeVar("T")

WAIT_MS = 1_000
"""How often a waiting client looks, as often as workers report; errors and the task's end wake it at once."""
BACKLOG_MESSAGES = 1
"""Messages that each actor may have waiting. More would be older when the trainer gets them, and learning suffers."""


class TaskManager:
    """One task at a broker: the one `redis_params.task_name` says, or the newest.

    A client may leave at any time and another come back with this.

    Raises:
        BrokerError: the broker cannot be reached within `connect_timeout_s`, or is unsafe.
    """

    def __init__(self, redis_params: RedisParameters, task: str | None = None) -> None:
        redis_params.wait_until_reachable(None)
        self._broker = Broker(redis_params)
        self._task = task if task is not None else self._once(lambda: self._broker.find_task(redis_params.task_name))

    @property
    def task(self) -> str:
        """The task's id; `BrokerError` where there is none."""
        if self._task is None:
            name = self._broker.parameters.task_name
            wanted = f"no task called {name!r}" if name else "no task"
            raise BrokerError(
                f"{wanted} at {self._broker.parameters.address}; create one with train_distribution_start"
            )
        return self._task

    def tasks(self) -> list[RunStatus]:
        """Return the status of every task at the broker, oldest first."""
        return [self._status(task) for task in self._once(self._broker.tasks)]

    def get_status(self) -> RunStatus:
        """Return the task's status now."""
        return self._status(self.task)

    def cancel(self) -> bool:
        """End the task; its workers stop within seconds. Returns whether it was unfinished."""
        return self._once(lambda: self._broker.finish(self.task, "cancelled"))

    def end(self, reason: str) -> bool:
        """Ask for the task's end: its trainer stores a last checkpoint, and it is done as if it had run its course.

        One that no trainer has taken yet is cancelled. Returns whether it had not been asked for before.
        """
        if self._once(lambda: self._broker.ask_to_end(self.task)):
            self._once(lambda: self._broker.add_error(self.task, "client", reason))
            return True
        if self.get_status().state == "waiting":
            return self._once(lambda: self._broker.finish(self.task, "cancelled", reason))
        return False

    def read_parameter(self) -> Tree | None:
        """Return the newest published parameters, `None` before the first."""
        _, blob = self._once(lambda: self._broker.parameters_blob(self.task))
        return None if blob is None else decode_tree(blob)[0]

    def history(self, after: str = "0") -> list[dict[str, Any]]:
        """Return the history rows that came after one's `id`, oldest first (`History` says what is in them)."""
        rows: list[dict[str, Any]] = []
        while more := self._once(functools.partial(self._broker.history, self.task, after)):
            rows += more
            after = more[-1]["id"]
        return rows

    def errors(self) -> list[Event]:
        """Return the last errors that workers reported, oldest first."""
        return [event for event in self._once(lambda: self._broker.events(self.task)) if event.worker]

    def refused_messages(self) -> list[Refused]:
        """Return the last experience messages that the trainer refused: their senders, why, and how they begin."""
        return self._once(lambda: self._broker.quarantined(self.task))

    def create_runner(self, allow: Sequence[str] = ()) -> "Runner | None":
        """Return a runner with the task's env, config and newest learned state; `None` where there is no task.

        Args:
            allow: modules with own envs, algorithms and processors that the task may name.
        """
        from srl.runner.runner import Runner

        if self._task is None:
            return None
        load_plugins(allow)
        definition = self._once(lambda: self._broker.definition(self.task))
        runner = Runner(
            EnvConfig.from_dict(definition.env), config_from_dict(definition.rl), seed=definition.run["seed"]
        )
        self.load_into(runner)
        return runner

    def load_into(self, runner: "Runner") -> None:
        """Give a runner what the task has learned so far."""
        _, blob = self._once(lambda: self._broker.checkpoint_blob(self.task))
        if blob is not None:
            tree, metadata = decode_tree(blob)
            runner.restore(tree["learner"], json.loads(metadata["state"]))
        _, parameters = self._once(lambda: self._broker.parameters_blob(self.task))
        if parameters is not None and self.get_status().train_count > runner.train_count:
            runner.set_parameters(decode_tree(parameters)[0])

    def train_wait(
        self,
        *,
        checkpoint_save_dir: str | Path | None = None,
        history_save_dir: str | Path | None = None,
        timeout: float | None = None,
        progress: bool = True,
        stop: threading.Event | None = None,
        check: Callable[[], None] | None = None,
    ) -> RunStatus:
        """Wait until the task is over, with progress; returns its last status.

        Args:
            checkpoint_save_dir: where the task's checkpoints are kept as they come.
            history_save_dir: where its history is appended.
            timeout: seconds after which this stops waiting; the task goes on.
            progress: whether to show progress (log lines, or a live table on a terminal).
            stop: ends the wait when set, like SIGINT and SIGTERM do.
            check: called at each look; what it raises ends the wait. Who starts the workers too gives it, so
                progress does not say how to start them.

        Raises:
            WorkerError: the task failed; the message has the worker's traceback.
            ProtocolError: another version of SRL made the task.
            TaskGoneError: the broker lost the task, and no trainer restored it.
            CheckpointError, OSError: the last checkpoint or the history could not be written. While the task goes
                on that is logged and shown, and later ones are tried.
        """
        task, deadline_s = self.task, None if timeout is None else time.monotonic() + timeout
        self._once(lambda: self._broker.definition(task))
        last_event, snapshot = "0", None
        with (
            stop_on_signals(stop) as ending,
            Progress(enabled=progress, address=None if check else self._broker.parameters.address) as shown,
            _Keeper(self._broker, task, checkpoint_save_dir, history_save_dir) as keeper,
        ):
            while not ending.is_set():
                snapshot = outlast(lambda: self._broker.snapshot(task), self._broker, ending, check) or snapshot
                if snapshot is None:
                    break
                status = _run_status(task, snapshot)
                late = deadline_s is not None and time.monotonic() >= deadline_s
                is_last = status.finished or late
                outlast(functools.partial(keeper.take, snapshot, is_last), self._broker, ending, check)
                status = msgspec.structs.replace(status, warning=keeper.note())
                shown.update(status)
                if is_last:
                    break
                if check is not None:
                    check()
                # The task's end is an event too, so it is noticed at once.
                wait = functools.partial(self._broker.events, task, last_event, WAIT_MS)
                events = persist(wait, self._broker, ending, check)
                for event in events or ():
                    last_event = event.id
                    if event.worker:
                        logger.error("%s: %s", event.worker, event.message)
        if ending.is_set() and check is None:
            logger.info("stopped waiting; task %s goes on (srl watch, srl cancel)", task)
        ending.raise_if_signalled()
        if snapshot is None:
            return self.get_status()
        if status.state == "failed":
            raise WorkerError(f"task {task} failed: {status.error}")
        keeper.raise_failure()
        return status

    def close(self) -> None:
        """Close the connection."""
        self._broker.close()

    def _status(self, task: str) -> RunStatus:
        return _run_status(task, self._once(lambda: self._broker.snapshot(task)))

    def _once(self, call: Callable[[], T]) -> T:
        return once(call, self._broker)


Learned = tuple[int, Tree, Tree, dict[str, Any]]
"""Train count, parameters, learner state and trainer state that a task starts from."""


def create_task(
    redis_params: RedisParameters,
    env_config: EnvConfig,
    rl_config: RLConfig,
    run_config: RunConfig,
    spaces: Spaces,
    learned: Learned | None,
) -> TaskManager:
    """Queue a task and return its manager; raises `BrokerError` as `TaskManager` does."""
    redis_params.wait_until_reachable(None)
    checkpoint, start, start_env_steps = b"", 0, 0
    if learned is not None:
        start, parameters, learner_state, trainer_state = learned
        tree = {"parameters": parameters, "learner": learner_state}
        checkpoint = encode_tree(tree, {"train_count": start, "state": json.dumps(trainer_state)})
        start_env_steps = int(trainer_state.get("env_steps", 0))
    definition = TaskDefinition(
        env=env_config.to_dict(),
        spaces=spaces.to_dict(),
        rl=rl_config.to_dict(),
        run=run_config.to_dict(),
        start_train_count=start,
        start_env_steps=start_env_steps,
    )
    # Room for a whole message of every actor, unpacked, and little enough to stay fresh.
    frames = max(MESSAGE_STEPS, run_config.num_envs * (rl_config.steps_per_segment(spaces) + 1))
    message_bytes = frames * (spaces.observation.nbytes + 16)
    broker = Broker(redis_params)
    limit = BACKLOG_MESSAGES * run_config.actor_num * message_bytes
    bill = _bill(once(broker.bill, broker))
    if bill is not None and bill.spent:
        raise BrokerError(f"{bill.spent}, so {redis_params.address} takes no more tasks; srl deploy apply raises it")
    task = once(lambda: broker.create_task(redis_params.task_name, definition, limit, checkpoint), broker)
    broker.close()
    return TaskManager(redis_params, task)


class _Keeper:
    """Keeps a task's checkpoints and history in the client's directories; a context manager."""

    def __init__(
        self, broker: Broker, task: str, checkpoint_dir: str | Path | None, history_dir: str | Path | None
    ) -> None:
        self._broker = broker
        self._task = task
        self._checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._history = None if history_dir is None else HistoryWriter(history_dir)
        self._saved = 0
        self._checkpoints, self._rows = Saving("checkpoints"), Saving("history rows")

    def __enter__(self) -> "_Keeper":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._history is not None:
            self._history.close()

    def take(self, snapshot: Mapping[str, Any], is_last: bool) -> None:
        """Take what is new; what could not be written is tried again at once where this is the last time."""
        if self._history is not None:
            self._take_history(self._history, is_last)
        is_new = snapshot["checkpoint"] != self._saved
        if self._checkpoint_dir is not None and (is_new or (is_last and self._checkpoints.failure is not None)):
            number, blob = self._broker.checkpoint_blob(self._task)
            if blob is not None:
                self._checkpoints.attempt(functools.partial(self._save_checkpoint, self._checkpoint_dir, blob))
            self._saved = number

    def note(self) -> str:
        """Say what cannot be written now, empty where all can."""
        return "; ".join(filter(None, [self._checkpoints.note(), self._rows.note()]))

    def raise_failure(self) -> None:
        """Raise what could not be written in the end."""
        self._checkpoints.raise_failure()
        self._rows.raise_failure()

    def _take_history(self, history: HistoryWriter, is_last: bool) -> None:
        for _ in range(2 if is_last else 1):
            if self._rows.failure is None or self._rows.attempt(history.flush):
                while rows := self._broker.history(self._task, history.last_id or "0"):
                    if not self._rows.attempt(functools.partial(_append, history, rows)):
                        break

    def _save_checkpoint(self, directory: Path, blob: bytes) -> None:
        definition = self._broker.definition(self._task)
        tree, metadata = decode_tree(blob)
        save_checkpoint(
            directory,
            train_count=metadata["train_count"],
            parameters=tree["parameters"],
            learner_state=tree["learner"],
            state=json.loads(metadata["state"]),
            config={"env": definition.env, "rl": definition.rl},
        )


def _append(history: HistoryWriter, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        history.append(row)


def _bill(text: bytes | None) -> Bill | None:
    return None if text is None else msgspec.json.decode(text, type=Bill)


def _run_status(task: str, snapshot: Mapping[str, Any]) -> RunStatus:
    fields, now_ms = snapshot["fields"], snapshot["now_ms"]
    progress = json.loads(fields.get("progress", "{}"))
    started_ms = int(fields.get("started_ms", now_ms))
    elapsed_s = max(0, int(fields.get("finished_ms", now_ms)) - started_ms) / 1000
    trainer, actors = None, []
    for name, (beat_ms, text) in snapshot["workers"].items():
        age_s = max(0, now_ms - beat_ms) / 1000
        if name == "trainer":
            trainer = msgspec.structs.replace(msgspec.json.decode(text, type=TrainerStatus), heartbeat_age_s=age_s)
            continue
        with contextlib.suppress(msgspec.MsgspecError):  # an actor may write what it likes there
            actor = msgspec.json.decode(text, type=ActorStatus)
            actors.append(msgspec.structs.replace(actor, worker=name, heartbeat_age_s=age_s))
    evaluation = fields.get("evaluation")
    is_over = fields["state"] in FINAL_STATES
    train_count, target = int(fields.get("train_count", 0)), int(fields.get("target_train_count") or 0)
    times_left_s = []
    if target and trainer is not None and trainer.updates_per_s > 0:
        times_left_s.append((target - train_count) / trainer.updates_per_s)
    if fields.get("timeout_s"):
        times_left_s.append(float(fields["timeout_s"]) - elapsed_s)
    return RunStatus(
        task=task,
        state=cast(RunState, fields["state"]),
        elapsed_s=elapsed_s,
        remaining_s=max(0.0, min(times_left_s)) if times_left_s else None,
        train_count=train_count,
        max_train_count=target or None,
        env_steps=progress.get("env_steps", 0),
        actor_num=int(fields.get("actor_num", 1)),
        evaluation=msgspec.json.decode(evaluation, type=Evaluation) if evaluation else None,
        memory_size=progress.get("memory_size", 0),
        memory_capacity=progress.get("memory_capacity", 0),
        messages_lost=progress.get("messages_lost", 0),
        messages_refused=progress.get("messages_refused", 0),
        backlog_bytes=0 if is_over else int(fields["sent_bytes"]) - int(fields["received_bytes"]),
        backlog_limit_bytes=int(fields.get("backlog_limit", 0)),
        parameter_version=int(fields["version"]),
        trainer=trainer,
        actors=tuple(sorted(actors, key=lambda actor: actor.slot)),
        bill=_bill(snapshot["bill"]),
        error=fields.get("error") or None,
    )
