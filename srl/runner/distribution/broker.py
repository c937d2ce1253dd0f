"""Everything that touches the broker: all keys and scripts live here (docs/broker.md has the table).

Commands are those of Redis 7.0, so Redis and Valkey both serve. `Broker` is used by the client
(`TaskManager`), the trainer and the actors; every write of a worker is fenced by its lease in the script
that does it, so a worker that lost its lease, or whose task is over, cannot change anything.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import srl
from srl.base.errors import BrokerError, ProtocolError
from srl.runner.distribution import scripts
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.distribution.records import (
    Committed,
    Event,
    Lease,
    LeaseLostError,
    Message,
    Position,
    Refused,
    Reply,
    ScriptsMissingError,
    TaskDefinition,
    TaskGoneError,
    TaskOverError,
)
from srl.runner.distribution.wire import PROTOCOL_VERSION, unpacked_bytes

if TYPE_CHECKING:
    import redis

logger = logging.getLogger("srl")

T = TypeVar("T")

TASKS_KEY = "srl:tasks"
QUEUE_KEY = "srl:queue"
BILL_KEY = "srl:bill"
BILL_S = 600
"""How long a bill is shown that nobody writes anew."""
LEASE_MS = 8_000
"""A worker that has been silent for this long may be replaced."""
MOST_TASKS = 1_000
"""Unfinished ones, and those whose results are still kept."""
KEEP_FINISHED_S = 7 * 24 * 3600
"""How long a finished task's parameters, checkpoint and history stay for a client to fetch."""
MESSAGE_STEPS = 128
"""Transitions that an actor sends at once: enough for few broker commands, few enough to stay fresh."""
RESTORED_SEQUENCES = 1_000
LAST_BACKLOGS = 4
"""How many times its limit a backlog may be above that with what stopping actors still have."""
HISTORY_LENGTH = 100_000
EVENT_LENGTH = 100
MOST_TEXT = 16_000
"""Characters of an error, a status or a history row; what is longer is cut, or refused where it has to be whole."""
EXPERIENCE_BYTES, OTHER_BYTES = 64 * 2**20, 16 * 2**20
"""What actors' keys may take at the broker, experience beside some backlogs; the trainer clears what is above it."""
QUARANTINED, QUARANTINED_BYTES = 20, 4096
"""How many refused messages are kept to be looked at, and how much of each."""
FINAL_STATES = ("done", "failed", "cancelled")

_FIELDS = (
    *("name", "state", "error", "created_ms", "started_ms", "finished_ms", "progress", "evaluation", "protocol"),
    *("train_count", "target_train_count", "timeout_s", "actor_num", "version"),
    *("backlog_limit", "actor_backlog", "received_bytes", "beat"),
)
_SEQUENCE = "sequence:"
_SAFE_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
"""Of tasks: a trainer names a folder after one, so nothing else from the broker may become a path."""


