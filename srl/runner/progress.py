"""What a waiting user sees of a run: log lines, or a live table on a terminal.

Whoever watches a run (in-process training, a task manager, `srl status`) owns a `Progress` and hands it each
`RunStatus`; `log_lines` serves those who want the words alone.
"""

import logging
import math
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

from srl.runner.status import ActorStatus, Bill, RunStatus, TrainerStatus

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

LOG_INTERVAL_S = (1.0, 60.0)
"""First and longest pause between log lines; each is twice the one before, as runs can last days."""
LIVE_INTERVAL_S = 0.5
SILENT_AFTER_S = 10.0

logger = logging.getLogger("srl")


class Progress:
    """Shows a run's progress while it is entered; `update` may be called as often as one likes.

    Without a terminal it logs to the logger "srl" at INFO (`srl.utils.common.logger_print` shows that).
    """

    def __init__(
        self,
        live: bool | None = None,
        interval_s: float | None = None,
        address: str | None = "",
        *,
        enabled: bool = True,
        console: "Console | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to show a run.

        Args:
            live: table instead of log lines; by default where standard error is a terminal.
            interval_s: longest time between two log lines (60), or time between two tables (0.5).
            address: the broker's URL, for the hints that say how to start workers; passwords are hidden.
            enabled: `False` shows nothing at all.
            console: where the table goes instead of standard error. clock: seconds, for tests.
        """
        self._enabled = enabled
        self._wants_live = enabled and (sys.stderr.isatty() if live is None else live)
        self._longest_s = interval_s or (LIVE_INTERVAL_S if self._wants_live else LOG_INTERVAL_S[1])
        self._pause_s = self._longest_s if self._wants_live else min(LOG_INTERVAL_S[0], self._longest_s)
        self._address = address
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._next_s = -math.inf
        self._last: RunStatus | None = None

    def __enter__(self) -> Self:
        if self._wants_live:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=self._console or Console(stderr=True), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        last, live = self._last, self._live
        if live is not None:
            if last is not None:
                live.update(live_table(last, self._address), refresh=True)
            live.stop()
            self._live = None
        if last is not None and self._enabled:
            logger.info(final_line(last))

    def update(self, status: RunStatus) -> None:
        """Take the run's newest status; it is shown when the time has come or the run's state changed."""
        now_s = self._clock()
        changed = self._last is None or self._last.state != status.state
        self._last = status
        if not self._enabled or (now_s < self._next_s and not changed):
            return
        self._next_s = now_s + self._pause_s
        if self._live is not None:
            self._live.update(live_table(status, self._address), refresh=True)
            return
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        for line in log_lines(status, self._address):
            logger.info(line)


def log_lines(status: RunStatus, address: str | None = "") -> list[str]:
    """Return a line for the run and, indented below, one for each worker or missing worker.

    Args:
        address: the broker's URL for the hints, `None` where the workers are being started for the user.
    """
    lines = [" | ".join([f"{status.task}: {status.state}", *_run_facts(status)])]
    if status.trainer is not None:
        lines.append(" | ".join([f"  trainer {status.trainer.worker}", *_trainer_facts(status, status.trainer)]))
    lines += [
        " | ".join([f"  actor {actor.slot} {actor.worker}", *_actor_facts(status, actor)]) for actor in status.actors
    ]
    lines += [f"  {status.warning}"] * bool(status.warning)
    return lines + [f"  {hint}" for hint in _hints(status, address)]


def final_line(status: RunStatus) -> str:
    """Return how a run ended, or where it stood when the watching ended."""
    state = status.state if status.finished else f"no longer watched ({status.state})"
    facts = [
        f"{status.task}: {state} after {duration(status.elapsed_s)}",
        f"train {status.train_count:,}",
        f"env steps {status.env_steps:,}",
        evaluation_text(status),
    ]
    if status.error:
        # The traceback reaches the caller as an exception; its last line says what happened.
        facts.append(status.error.strip().splitlines()[-1])
    return " | ".join(facts)


def live_table(status: RunStatus, address: str | None = "") -> "Group":
    """Return the same as `log_lines` for a terminal, as a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    colors = {"waiting": "yellow", "running": "cyan", "done": "green", "failed": "red", "cancelled": "magenta"}
    head = Text.assemble(
        (f"{datetime.now():%H:%M:%S}  ", "dim"),
        (status.task, "bold"),
        "  ",
        (status.state, f"bold {colors[status.state]}"),
    )
    facts = Text("  ".join(_run_facts(status)))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for name in ("worker", "heartbeat", "rate", "received / sent", "lag", ""):
        table.add_column(name, no_wrap=name != "", justify="right" if name == "lag" else "left")
    if status.trainer is not None:
        age, updates, received, waiting = _trainer_facts(status, status.trainer)
        table.add_row(Text(f"trainer {status.trainer.worker}"), _age_text(age), updates, received, "", Text(waiting))
    for actor in status.actors:
        age, steps, sent, lag, episodes, waiting = _actor_facts(status, actor)
        note = "  ".join(filter(None, [episodes, waiting]))
        lag = lag.removeprefix("lag ")
        table.add_row(Text(f"actor {actor.slot} {actor.worker}"), _age_text(age), steps, sent, lag, Text(note))
    hints = [Text(status.warning, "bold red")] * bool(status.warning)
    hints += [Text(hint, "yellow") for hint in _hints(status, address)]
    workers = [table] if table.row_count else []
    return Group(head, facts, *workers, *hints)


def evaluation_text(status: RunStatus) -> str:
    """Return the last evaluation, or in words why there is none; never NaN."""
    evaluation = status.evaluation
    if evaluation is not None and evaluation.episodes and math.isfinite(evaluation.mean_reward):
        episodes = f"{evaluation.episodes} episode{'s' * (evaluation.episodes != 1)}"
        return f"eval {evaluation.mean_reward:,.5g} ({episodes} at train {evaluation.train_count:,})"
    if evaluation is None and any(actor.episodes for actor in status.actors):
        return "no evaluation yet"
    return f"no finished episode yet ({status.env_steps:,} steps)"


def bill_text(bill: Bill, status: RunStatus | None = None) -> str:
    """Return what workers have cost, what they may, and what it will be when a run ends."""
    most = "" if bill.max_usd is None else f" of {bill.max_usd:.2f}"
    hours = f"{bill.hours:.1f}" + ("" if bill.max_hours is None else f" of {bill.max_hours:g}")
    forecast = None if status is None or status.finished else bill.forecast_usd(status.remaining_s)
    then = "" if forecast is None else f", forecast {forecast:.2f} USD"
    return f"{bill.usd:.2f}{most} USD in {hours} hours{then}"


def duration(seconds: float) -> str:
    """Return `45s`, `1m23s`, `2h05m` or `3d04h`."""
    if not math.isfinite(seconds):
        return "unknown"
    total = max(0, round(seconds))
    minutes, second = divmod(total, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    if hours:
        return f"{hours}h{minute:02}m"
    return f"{minutes}m{second:02}s" if minutes else f"{second}s"


def _run_facts(status: RunStatus) -> list[str]:
    left = "" if status.remaining_s is None or status.finished else f", left {duration(status.remaining_s)}"
    train = f"train {status.train_count:,}"
    if status.max_train_count:
        # Rounded down: 100% is said of a run only when it is there.
        train += f"/{status.max_train_count:,} ({100 * status.train_count // status.max_train_count}%)"
    memory = f"memory {status.memory_size:,}"
    if status.memory_capacity:
        memory += f"/{status.memory_capacity:,}"
    backlog = f"backlog {_bytes(status.backlog_bytes)}"
    if status.backlog_limit_bytes:
        backlog += f"/{_bytes(status.backlog_limit_bytes)}"
    facts = [f"elapsed {duration(status.elapsed_s)}{left}", train, evaluation_text(status), memory, backlog]
    if status.bill is not None:
        facts.append(f"cost {bill_text(status.bill, status)}")
    if status.messages_refused:
        facts.append(f"{status.messages_refused:,} message{'s' * (status.messages_refused != 1)} refused")
    if status.messages_lost:
        facts.append(f"{status.messages_lost:,} message{'s' * (status.messages_lost != 1)} lost with the broker")
    return facts


def _trainer_facts(status: RunStatus, trainer: TrainerStatus) -> tuple[str, str, str, str]:
    facts = (
        _age(trainer.heartbeat_age_s),
        f"{_rate(trainer.updates_per_s, 'updates')} ({status.train_count:,})",
        f"{_rate(trainer.steps_received_per_s, 'steps received')} ({trainer.steps_received:,})",
    )
    return *facts, f"waiting: {trainer.waiting_for}" if trainer.waiting_for else "learning"


def _actor_facts(status: RunStatus, actor: ActorStatus) -> tuple[str, str, str, str, str, str]:
    faults = f", {actor.env_faults:,} env fault{'s' * (actor.env_faults != 1)}" if actor.env_faults else ""
    facts = (
        _age(actor.heartbeat_age_s),
        f"{_rate(actor.env_steps_per_s, 'env steps')} ({actor.env_steps:,})",
        f"{_rate(actor.steps_sent_per_s, 'steps sent')} ({actor.steps_sent:,})",
        f"lag {max(0, status.parameter_version - actor.parameter_version):,}",
        f"{actor.episodes:,} episode{'s' * (actor.episodes != 1)}{faults}",
    )
    return *facts, f"waiting: {actor.waiting_for}" if actor.waiting_for else "playing"


def _hints(status: RunStatus, address: str | None) -> list[str]:
    """Say which workers a run lacks and how to start them."""
    missing = status.actor_num - len(status.actors)
    if status.finished:
        return []
    if address is None:
        starting = ["trainer"] * (status.trainer is None) + [f"{missing} of {status.actor_num} actors"] * (missing > 0)
        return [f"starting: {', '.join(starting)}"] if starting else []
    option = f" --redis-url {_hide_password(address)}" if address else ""
    hints = []
    if status.trainer is None:
        hints.append(f"no trainer has joined yet; start one with: srl trainer{option}")
    if not status.actors:
        hints.append(f"no actor has joined yet; start one with: srl actor{option}")
    elif missing > 0:
        hints.append(f"{len(status.actors)} of {status.actor_num} actors joined; start more with: srl actor{option}")
    return hints


def _hide_password(url: str) -> str:
    """Return a broker URL as it may be printed."""
    return re.sub(r"://([^:@/]*):.*@", r"://\1:***@", url)


def _age(seconds: float) -> str:
    return f"silent for {duration(seconds)}" if seconds > SILENT_AFTER_S else f"heartbeat {duration(seconds)} ago"


def _age_text(age: str) -> "Text":
    from rich.text import Text

    return Text(age, "bold red") if age.startswith("silent") else Text(age.removeprefix("heartbeat "))


def _rate(per_second: float, what: str) -> str:
    """Return `0.5 updates/s`, `120 updates/s`, `1.2k updates/s` or `3.4M updates/s`."""
    if not math.isfinite(per_second):
        return f"- {what}/s"
    for scale, unit in [(1e6, "M"), (1e3, "k")]:
        if per_second >= scale:
            return f"{per_second / scale:.1f}{unit} {what}/s"
    return f"{per_second:.{1 if 0 < per_second < 10 else 0}f} {what}/s"


def _bytes(count: int) -> str:
    for scale, unit in [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]:
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
