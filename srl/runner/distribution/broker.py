"""Everything that touches the broker: all keys and scripts live here (docs/broker.md has the table).

Commands are those of Redis 7.0, so Redis and Valkey both serve. `Broker` is used by the client
(`TaskManager`), the trainer and the actors; every write of a worker is fenced by its lease in the script
that does it, so a worker that lost its lease, or whose task is over, cannot change anything.
"""

import dataclasses
import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from srl.base.errors import BrokerError, BrokerUnreachableError, ProtocolError
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.distribution.wire import PROTOCOL_VERSION, unpacked_bytes

if TYPE_CHECKING:
    import redis

logger = logging.getLogger("srl")

T = TypeVar("T")

TASKS_KEY = "srl:tasks"
QUEUE_KEY = "srl:queue"
LEASE_MS = 8_000
"""A worker that has been silent for this long may be replaced."""
KEEP_FINISHED_S = 7 * 24 * 3600
"""How long a finished task's parameters, checkpoint and history stay for a client to fetch."""
MESSAGE_STEPS = 128
"""Transitions that an actor sends at once: enough for few broker commands, few enough to stay fresh."""
HISTORY_LENGTH = 100_000
EVENT_LENGTH = 100
FINAL_STATES = ("done", "failed", "cancelled")

_LUA = """
local function final(state) return state == 'done' or state == 'failed' or state == 'cancelled' end
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
"""

# KEYS: tasks, queue, task, checkpoint. ARGV: id, name, start's train count, checkpoint, fields and values of the task.
# A repeated call (its answer was lost) changes nothing. Scores increase even within a millisecond.
_CREATE = (
    _LUA
    + """
if redis.call('EXISTS', KEYS[3]) == 1 then return {} end
if ARGV[2] ~= '' then
  for _, task in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local other = redis.call('HMGET', 'srl:' .. task .. ':task', 'name', 'state')
    if other[1] == ARGV[2] and not final(other[2]) then return {other[2]} end
  end
end
local ms = now_ms()
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
if last[2] and tonumber(last[2]) >= ms then ms = tonumber(last[2]) + 1 end
redis.call('HSET', KEYS[3], 'state', 'waiting', 'created_ms', ms, 'train_count', ARGV[3], 'version', 0,
  'sent_bytes', 0, 'received_bytes', 0, unpack(ARGV, 5))
if ARGV[4] ~= '' then redis.call('HSET', KEYS[4], 'blob', ARGV[4], 'id', 0) end
redis.call('ZADD', KEYS[1], ms, ARGV[1])
redis.call('ZADD', KEYS[2], ms, ARGV[1])
return {}
"""
)

# KEYS: task, workers. ARGV: role, slots, nonce, lease time.
# The lease is the token in the task; the last heartbeat says whether its holder is alive. So a holder that
# was cut off for long goes on where it was, unless somebody else took over meanwhile.
_ACQUIRE = (
    _LUA
    + """
local state = redis.call('HGET', KEYS[1], 'state')
if not state or final(state) then return {} end
local ms = now_ms()
for slot = 0, tonumber(ARGV[2]) - 1 do
  local worker = ARGV[1] == 'trainer' and 'trainer' or 'actor-' .. slot
  local holder = redis.call('HGET', KEYS[1], 'lease:' .. worker)
  if holder and holder:match(':(.*)$') == ARGV[3] then return {slot, holder} end
  local beat = holder and redis.call('HGET', KEYS[2], worker)
  if not beat or ms - tonumber(beat:match('^%d+')) > tonumber(ARGV[4]) then
    local token = redis.call('HINCRBY', KEYS[1], 'epoch', 1) .. ':' .. ARGV[3]
    redis.call('HSET', KEYS[1], 'lease:' .. worker, token)
    redis.call('HSET', KEYS[2], worker, ms .. ' ')
    if ARGV[1] == 'trainer' then
      redis.call('HSET', KEYS[1], 'state', 'running')
      redis.call('HSETNX', KEYS[1], 'started_ms', ms)
    end
    return {slot, token}
  end
end
return {}
"""
)

# KEYS: task, workers. ARGV: lease, token, worker. What a worker did for a finished task stays to be seen.
_RELEASE = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[1], ARGV[1], 'state')
if task[1] ~= ARGV[2] or final(task[2]) then return 0 end
redis.call('HDEL', KEYS[2], ARGV[3])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
)

