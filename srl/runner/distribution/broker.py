"""Everything that touches the broker: all keys and scripts live here (docs/broker.md has the table).

Commands are those of Redis 7.0, so Redis and Valkey both serve. `Broker` is used by the client
(`TaskManager`), the trainer and the actors; every write of a worker is fenced by its lease in the script
that does it, so a worker that lost its lease cannot change anything.
"""

import dataclasses
import json
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from srl.base.errors import BrokerError, ProtocolError
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.distribution.wire import PROTOCOL_VERSION

if TYPE_CHECKING:
    import redis

TASKS_KEY = "srl:tasks"
EXPERIENCE_GROUP = "trainer"
LEASE_MS = 8_000
"""A worker that has not renewed its lease for this long is replaced."""
KEEP_FINISHED_S = 7 * 24 * 3600
"""How long a finished task's parameters, checkpoint and history stay for a client to fetch."""
MESSAGE_STEPS = 128
"""Transitions that an actor sends at once: enough for few broker commands, few enough to stay fresh."""
HISTORY_LENGTH = 100_000
ERROR_LENGTH = 100
FINAL_STATES = ("done", "failed", "cancelled")

# A task's state is created by the client, and changed only by scripts that refuse to leave a final state.
_CREATE = """
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('HSET', KEYS[2], 'name', ARGV[2], 'definition', ARGV[3], 'protocol', ARGV[4], 'state', 'waiting',
  'created_ms', ms, 'actor_num', ARGV[5], 'backlog_limit', ARGV[6], 'train_count', ARGV[7],
  'target_train_count', ARGV[9], 'timeout_s', ARGV[10])
redis.call('XGROUP', 'CREATE', KEYS[3], 'trainer', '0', 'MKSTREAM')
if ARGV[8] ~= '' then redis.call('HSET', KEYS[4], 'blob', ARGV[8], 'id', '0') end
return redis.call('ZADD', KEYS[1], ms, ARGV[1])
"""

_FINISH = """
local state = redis.call('HGET', KEYS[1], 'state')
if not state or state == 'done' or state == 'failed' or state == 'cancelled' then return 0 end
if ARGV[4] ~= '' and redis.call('GET', KEYS[4]) ~= ARGV[4] then return 0 end
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'error', ARGV[2], 'finished_ms', now[1] * 1000 + math.floor(now[2] / 1000))
redis.call('DEL', KEYS[2], KEYS[3])
for i = 1, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[3]) end
return 1
"""

_ACQUIRE = """
local state = redis.call('HGET', KEYS[2], 'state')
if not state or state == 'done' or state == 'failed' or state == 'cancelled' then return '' end
if redis.call('EXISTS', KEYS[1]) == 1 then return '' end
local token = redis.call('HINCRBY', KEYS[2], 'epoch', 1) .. ':' .. ARGV[1]
redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
if ARGV[3] == 'trainer' then
  local now = redis.call('TIME')
  redis.call('HSET', KEYS[2], 'state', 'running')
  redis.call('HSETNX', KEYS[2], 'started_ms', now[1] * 1000 + math.floor(now[2] / 1000))
end
return token
"""

_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('HDEL', KEYS[2], ARGV[2])
  return redis.call('DEL', KEYS[1])
end
return 0
"""

# One call keeps the lease, leaves the status for others to read, and answers what the worker must know.
_BEAT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {} end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('HSET', KEYS[2], ARGV[3], ms .. ' ' .. ARGV[4])
local task = redis.call('HMGET', KEYS[3], 'state', 'train_count', 'actor_num')
local version = redis.call('HGET', KEYS[4], 'version')
return {task[1] or 'cancelled', task[2] or '0', task[3] or '1', version or '0'}
"""

_SEND = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {} end
local task = redis.call('HMGET', KEYS[3], 'state', 'train_count', 'actor_num', 'backlog_limit')
local version = redis.call('HGET', KEYS[4], 'version') or '0'
local state = task[1] or 'cancelled'
local sent = 0
if state == 'waiting' or state == 'running' then
  local held = tonumber(redis.call('GET', KEYS[6]) or '0')
  if held == 0 or held + #ARGV[2] <= tonumber(task[4]) then
    redis.call('XADD', KEYS[5], '*', 'd', ARGV[2])
    redis.call('INCRBY', KEYS[6], #ARGV[2])
    sent = 1
  end
end
return {state, task[2] or '0', task[3] or '1', version, sent}
"""

_ACKNOWLEDGE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local ids = {}
for i = 3, #ARGV do ids[#ids + 1] = ARGV[i] end
redis.call('XACK', KEYS[2], 'trainer', unpack(ids))
redis.call('XDEL', KEYS[2], unpack(ids))
redis.call('DECRBY', KEYS[3], ARGV[2])
return 1
"""

_PUBLISH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[3], 'train_count', ARGV[2], 'progress', ARGV[3])
if #ARGV[4] == 0 then return 1 end
redis.call('HSET', KEYS[2], 'blob', ARGV[4])
return redis.call('HINCRBY', KEYS[2], 'version', 1)
"""

_STORE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], 'blob', ARGV[2])
return redis.call('HINCRBY', KEYS[2], 'id', 1)
"""


