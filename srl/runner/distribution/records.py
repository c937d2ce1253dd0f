"""What the broker layer gives and takes: tasks, leases, messages, positions; and errors of those who lost theirs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from srl import __version__
from srl.base.errors import BrokerError
from srl.runner.distribution.wire import PROTOCOL_VERSION


class LeaseLostError(BrokerError):
    """Somebody else holds the lease now, or the broker lost the task; what this worker still does is refused."""


class TaskGoneError(LeaseLostError):
    """The broker does not know the task: it came back without its data. A trainer that lives restores it."""


class ScriptsMissingError(BrokerError):
    """The server does not know the scripts, and this user may not load them: a trainer or client will."""


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
    made_by: str = __version__


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

    @property
    def sender(self) -> str:
        """Name of its messages' sender, never used twice: `actor-0/7:a1b2c3`."""
        return f"{self.worker}/{self.token}"


@dataclass(frozen=True)
class Reply:
    """What the broker tells a worker with every call.

    Attributes:
        train_count: the run's clock. version: of the newest parameters.
        room: bytes of the largest message that the backlog took before this call, unpacked.
        sent: whether a message was taken; a full backlog refuses it.
        rank, actors: the actor's number among those that play now and their number, where it asked; else 0.
        cleared: what the trainer's beat found above all bounds, and cleared: parts of the task's keys.
        ending: whether somebody asked for the run's end, as the trainer's beat is told.
    """

    train_count: int
    version: int
    room: float
    sent: bool
    rank: int
    actors: int
    cleared: tuple[str, ...] = ()
    ending: bool = False


@dataclass(frozen=True)
class Event:
    """An error of a worker, or, without a worker, the state that a task ended in.

    Attributes:
        fatal: whether the worker leaves the task because of it.
    """

    id: str
    worker: str
    message: str
    fatal: bool = False

    @property
    def time_ms(self) -> int:
        """When it was, by the broker's clock."""
        return int(self.id.partition("-")[0])


@dataclass(frozen=True)
class Position:
    """How far a trainer's experience is counted.

    Attributes:
        last: id of the last message.
        received_bytes: of all messages so far, unpacked.
        sequences: newest sequence number by actor, of those that changed.
        forgotten: actors whose number need not be kept any longer.
    """

    last: str
    received_bytes: int
    sequences: Mapping[str, int]
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True)
class Message:
    """An experience message as it lies at the broker.

    Attributes:
        sender: the worker whose call sent it, as far as that can be believed.
    """

    id: str
    data: bytes
    sender: str = ""


@dataclass(frozen=True)
class Refused:
    """A message that a trainer refused; `start` are its first bytes."""

    sender: str
    reason: str
    start: bytes


@dataclass(frozen=True)
class Committed:
    """What a trainer finds at its start: counters, position and parameters' version of the one before it."""

    train_count: int
    progress: dict[str, Any]
    position: Position
    version: int
    backlog_limit_bytes: int
    elapsed_s: float
