"""What can be said of a run at one moment; progress, the command line and the dashboard all show this."""

from typing import Literal

import msgspec

RunState = Literal["waiting", "running", "done", "failed", "cancelled"]
"""waiting: no trainer has taken the task yet; the last three are final."""


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's last heartbeat."""

    worker: str
    heartbeat_age_s: float = 0.0
    updates_per_s: float = 0.0
    steps_received_per_s: float = 0.0
    steps_received: int = 0
    waiting_for: str = ""
    """What the learner waits for, in words ("400 of 1000 warm-up transitions"); empty while it learns."""


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One actor's last heartbeat."""

    worker: str
    slot: int = 0
    heartbeat_age_s: float = 0.0
    env_steps_per_s: float = 0.0
    steps_sent_per_s: float = 0.0
    env_steps: int = 0
    steps_sent: int = 0
    episodes: int = 0
    parameter_version: int = 0
    env_faults: int = 0
    """Envs that raised, hung or died, and were replaced."""
    waiting_for: str = ""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A finished greedy evaluation: raw episode rewards."""

    train_count: int
    episodes: int
    mean_reward: float


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. Counters cover the whole run; `None` means unknown or without limit."""

    task: str
    state: RunState
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    train_count: int = 0
    max_train_count: int | None = None
    env_steps: int = 0
    actor_num: int = 1
    evaluation: Evaluation | None = None
    memory_size: int = 0
    memory_capacity: int = 0
    messages_lost: int = 0
    """Messages of actors that no trainer got, because the broker lost its data."""
    messages_refused: int = 0
    """Messages that the trainer refused, because they are damaged or no play of this task."""
    backlog_bytes: int = 0
    backlog_limit_bytes: int = 0
    parameter_version: int = 0
    """Version the trainer published last; an actor's lag is the difference to its own."""
    trainer: TrainerStatus | None = None
    actors: tuple[ActorStatus, ...] = ()
    error: str | None = None
    """Why a failed run failed, with the worker's traceback."""
    warning: str = ""
    """What goes wrong although the run goes on, such as checkpoints that cannot be written."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ("done", "failed", "cancelled")
