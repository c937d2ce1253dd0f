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


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers at a broker have cost, estimated from prices by the hour, and what they may."""

    hours: float
    """That there have been workers."""
    usd: float
    usd_per_hour: float
    """Of the workers that there are now."""
    max_hours: float | None = None
    max_usd: float | None = None

    @property
    def spent(self) -> str:
        """Which budget is spent, in words; empty while none is."""
        if self.max_usd is not None and self.usd >= self.max_usd:
            return f"the budget of {self.max_usd:.2f} USD is spent ({self.usd:.2f} USD in {self.hours:.1f} hours)"
        if self.max_hours is not None and self.hours >= self.max_hours:
            return f"the budget of {self.max_hours:g} hours is spent ({self.hours:.1f} hours, {self.usd:.2f} USD)"
        return ""

    def forecast_usd(self, remaining_s: float | None) -> float | None:
        """Return what it will have cost when a run ends, or `None` where nothing says when; a budget ends it too."""
        hours_left = [] if remaining_s is None else [remaining_s / 3600]
        if self.max_hours is not None:
            hours_left.append(max(0.0, self.max_hours - self.hours))
        if not hours_left:
            return None
        forecast = self.usd + min(hours_left) * self.usd_per_hour
        return forecast if self.max_usd is None else min(forecast, max(self.usd, self.max_usd))


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
    bill: Bill | None = None
    """What the workers cost, where somebody counts."""
    error: str | None = None
    """Why a failed run failed, with the worker's traceback."""
    warning: str = ""
    """What goes wrong although the run goes on, such as checkpoints that cannot be written."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ("done", "failed", "cancelled")