@dataclass(frozen=True)
class TaskDefinition:
    """What a task consists of, as JSON data. `spaces` saves the trainer from needing the env itself."""

    env: dict[str, Any]
    spaces: dict[str, Any]
    rl: dict[str, Any]
    run: dict[str, Any]
    start_train_count: int
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Lease:
    """The right to be the trainer or one actor of a task; the token has a fencing epoch."""

    task: str
    role: Literal["trainer", "actor"]
    slot: int
    token: str

    @property
    def worker(self) -> str:
        """Name for people: `trainer`, `actor-0`."""
        return "trainer" if self.role == "trainer" else f"actor-{self.slot}"


@dataclass(frozen=True)
class Reply:
    """What the broker tells a worker with every heartbeat and message.

    Attributes:
        state: of the task; a final one means stop.
        train_count: the run's clock. version: of the newest parameters.
        sent: whether a message was taken; a full backlog refuses it.
    """

    state: str
    train_count: int
    actor_num: int
    version: int
    sent: bool = True


class LeaseLostError(BrokerError):
    """Another worker holds the lease now; whatever this one still does is refused."""


class Broker:
    """The keys and scripts of tasks over one redis-py client (thread-safe, as that is)."""

    def __init__(self, parameters: RedisParameters, client: "redis.Redis | None" = None) -> None:
        self.parameters = parameters
        self.redis: Any = client if client is not None else parameters.connect()
        self._scripts: dict[str, Any] = {}

    def close(self) -> None:
        """Close the connections."""
        self.redis.close()

    # --- tasks, as the client sees them -------------------------------------------------------------

    def create_task(
        self, name: str, definition: TaskDefinition, backlog_limit_bytes: int, checkpoint: bytes = b""
    ) -> str:
        """Queue a task and return its id; `checkpoint` is what the trainer starts from.

        The id is the name (or the env's) and something random. Raises `BrokerError` where an unfinished
        task has the name already.
        """
        for task in self.tasks() if name else []:
            fields = self.task_fields(task)
            if fields["name"] == name and fields["state"] not in FINAL_STATES:
                raise BrokerError(
                    f"a task called {name!r} is {fields['state']} at {self.parameters.address}; "
                    "watch it (srl watch), cancel it (srl cancel), or give another task_name"
                )
        # An id is never used twice, so that a worker of an old task cannot touch a new one of the same name.
        label = name or re.sub(r"[^A-Za-z0-9_.]+", "-", definition.env["name"])
        task = f"{label}-{secrets.token_hex(4)}"
        keys = [TASKS_KEY, *(_key(task, part) for part in ("task", "experience", "checkpoint"))]
        arguments = [task, label, json.dumps(dataclasses.asdict(definition)), definition.protocol]
        arguments += [definition.run["actor_num"], backlog_limit_bytes, definition.start_train_count, checkpoint]
        updates, timeout_s = definition.run["max_train_count"], definition.run["timeout"]
        arguments += ["" if updates is None else definition.start_train_count + updates, timeout_s or ""]
        self._run(_CREATE, keys, arguments)
        return task

    def find_task(self, name: str = "") -> str | None:
        """Return the newest task that has this id or name, or the newest of all; `None` where there is none."""
        tasks = self.tasks()
        if not name:
            return tasks[-1] if tasks else None
        if name in tasks:
            return name
        return next((task for task in reversed(tasks) if self.task_fields(task)["name"] == name), None)

    def tasks(self) -> list[str]:
        """Return the ids of all known tasks, oldest first; expired ones are forgotten on the way."""
        names = [name.decode() for name in self.redis.zrange(TASKS_KEY, 0, -1)]
        with self.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(_key(name, "task"))
            present = pipe.execute()
        gone = [name for name, exists in zip(names, present, strict=True) if not exists]
        if gone:
            self.redis.zrem(TASKS_KEY, *gone)
        return [name for name in names if name not in gone]

    def definition(self, task: str) -> TaskDefinition:
        """Return a task's definition; `ProtocolError` where another version of SRL wrote it."""
        text, protocol = self.redis.hmget(_key(task, "task"), "definition", "protocol")
        if text is None:
            raise BrokerError(f"no task {task!r} at {self.parameters.address}")
        if int(protocol) != PROTOCOL_VERSION:
            raise ProtocolError(
                f"task {task!r} was made with protocol version {int(protocol)}, this SRL speaks version "
                f"{PROTOCOL_VERSION}; run the same SRL version on client, trainer and actors"
            )
        return TaskDefinition(**json.loads(text))

    def task_fields(self, task: str) -> dict[str, str]:
        """Return a task's small fields (state, counters, times), without its definition."""
        names = ("name", "state", "error", "created_ms", "started_ms", "finished_ms", "train_count", "actor_num")
        names += ("backlog_limit", "progress", "evaluation", "protocol", "target_train_count", "timeout_s")
        values = self.redis.hmget(_key(task, "task"), *names)
        return {name: value.decode() for name, value in zip(names, values, strict=True) if value is not None}

    def snapshot(self, task: str) -> dict[str, Any]:
        """Return everything a status needs in one round trip: fields, worker statuses, backlog, server time."""
        with self.redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(_key(task, "workers"))
            pipe.get(_key(task, "backlog"))
            pipe.hget(_key(task, "parameters"), "version")
            pipe.hget(_key(task, "checkpoint"), "id")
            pipe.time()
            workers, backlog, version, checkpoint, now = pipe.execute()
        return {
            "fields": self.task_fields(task),
            "workers": {name.decode(): _split_beat(value) for name, value in workers.items()},
            "backlog_bytes": int(backlog or 0),
            "version": int(version or 0),
            "checkpoint": int(checkpoint or 0),
            "now_ms": now[0] * 1000 + now[1] // 1000,
        }

    def finish(self, task: str, state: str, error: str = "", lease: Lease | None = None) -> bool:
        """Bring a task to a final state; with a lease only while it is held. Returns whether this call did it."""
        keys = [_key(task, part) for part in ("task", "experience", "backlog", "lease:trainer")]
        keys += [_key(task, part) for part in ("parameters", "checkpoint", "history", "errors", "workers")]
        token = lease.token if lease is not None else ""
        return bool(self._run(_FINISH, keys, [state, error, KEEP_FINISHED_S, token]))

    def parameters_blob(self, task: str) -> tuple[int, bytes | None]:
        """Return the newest published parameters and their version, `None` before the first."""
        version, blob = self.redis.hmget(_key(task, "parameters"), "version", "blob")
        return int(version or 0), blob

    def checkpoint_blob(self, task: str) -> tuple[int, bytes | None]:
        """Return the newest learner state and its number, `None` before the first."""
        number, blob = self.redis.hmget(_key(task, "checkpoint"), "id", "blob")
        return int(number or 0), blob

    def add_history(self, task: str, row: dict[str, Any]) -> None:
        """Append a history row."""
        self.redis.xadd(_key(task, "history"), {"row": json.dumps(row)}, maxlen=HISTORY_LENGTH, approximate=True)

    def history(self, task: str, after: str = "0", count: int = 10_000) -> list[dict[str, Any]]:
        """Return rows that came after a row's `id`; each has its own `id`."""
        entries = self.redis.xrange(_key(task, "history"), min=f"({after}", count=count)
        return [{"id": entry.decode(), **json.loads(fields[b"row"])} for entry, fields in entries]

    def add_error(self, task: str, worker: str, message: str) -> None:
        """Leave an error for the client to read."""
        fields = {"worker": worker, "message": message}
        self.redis.xadd(_key(task, "errors"), fields, maxlen=ERROR_LENGTH, approximate=True)

    def errors(self, task: str, after: str = "0") -> list[tuple[str, str, str]]:
        """Return (id, worker, message) of the errors that came after an id."""
        entries = self.redis.xrange(_key(task, "errors"), min=f"({after}")
        return [(i.decode(), f[b"worker"].decode(), f[b"message"].decode()) for i, f in entries]

    # --- leases and heartbeats ----------------------------------------------------------------------

    def acquire(self, task: str, role: Literal["trainer", "actor"], slot: int = 0) -> Lease | None:
        """Take the trainer's or an actor slot's lease; `None` where somebody has it or the task is over."""
        part = "lease:trainer" if role == "trainer" else f"lease:actor:{slot}"
        keys = [_key(task, part), _key(task, "task")]
        token = self._run(_ACQUIRE, keys, [secrets.token_hex(8), LEASE_MS, role]).decode()
        return Lease(task, role, slot, token) if token else None

    def release(self, lease: Lease) -> None:
        """Give a lease back at once, so that the next worker need not wait for it to run out."""
        self._run(_RELEASE, [_lease_key(lease), _key(lease.task, "workers")], [lease.token, lease.worker])

    def beat(self, lease: Lease, status: str) -> Reply:
        """Renew the lease and leave a status (JSON); `LeaseLostError` where it is not held any more."""
        parts = ("workers", "task", "parameters")
        keys = [_lease_key(lease), *(_key(lease.task, part) for part in parts)]
        return _reply(self._run(_BEAT, keys, [lease.token, LEASE_MS, lease.worker, status]))

    # --- experience, parameters, checkpoints --------------------------------------------------------

    def send(self, lease: Lease, message: bytes) -> Reply:
        """Add an experience message to the backlog, unless that is full (`Reply.sent`)."""
        parts = ("workers", "task", "parameters", "experience", "backlog")
        keys = [_lease_key(lease), *(_key(lease.task, part) for part in parts)]
        return _reply(self._run(_SEND, keys, [lease.token, message]))

    def receive(self, lease: Lease, count: int, block_ms: int, *, pending: bool = False) -> list[tuple[bytes, bytes]]:
        """Return (id, message) of new messages, or of those an earlier trainer read and never acknowledged."""
        stream = _key(lease.task, "experience")
        if pending:
            _, entries, _ = self.redis.xautoclaim(stream, EXPERIENCE_GROUP, "trainer", min_idle_time=0, count=count)
        else:
            answer = self.redis.xreadgroup(EXPERIENCE_GROUP, "trainer", {stream: ">"}, count=count, block=block_ms)
            entries = _stream_entries(answer)
        return [(entry, fields[b"d"]) for entry, fields in entries]

    def acknowledge(self, lease: Lease, messages: list[tuple[bytes, bytes]]) -> None:
        """Remove messages that the memory holds now; `LeaseLostError` where another trainer has taken over."""
        if messages:
            size = sum(len(message) for _, message in messages)
            keys = [_lease_key(lease), *(_key(lease.task, part) for part in ("experience", "backlog"))]
            ids = [entry for entry, _ in messages]
            if not self._run(_ACKNOWLEDGE, keys, [lease.token, size, *ids]):
                raise LeaseLostError(f"{lease.worker} of task {lease.task!r} was replaced")

    def publish(self, lease: Lease, train_count: int, progress: dict[str, Any], blob: bytes = b"") -> int:
        """Set counters and, where given, new parameters; returns the parameters' new version."""
        keys = [_lease_key(lease), *(_key(lease.task, part) for part in ("parameters", "task"))]
        version = self._run(_PUBLISH, keys, [lease.token, train_count, json.dumps(progress), blob])
        if not version:
            raise LeaseLostError(f"{lease.worker} of task {lease.task!r} was replaced")
        return int(version)

    def store_checkpoint(self, lease: Lease, blob: bytes) -> None:
        """Keep a learner state from which another trainer, or the client, can go on."""
        if not self._run(_STORE, [_lease_key(lease), _key(lease.task, "checkpoint")], [lease.token, blob]):
            raise LeaseLostError(f"{lease.worker} of task {lease.task!r} was replaced")

    def set_evaluation(self, task: str, evaluation: str) -> None:
        """Leave the last evaluation (JSON) where the status shows it."""
        self.redis.hset(_key(task, "task"), "evaluation", evaluation)

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        registered = self._scripts.get(script)
        if registered is None:
            registered = self._scripts[script] = self.redis.register_script(script)
        return registered(keys=keys, args=arguments)


def _key(task: str, part: str) -> str:
    return f"srl:{task}:{part}"


def _lease_key(lease: Lease) -> str:
    return _key(lease.task, "lease:trainer" if lease.role == "trainer" else f"lease:actor:{lease.slot}")


def _reply(values: list[Any]) -> Reply:
    if not values:
        raise LeaseLostError("another worker holds this lease now")
    state, train_count, actor_num, version, *sent = values
    return Reply(state.decode(), int(train_count), int(actor_num), int(version), bool(sent[0]) if sent else True)


def _split_beat(value: bytes) -> tuple[int, str]:
    milliseconds, _, status = value.decode().partition(" ")
    return int(milliseconds), status


def _stream_entries(answer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of the one stream that was read (redis-py answers RESP2 and RESP3 differently)."""
    if not answer:
        return []
    streams = list(answer.values())[0] if isinstance(answer, dict) else answer[0][1]
    if isinstance(answer, dict) and streams and isinstance(streams[0], list):
        streams = streams[0]
    return cast(list[tuple[bytes, dict[bytes, bytes]]], streams)