# KEYS: queue, task, events, experience, then the rest. ARGV: id, state, error, seconds to keep, lease, token.
_FINISH = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[2], 'state', ARGV[5])
if not task[1] or final(task[1]) then return 0 end
if ARGV[5] ~= '' and task[2] ~= ARGV[6] then return 0 end
redis.call('HSET', KEYS[2], 'state', ARGV[2], 'error', ARGV[3], 'finished_ms', now_ms())
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[4])
redis.call('XADD', KEYS[3], '*', 'worker', '', 'message', ARGV[2])
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return 1
"""
)

# KEYS: task, events. ARGV: worker, message, length, seconds to keep. Late errors of a finished task are kept as long.
_ADD_ERROR = (
    _LUA
    + """
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'worker', ARGV[1], 'message', ARGV[2])
if final(state) then redis.call('EXPIRE', KEYS[2], ARGV[4]) end
return 1
"""
)

# Every worker's call begins with this: KEYS[1] is the task, ARGV[1] the lease's field, ARGV[2] its token.
_FENCE = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[1], ARGV[1], 'state', 'train_count', 'actor_num', 'version',
  'backlog_limit', 'sent_bytes', 'received_bytes')
if task[1] ~= ARGV[2] then return {} end
if final(task[2]) then return {task[2]} end
local room = tonumber(task[6]) - tonumber(task[7]) + tonumber(task[8])
if task[7] == task[8] then room = math.huge end
local sent = 0
"""
)
_REPLY = "return {task[2], task[3], task[4], task[5], tostring(room), sent}"

_BEAT = _FENCE + "redis.call('HSET', KEYS[2], ARGV[3], now_ms() .. ' ' .. ARGV[4])\n" + _REPLY

_SEND = (
    _FENCE
    + """
if tonumber(ARGV[4]) <= room then
  redis.call('XADD', KEYS[2], '*', 'd', ARGV[3])
  redis.call('HINCRBY', KEYS[1], 'sent_bytes', ARGV[4])
  sent = 1
end
"""
    + _REPLY
)

# ARGV: the lowest stream id to keep ('' keeps all), fields and values of the task.
_COMMIT = (
    _FENCE
    + """
if ARGV[3] ~= '' then redis.call('XTRIM', KEYS[2], 'MINID', '=', ARGV[3]) end
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
"""
    + _REPLY
)

_STORE_CHECKPOINT = (
    _FENCE
    + """
redis.call('HSET', KEYS[2], 'blob', ARGV[3])
redis.call('HINCRBY', KEYS[2], 'id', 1)
"""
    + _REPLY
)

_ADD_HISTORY = (
    _FENCE
    + """
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'row', ARGV[3])
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'evaluation', ARGV[5]) end
"""
    + _REPLY
)

_FIELDS = (
    *("name", "state", "error", "created_ms", "started_ms", "finished_ms", "progress", "evaluation", "protocol"),
    *("train_count", "target_train_count", "timeout_s", "actor_num", "version"),
    *("backlog_limit", "sent_bytes", "received_bytes"),
)
_SEQUENCE = "sequence:"
_SAFE_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
"""Of tasks: a trainer names a folder after one, so nothing else from the broker may become a path."""


class LeaseLostError(BrokerError):
    """Somebody else holds the lease now, or the broker lost the task; what this worker still does is refused."""


class TaskOverError(BrokerError):
    """The task is done, failed or cancelled: the worker is to leave it."""


@dataclass(frozen=True)
class TaskDefinition:
    """What a task consists of, as JSON data. `spaces` saves the trainer from needing the env itself."""

    env: dict[str, Any]
    spaces: dict[str, Any]
    rl: dict[str, Any]
    run: dict[str, Any]
    start_train_count: int
    start_env_steps: int = 0
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Lease:
    """The right to be the trainer or one actor of a task; the token has a fencing epoch and is never used twice."""

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
    """What the broker tells a worker with every call.

    Attributes:
        train_count: the run's clock. version: of the newest parameters.
        room: bytes of the largest message that the backlog took before this call, unpacked.
        sent: whether a message was taken; a full backlog refuses it.
    """

    train_count: int
    actor_num: int
    version: int
    room: float
    sent: bool