class Broker:
    """The keys and scripts of tasks over one redis-py client (thread-safe, as that is)."""

    def __init__(self, parameters: RedisParameters, client: "redis.Redis | None" = None) -> None:
        self.parameters = parameters
        self.redis: Any = client if client is not None else parameters.connect()
        self._answering = threading.Lock()
        self._answers = True

    def note_whether_it_answers(self, error: Exception | None) -> None:
        """Log that the broker went or came back: once, however many threads of this process notice."""
        with self._answering:
            before, self._answers = self._answers, error is None
        if before and error is not None:
            logger.warning("the broker at %s does not answer (%s); trying on", self.parameters.address, error)
        elif not before and error is None:
            logger.info("the broker at %s answers again", self.parameters.address)

    def close(self) -> None:
        """Close the connections."""
        self.redis.close()

    # --- tasks, as the client sees them -------------------------------------------------------------

    def create_task(
        self, name: str, definition: TaskDefinition, backlog_limit_bytes: int, checkpoint: bytes = b""
    ) -> str:
        """Queue a task and return its id; `checkpoint` is what the trainer starts from.

        The id is the name (or the env's) and something random: it is never used twice, so that a worker of an
        old task cannot touch a new one of the same name. Raises `BrokerError` where an unfinished task has
        the name already.
        """
        if name and not re.fullmatch(_SAFE_NAME, name):
            raise BrokerError(
                f"task_name {name!r} may hold letters, digits, '_', '-' and '.', and starts with none of '-.'"
            )
        label = name or re.sub(r"[^A-Za-z0-9_.]+", "-", definition.env["name"])
        task = f"{label}-{secrets.token_hex(4)}"
        fields = {
            **_fields_of(definition, label, backlog_limit_bytes),
            "progress": json.dumps({"env_steps": definition.start_env_steps}),
        }
        keys = [TASKS_KEY, QUEUE_KEY, _key(task, "task"), _key(task, "checkpoint")]
        arguments = [task, name, definition.start_train_count, checkpoint, MOST_TASKS, *_flat(fields)]
        conflict = self._run(scripts.CREATE, keys, arguments)
        if conflict and conflict[0] == b"full":
            raise BrokerError(
                f"the broker at {self.parameters.address} has {MOST_TASKS} tasks, which is the most; cancel some (srl "
                "cancel), or wait until finished ones are a week old"
            )
        if conflict:
            raise BrokerError(
                f"a task called {name!r} is {conflict[0].decode()} at {self.parameters.address}; "
                "watch it (srl watch), cancel it (srl cancel), or give another task_name"
            )
        return task

    def restore_task(
        self,
        lease: Lease,
        definition: TaskDefinition,
        *,
        backlog_limit_bytes: int,
        elapsed_s: float,
        train_count: int,
        progress: Mapping[str, Any],
        sequences: Mapping[str, int],
        parameters: tuple[int, bytes],
        checkpoint: bytes,
    ) -> bool:
        """Lay a trainer's task down again where the broker lost it; returns whether it was lost.

        `parameters` are a version and what was published as it, or `b""`; `sequences` are those of all actors.
        """
        label, _, _ = lease.task.rpartition("-")
        fields = {
            **_fields_of(definition, label, backlog_limit_bytes),
            "train_count": train_count,
            "progress": json.dumps(progress),
            "version": parameters[0],
            **({"parameters": parameters[1]} if parameters[1] else {}),
            "epoch": lease.token.partition(":")[0],
            _lease_field(lease.worker): lease.token,
            # Of the newest actors: a script takes only so many arguments, and older ones are gone.
            **{f"{_SEQUENCE}{actor}": number for actor, number in list(sequences.items())[-RESTORED_SEQUENCES:]},
        }
        keys = [TASKS_KEY, QUEUE_KEY, *(_key(lease.task, part) for part in ("task", "checkpoint"))]
        return bool(self._run(scripts.RESTORE, keys, [lease.task, checkpoint, int(elapsed_s * 1000), *_flat(fields)]))

    def find_task(self, name: str = "") -> str | None:
        """Return the newest task that has this id or name, or the newest of all; `None` where there is none."""
        tasks = self.tasks()
        if not name:
            return tasks[-1] if tasks else None
        if name in tasks:
            return name
        return next((task for task in reversed(tasks) if self.task_fields(task).get("name") == name), None)

    @staticmethod
    def is_safe(task: str) -> bool:
        """Whether a task's id may become the name of a folder."""
        return re.fullmatch(_SAFE_NAME, task) is not None

    def tasks(self) -> list[str]:
        """Return the ids of all known tasks, oldest first; expired ones are forgotten on the way."""
        return [task for task, _ in self._listed(TASKS_KEY, ("state",))]

    def open_tasks(self) -> list[tuple[str, dict[str, str]]]:
        """Return (id, fields) of the unfinished tasks, oldest first."""
        return self._listed(QUEUE_KEY, ("name", "state", "protocol", "made_by", "actor_num", "lockstep"))

    def definition(self, task: str) -> TaskDefinition:
        """Return a task's definition; `ProtocolError` where another version of SRL wrote it."""
        text, protocol, made_by = self.redis.hmget(_key(task, "task"), "definition", "protocol", "made_by")
        if text is None:
            raise TaskGoneError(_gone(task, self.parameters.address))
        check_protocol(task, int(protocol), _text(made_by))
        try:
            return TaskDefinition(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"the definition of task {task!r} cannot be read: {error}") from error

    def task_fields(self, task: str) -> dict[str, str]:
        """Return a task's small fields (state, counters, times), without its definition; empty where it is gone."""
        return _present(_FIELDS, self.redis.hmget(_key(task, "task"), *_FIELDS))

    def snapshot(self, task: str) -> dict[str, Any]:
        """Return everything a status needs, all of one moment: fields, worker statuses, checkpoint number, bill, time.

        Raises `TaskGoneError` where the task is gone.
        """
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.hmget(_key(task, "task"), *_FIELDS)
            pipe.hmget(_key(task, "actors"), "sent_bytes", "slots")
            pipe.hgetall(_key(task, "workers"))
            pipe.hget(_key(task, "checkpoint"), "id")
            pipe.get(BILL_KEY)
            pipe.time()
            values, actors, workers, checkpoint, bill, now = pipe.execute()
        if values[0] is None:
            raise TaskGoneError(_gone(task, self.parameters.address))
        fields: dict[str, Any] = _present(_FIELDS, values)
        fields["sent_bytes"], slots = (_natural(value) for value in actors)
        fields["backlog_limit"] = max(int(fields["backlog_limit"]), int(fields["actor_backlog"]) * slots)
        return {
            "fields": fields,
            "workers": _heartbeats({b"trainer": fields.pop("beat", "").encode(), **workers}),
            "checkpoint": int(checkpoint or 0),
            "bill": bill,
            "now_ms": _milliseconds(now),
        }

    def playing_actors(self, task: str) -> tuple[int, int]:
        """Return how many actors have been heard lately, and the broker's time in milliseconds."""
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(_key(task, "workers"))
            pipe.time()
            workers, now = pipe.execute()
        now_ms = _milliseconds(now)
        beats = [_natural(value.partition(b" ")[0]) for value in workers.values()]
        return sum(now_ms - beat_ms <= LEASE_MS for beat_ms in beats), now_ms

    def elapsed_s(self, task: str) -> float:
        """Return how long a task has been running, by the broker's clock."""
        started = self.redis.hget(_key(task, "task"), "started_ms")
        now = _milliseconds(self.redis.time())
        return max(0, now - int(started or now)) / 1000

    def finish(self, task: str, state: str, error: str = "", lease: Lease | None = None) -> bool:
        """Bring a task to a final state; with a lease only while it is held. Returns whether this call did it."""
        parts = ("task", "events", "experience", "checkpoint", "history", "quarantine", "workers", "actors")
        keys = [QUEUE_KEY, *(_key(task, part) for part in parts)]
        holder = "" if lease is None else lease.token
        return bool(self._run(scripts.FINISH, keys, [task, state, error[:MOST_TEXT], KEEP_FINISHED_S, holder]))

    def ask_to_end(self, task: str) -> bool:
        """Ask a running task's trainer for its end; returns whether this call is the first that does."""
        return bool(self._run(scripts.ASK_TO_END, [_key(task, "task")], []))

    def write_bill(self, bill: str) -> None:
        """Leave what the workers cost (JSON) for clients to see; it is forgotten unless written again."""
        self.redis.set(BILL_KEY, bill, ex=BILL_S)

    def bill(self) -> bytes | None:
        """Return what the workers cost (JSON), `None` where nobody counts."""
        bill: bytes | None = self.redis.get(BILL_KEY)
        return bill

    def parameter_version(self, task: str) -> int:
        """Return the version of the newest published parameters, 0 before the first."""
        return int(self.redis.hget(_key(task, "task"), "version") or 0)

    def parameters_blob(self, task: str) -> tuple[int, bytes | None]:
        """Return the newest published parameters and their version, `None` before the first."""
        version, blob = self.redis.hmget(_key(task, "task"), "version", "parameters")
        return int(version or 0), blob

    def checkpoint_blob(self, task: str) -> tuple[int, bytes | None]:
        """Return the newest learner state and its number, `None` before the first."""
        number, blob = self.redis.hmget(_key(task, "checkpoint"), "id", "blob")
        return int(number or 0), blob

    def history(self, task: str, after: str = "0", count: int = 10_000) -> list[dict[str, Any]]:
        """Return rows that came after a row's `id`; each has its own `id`."""
        entries = self.redis.xrange(_key(task, "history"), min=f"({after}", count=count)
        return [{"id": entry.decode(), **json.loads(fields[b"row"])} for entry, fields in entries]

    def add_error(self, task: str, worker: str, message: str, *, fatal: bool = False) -> None:
        """Leave an error for the client to read; a `fatal` one for the trainer too, as its worker leaves."""
        arguments = [_key(task, "task"), worker, message[:MOST_TEXT], "1" if fatal else "", EVENT_LENGTH]
        self._run(scripts.ADD_ERROR, [_key(task, "events")], arguments)

    def events(self, task: str, after: str = "0", block_ms: int | None = None) -> list[Event]:
        """Return what came after an event's id: errors of workers, and the task's end; waits for one if asked."""
        entries = self._read_stream(_key(task, "events"), after, EVENT_LENGTH, block_ms)
        return [
            Event(i.decode(), _text(f.get(b"worker")), _text(f.get(b"message")), bool(f.get(b"fatal")))
            for i, f in entries
        ]

    # --- leases and heartbeats ----------------------------------------------------------------------

    def acquire(self, task: str, role: Literal["trainer", "actor"], slots: int = 1) -> Lease | None:
        """Take the trainer's lease or that of the first free actor slot; `None` where all are held or the task is over.

        A lease is free when nobody has it, or its holder has been silent for `LEASE_MS`.
        """
        nonce = secrets.token_hex(8)
        if role == "trainer":
            taken = self._run(scripts.ACQUIRE_TRAINER, [_key(task, "task")], [nonce, LEASE_MS])
        else:
            keys = [_key(task, part) for part in ("actors", "workers")]
            taken = self._run(scripts.ACQUIRE_ACTOR, keys, [_key(task, "task"), slots, nonce, LEASE_MS])
        return Lease(task, role, int(taken[0]), taken[1].decode()) if taken else None

    def release(self, lease: Lease) -> None:
        """Give a lease back at once, so that the next worker need not wait for it to run out."""
        if lease.role == "trainer":
            self._run(scripts.RELEASE_TRAINER, [_key(lease.task, "task")], [lease.token])
        else:
            keys = [_key(lease.task, part) for part in ("actors", "workers")]
            self._run(scripts.RELEASE_ACTOR, keys, [_key(lease.task, "task"), lease.token, lease.worker])

    # All calls below raise `LeaseLostError` where another worker took over, `TaskGoneError` where the broker lost the
    # task, `TaskOverError` where it has ended; all mean that nothing was written.

    def beat(self, lease: Lease, status: str, *, count_actors: bool = False) -> Reply:
        """Keep the lease and leave a status (JSON); an actor may ask which of how many it is.

        The trainer's beat also keeps what actors may write within bounds; what was cleared is in the reply.
        """
        if lease.role == "trainer":
            parts = ("task", "actors", "workers", "experience", "events")
            return self._fenced(scripts.WATCH, lease, parts, [status, EXPERIENCE_BYTES, OTHER_BYTES])
        return self._fenced(scripts.BEAT, lease, ("actors", "workers"), [status, LEASE_MS if count_actors else ""])

    def add_history(self, lease: Lease, row: Mapping[str, Any], evaluation: str = "") -> None:
        """Append a history row as the trainer, and with it the evaluation (JSON) that the status shows."""
        text = json.dumps(row)
        if len(text) > MOST_TEXT:
            raise ProtocolError(f"a history row of {len(text)} characters is above the limit of {MOST_TEXT}")
        self._fenced(scripts.ADD_HISTORY, lease, ("task", "history"), [text, HISTORY_LENGTH, evaluation])

    # --- experience, parameters, checkpoints --------------------------------------------------------

    def send(self, lease: Lease, message: bytes, *, is_last: bool = False) -> Reply:
        """Add an experience message to the backlog, unless that is full (`Reply.sent`).

        It counts what messages hold, whatever compression saves. An empty backlog takes any message, so that one
        above the limit is not stuck for ever. One of the last of an actor that stops may be above the limit too.
        """
        above = LAST_BACKLOGS if is_last else 0
        return self._fenced(scripts.SEND, lease, ("actors", "experience"), [message, unpacked_bytes(message), above])

    def receive(self, task: str, after: str, count: int, block_ms: int) -> list[Message]:
        """Return what came after an id; waits up to `block_ms` for the first.

        Messages stay at the broker until a trainer commits them: another one finds them from id "0" on.
        """
        entries = self._read_stream(_key(task, "experience"), after, count, block_ms)
        return [Message(i.decode(), fields.get(b"d", b""), _text(fields.get(b"w"))[:64]) for i, fields in entries]

    def quarantine(self, lease: Lease, message: Message, reason: str) -> None:
        """Keep the start of a message that was refused, for somebody to look at."""
        arguments = [message.sender, reason[:MOST_TEXT], message.data[:QUARANTINED_BYTES], QUARANTINED]
        self._fenced(scripts.QUARANTINE, lease, ("task", "quarantine"), arguments)

    def quarantined(self, task: str) -> list[Refused]:
        """Return the last messages that were refused, oldest first."""
        entries = self.redis.xrange(_key(task, "quarantine"))
        return [Refused(_text(f[b"sender"]), _text(f[b"reason"]), f[b"start"]) for _, f in entries]

    def commit(
        self,
        lease: Lease,
        *,
        train_count: int,
        progress: Mapping[str, Any],
        position: Position | None = None,
        parameters: tuple[int, bytes] | None = None,
    ) -> None:
        """Leave counters, and at the same time remove the messages they cover; or new parameters and their version.

        All of it is absolute, so that a call whose answer was lost can be repeated.
        """
        fields: dict[str, Any] = {"train_count": train_count, "progress": json.dumps(progress)}
        keep_from, forgotten = "", [f"{_SEQUENCE}{actor}" for actor in (position.forgotten if position else ())]
        if position is not None:
            fields["received_bytes"] = position.received_bytes
            fields |= {f"{_SEQUENCE}{actor}": number for actor, number in position.sequences.items()}
            milliseconds, _, number = position.last.partition("-")
            keep_from = f"{milliseconds}-{int(number or 0) + 1}"
        if parameters is not None:
            fields["version"], fields["parameters"] = parameters
        arguments = [keep_from, len(forgotten), *forgotten, *_flat(fields)]
        self._fenced(scripts.COMMIT, lease, ("task", "experience", "actors"), arguments)

    def committed(self, task: str) -> Committed:
        """Return where the last commit left the task, for the next trainer to go on from."""
        fields = {name.decode(): value for name, value in self.redis.hgetall(_key(task, "task")).items()}
        slots = _natural(self.redis.hget(_key(task, "actors"), "slots"))
        if not fields:
            raise TaskGoneError(_gone(task, self.parameters.address))
        sequences = {
            name.removeprefix(_SEQUENCE): int(value) for name, value in fields.items() if name.startswith(_SEQUENCE)
        }
        return Committed(
            train_count=int(fields["train_count"]),
            progress=json.loads(fields["progress"]),
            position=Position("0", int(fields["received_bytes"]), sequences),
            version=int(fields["version"]),
            backlog_limit_bytes=max(int(fields["backlog_limit"]), slots * int(fields["actor_backlog"])),
            elapsed_s=self.elapsed_s(task),
        )

    def store_checkpoint(self, lease: Lease, blob: bytes) -> None:
        """Keep a learner state from which another trainer, or the client, can go on."""
        self._fenced(scripts.STORE_CHECKPOINT, lease, ("task", "checkpoint"), [blob])

    def _listed(self, key: str, names: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
        """Return the tasks of a list that exist, with some of their fields, and forget those that do not."""
        import redis

        tasks = [task.decode() for task in self.redis.zrange(key, 0, -1)]
        with self.redis.pipeline(transaction=False) as pipe:
            for task in tasks:
                pipe.hmget(_key(task, "task"), *names)
            found = [(task, _present(names, values)) for task, values in zip(tasks, pipe.execute(), strict=True)]
        gone = [task for task, fields in found if not fields]
        if gone:
            with contextlib.suppress(redis.exceptions.NoPermissionError):  # an actor leaves that to others
                self.redis.zrem(key, *gone)
        return [(task, fields) for task, fields in found if fields]

    def _read_stream(
        self, key: str, after: str, count: int, block_ms: int | None
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        answer = self.redis.xread({key: after}, count=count, block=block_ms)
        entries: list[tuple[bytes, dict[bytes, bytes]]] = answer[0][1] if answer else []
        return entries

    def _fenced(self, script: str, lease: Lease, parts: Sequence[str], arguments: list[Any]) -> Reply:
        keys = [_key(lease.task, part) for part in parts]
        holder = [lease.token]
        if lease.role == "actor":
            holder = [_key(lease.task, "task"), lease.token, lease.worker]
        values = self._run(script, keys, [*holder, *arguments])
        if not values:
            raise LeaseLostError(f"{lease.worker} was replaced in task {lease.task!r}")
        if len(values) == 1:
            state = values[0].decode()
            if state == "gone":
                raise TaskGoneError(_gone(lease.task, self.parameters.address))
            raise TaskOverError(f"task {lease.task!r} is {state}")
        train_count, version, room, sent, rank, actors, *watched = values
        reply = Reply(int(train_count), int(version), float(room), bool(sent), int(rank), int(actors))
        if not watched:
            return reply
        cleared, ending = watched
        names = tuple(key.decode().rpartition(":")[2] for key in cleared)
        return dataclasses.replace(reply, cleared=names, ending=bool(ending))

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        import redis

        try:
            return self.redis.evalsha(_digest(script), len(keys), *keys, *arguments)
        except redis.exceptions.NoScriptError:
            self.load_scripts()
            return self.redis.evalsha(_digest(script), len(keys), *keys, *arguments)

    def load_scripts(self) -> None:
        """Load all scripts into the server, as clients and trainers may; an actor may only run them.

        Raises `ScriptsMissingError` where this user may not; it passes when a trainer or client comes.
        """
        import redis

        try:
            for script in scripts.ALL:
                self.redis.script_load(script)
        except redis.exceptions.NoPermissionError as error:
            raise ScriptsMissingError("no trainer or client has been there since the broker's start") from error


@functools.cache
def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _fields_of(definition: TaskDefinition, label: str, backlog_limit_bytes: int) -> dict[str, Any]:
    """Return the fields of a task that never change."""
    updates, timeout_s = definition.run["max_train_count"], definition.run["timeout"]
    return {
        "name": label,
        "definition": json.dumps(dataclasses.asdict(definition)),
        "protocol": definition.protocol,
        "made_by": definition.made_by,
        "actor_num": definition.run["actor_num"],
        "backlog_limit": backlog_limit_bytes,
        "actor_backlog": backlog_limit_bytes // definition.run["actor_num"],
        "target_train_count": "" if updates is None else definition.start_train_count + updates,
        "timeout_s": timeout_s or "",
        "lockstep": int(definition.run.get("lockstep", False)),
    }


def check_protocol(task: str, protocol: int, made_by: str) -> None:
    """Raise `ProtocolError` that names both versions where a task was made by another one."""
    if protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"task {task!r} was made with protocol version {protocol} (SRL {made_by or 'of an older version'}), this "
            f"SRL ({srl.__version__}) speaks version {PROTOCOL_VERSION}; run the same SRL version on client, trainer "
            "and actors"
        )


def _gone(task: str, address: str) -> str:
    return (
        f"the task {task!r} is not at {address} any more: the broker was restarted without its data, or "
        f"the task ended more than {KEEP_FINISHED_S // 86400} days ago"
    )


def _key(task: str, part: str) -> str:
    return f"srl:{task}:{part}"


def _lease_field(worker: str) -> str:
    return f"lease:{worker}"


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [item for pair in fields.items() for item in pair]


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")[:MOST_TEXT]


def _natural(value: bytes | None) -> int:
    """Return a number that an actor may have written: nothing else than one is believed."""
    return int(value) if value is not None and re.fullmatch(rb"[0-9]{1,18}", value) else 0


def _heartbeats(workers: Mapping[bytes, bytes]) -> dict[str, tuple[int, str]]:
    """Return time and status by worker, leaving out what no worker of SRL has written, and who has no status yet."""
    beats = {}
    for name, value in workers.items():
        milliseconds, _, status = value.partition(b" ")
        if status and len(value) <= MOST_TEXT and re.fullmatch(rb"trainer|actor-[0-9]{1,5}", name):
            beats[name.decode()] = _natural(milliseconds), status.decode(errors="replace")
    return beats


def _present(names: Sequence[str], values: Sequence[bytes | None]) -> dict[str, str]:
    return {name: value.decode() for name, value in zip(names, values, strict=True) if value is not None}


def _milliseconds(time: tuple[int, int]) -> int:
    return time[0] * 1000 + time[1] // 1000