@dataclass(frozen=True)
class Event:
    """An error of a worker, or, without a worker, the state that a task ended in."""

    id: str
    worker: str
    message: str


@dataclass(frozen=True)
class Position:
    """How far a trainer's experience is counted.

    Attributes:
        last: id of the last message.
        received_bytes: of all messages so far, unpacked.
        sequences: newest sequence number by actor, of those that changed.
    """

    last: str
    received_bytes: int
    sequences: Mapping[str, int]


@dataclass(frozen=True)
class Committed:
    """What a trainer finds at its start: counters, position and parameters' version of the one before it."""

    progress: dict[str, Any]
    position: Position
    version: int
    backlog_limit_bytes: int
    elapsed_s: float


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
        updates, timeout_s = definition.run["max_train_count"], definition.run["timeout"]
        fields = {
            "name": label,
            "definition": json.dumps(dataclasses.asdict(definition)),
            "protocol": definition.protocol,
            "actor_num": definition.run["actor_num"],
            "backlog_limit": backlog_limit_bytes,
            "target_train_count": "" if updates is None else definition.start_train_count + updates,
            "timeout_s": timeout_s or "",
            "progress": json.dumps({"env_steps": definition.start_env_steps}),
        }
        keys = [TASKS_KEY, QUEUE_KEY, _key(task, "task"), _key(task, "checkpoint")]
        arguments = [task, name, definition.start_train_count, checkpoint, *_flat(fields)]
        conflict = self._run(_CREATE, keys, arguments)
        if conflict:
            raise BrokerError(
                f"a task called {name!r} is {conflict[0].decode()} at {self.parameters.address}; "
                "watch it (srl watch), cancel it (srl cancel), or give another task_name"
            )
        return task

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
        return self._listed(QUEUE_KEY, ("name", "state", "protocol", "actor_num"))

    def definition(self, task: str) -> TaskDefinition:
        """Return a task's definition; `ProtocolError` where another version of SRL wrote it."""
        text, protocol = self.redis.hmget(_key(task, "task"), "definition", "protocol")
        if text is None:
            raise BrokerError(_gone(task, self.parameters.address))
        check_protocol(task, int(protocol))
        return TaskDefinition(**json.loads(text))

    def task_fields(self, task: str) -> dict[str, str]:
        """Return a task's small fields (state, counters, times), without its definition; empty where it is gone."""
        return _present(_FIELDS, self.redis.hmget(_key(task, "task"), *_FIELDS))

    def snapshot(self, task: str) -> dict[str, Any]:
        """Return everything a status needs, all of one moment: fields, worker statuses, checkpoint number, time.

        Raises `BrokerError` where the task is gone.
        """
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.hmget(_key(task, "task"), *_FIELDS)
            pipe.hgetall(_key(task, "workers"))
            pipe.hget(_key(task, "checkpoint"), "id")
            pipe.time()
            values, workers, checkpoint, now = pipe.execute()
        if values[0] is None:
            raise BrokerError(_gone(task, self.parameters.address))
        beats = {name.decode(): value.decode().partition(" ") for name, value in workers.items()}
        return {
            "fields": _present(_FIELDS, values),
            "workers": {name: (int(ms), text) for name, (ms, _, text) in beats.items() if text},
            "checkpoint": int(checkpoint or 0),
            "now_ms": _milliseconds(now),
        }

    def elapsed_s(self, task: str) -> float:
        """Return how long a task has been running, by the broker's clock."""
        started = self.redis.hget(_key(task, "task"), "started_ms")
        now = _milliseconds(self.redis.time())
        return max(0, now - int(started or now)) / 1000

    def finish(self, task: str, state: str, error: str = "", lease: Lease | None = None) -> bool:
        """Bring a task to a final state; with a lease only while it is held. Returns whether this call did it."""
        parts = ("task", "events", "experience", "checkpoint", "history", "workers")
        keys = [QUEUE_KEY, *(_key(task, part) for part in parts)]
        holder = [_lease_field(lease.worker), lease.token] if lease is not None else ["", ""]
        return bool(self._run(_FINISH, keys, [task, state, error, KEEP_FINISHED_S, *holder]))

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

    def add_error(self, task: str, worker: str, message: str) -> None:
        """Leave an error for the client to read."""
        keys = [_key(task, part) for part in ("task", "events")]
        self._run(_ADD_ERROR, keys, [worker, message, EVENT_LENGTH, KEEP_FINISHED_S])

    def events(self, task: str, after: str = "0", block_ms: int | None = None) -> list[Event]:
        """Return what came after an event's id: errors of workers, and the task's end; waits for one if asked."""
        entries = self._read_stream(_key(task, "events"), after, EVENT_LENGTH, block_ms)
        return [Event(i.decode(), f[b"worker"].decode(), f[b"message"].decode()) for i, f in entries]

    # --- leases and heartbeats ----------------------------------------------------------------------

    def acquire(self, task: str, role: Literal["trainer", "actor"], slots: int = 1) -> Lease | None:
        """Take the trainer's lease or that of the first free actor slot; `None` where all are held or the task is over.

        A lease is free when nobody has it, or its holder has been silent for `LEASE_MS`.
        """
        keys = [_key(task, part) for part in ("task", "workers")]
        taken = self._run(_ACQUIRE, keys, [role, slots, secrets.token_hex(8), LEASE_MS])
        return Lease(task, role, int(taken[0]), taken[1].decode()) if taken else None

    def release(self, lease: Lease) -> None:
        """Give a lease back at once, so that the next worker need not wait for it to run out."""
        keys = [_key(lease.task, part) for part in ("task", "workers")]
        self._run(_RELEASE, keys, [_lease_field(lease.worker), lease.token, lease.worker])

    # All calls below raise `LeaseLostError` where another worker took over, `TaskOverError` where the task has
    # ended; both mean that nothing was written.

    def beat(self, lease: Lease, status: str) -> Reply:
        """Keep the lease and leave a status (JSON)."""
        return self._fenced(_BEAT, lease, "workers", [lease.worker, status])

    def add_history(self, lease: Lease, row: Mapping[str, Any], evaluation: str = "") -> None:
        """Append a history row, and with it the evaluation (JSON) that the status shows."""
        self._fenced(_ADD_HISTORY, lease, "history", [json.dumps(row), HISTORY_LENGTH, evaluation])

    # --- experience, parameters, checkpoints --------------------------------------------------------

    def send(self, lease: Lease, message: bytes) -> Reply:
        """Add an experience message to the backlog, unless that is full (`Reply.sent`).

        It counts what messages hold, whatever compression saves. An empty backlog takes any message, so that one
        above the limit is not stuck for ever.
        """
        return self._fenced(_SEND, lease, "experience", [message, unpacked_bytes(message)])

    def receive(self, task: str, after: str, count: int, block_ms: int) -> list[tuple[str, bytes]]:
        """Return (id, message) of what came after an id; waits up to `block_ms` for the first.

        Messages stay at the broker until a trainer commits them: another one finds them from id "0" on.
        """
        entries = self._read_stream(_key(task, "experience"), after, count, block_ms)
        return [(entry.decode(), fields[b"d"]) for entry, fields in entries]

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
        keep_from = ""
        if position is not None:
            fields["received_bytes"] = position.received_bytes
            fields |= {f"{_SEQUENCE}{actor}": number for actor, number in position.sequences.items()}
            milliseconds, _, number = position.last.partition("-")
            keep_from = f"{milliseconds}-{int(number or 0) + 1}"
        if parameters is not None:
            fields["version"], fields["parameters"] = parameters
        self._fenced(_COMMIT, lease, "experience", [keep_from, *_flat(fields)])

    def committed(self, task: str) -> Committed:
        """Return where the last commit left the task, for the next trainer to go on from."""
        fields = {name.decode(): value for name, value in self.redis.hgetall(_key(task, "task")).items()}
        if not fields:
            raise LeaseLostError(_gone(task, self.parameters.address))
        sequences = {
            name.removeprefix(_SEQUENCE): int(value) for name, value in fields.items() if name.startswith(_SEQUENCE)
        }
        return Committed(
            progress=json.loads(fields["progress"]),
            position=Position("0", int(fields["received_bytes"]), sequences),
            version=int(fields["version"]),
            backlog_limit_bytes=int(fields["backlog_limit"]),
            elapsed_s=self.elapsed_s(task),
        )

    def store_checkpoint(self, lease: Lease, blob: bytes) -> None:
        """Keep a learner state from which another trainer, or the client, can go on."""
        self._fenced(_STORE_CHECKPOINT, lease, "checkpoint", [blob])

    def _listed(self, key: str, names: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
        """Return the tasks of a list that exist, with some of their fields, and forget those that do not."""
        tasks = [task.decode() for task in self.redis.zrange(key, 0, -1)]
        with self.redis.pipeline(transaction=False) as pipe:
            for task in tasks:
                pipe.hmget(_key(task, "task"), *names)
            found = [(task, _present(names, values)) for task, values in zip(tasks, pipe.execute(), strict=True)]
        gone = [task for task, fields in found if not fields]
        if gone:
            self.redis.zrem(key, *gone)
        return [(task, fields) for task, fields in found if fields]

    def _read_stream(
        self, key: str, after: str, count: int, block_ms: int | None
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        answer = self.redis.xread({key: after}, count=count, block=block_ms)
        entries: list[tuple[bytes, dict[bytes, bytes]]] = answer[0][1] if answer else []
        return entries

    def _fenced(self, script: str, lease: Lease, part: str, arguments: list[Any]) -> Reply:
        keys = [_key(lease.task, "task"), _key(lease.task, part)]
        values = self._run(script, keys, [_lease_field(lease.worker), lease.token, *arguments])
        if not values:
            raise LeaseLostError(f"{lease.worker} was replaced in task {lease.task!r}, or the broker lost that task")
        if len(values) == 1:
            raise TaskOverError(f"task {lease.task!r} is {values[0].decode()}")
        _, train_count, actor_num, version, room, sent = values
        return Reply(int(train_count), int(actor_num), int(version), float(room), bool(sent))

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        registered = self._scripts.get(script)
        if registered is None:
            registered = self._scripts[script] = self.redis.register_script(script)
        return registered(keys=keys, args=arguments)


def check_protocol(task: str, protocol: int) -> None:
    """Raise `ProtocolError` that names both versions where a task was made by another one."""
    if protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"task {task!r} was made with protocol version {protocol}, this SRL speaks version "
            f"{PROTOCOL_VERSION}; run the same SRL version on client, trainer and actors"
        )


def persist(
    call: Callable[[], T], broker: Broker, stop: threading.Event, meanwhile: Callable[[], None] | None = None
) -> T | None:
    """Call until the broker answers, with back-off and one log line each time it goes or comes back.

    Returns `None` when `stop` was set before that. Anything but a lost connection is raised, and what
    `meanwhile`, called before each new try, raises.
    """
    import redis

    delay_s, lost = 0.1, False
    while True:
        try:
            answer = call()
        # While one server takes over from another, the old one answers that it is read-only.
        except (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError) as error:
            if isinstance(error, redis.AuthenticationError):
                raise BrokerError(f"the broker at {broker.parameters.address} refused the log-in: {error}") from error
            if not lost:
                logger.warning("the broker at %s does not answer (%s); trying on", broker.parameters.address, error)
            lost = True
            if stop.wait(delay_s):
                return None
            if meanwhile is not None:
                meanwhile()
            delay_s = min(2 * delay_s, 2.0)
        else:
            if lost:
                logger.info("the broker at %s answers again", broker.parameters.address)
            return answer


def once(call: Callable[[], T], broker: Broker) -> T:
    """Call, with a lost connection as a `BrokerUnreachableError`; for clients that do not wait."""
    import redis

    try:
        return call()
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise BrokerUnreachableError(f"the broker at {broker.parameters.address} does not answer: {error}") from error


def _gone(task: str, address: str) -> str:
    return (
        f"the task {task!r} is not at {address} any more: the broker was restarted without its data, or "
        f"the task ended more than {KEEP_FINISHED_S // 86400} days ago; create it again"
    )


def _key(task: str, part: str) -> str:
    return f"srl:{task}:{part}"


def _lease_field(worker: str) -> str:
    return f"lease:{worker}"


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [item for pair in fields.items() for item in pair]


def _present(names: Sequence[str], values: Sequence[bytes | None]) -> dict[str, str]:
    return {name: value.decode() for name, value in zip(names, values, strict=True) if value is not None}


def _milliseconds(time: tuple[int, int]) -> int:
    return time[0] * 1000 + time[1] // 1000
