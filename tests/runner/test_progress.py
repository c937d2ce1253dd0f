"""What a waiting user reads: complete, plain, and never NaN."""

import io
import logging
import math
import re

import pytest
from rich.console import Console

from srl.runner.progress import Progress, duration, evaluation_text, final_line, live_table, log_lines
from srl.runner.status import ActorStatus, Bill, Evaluation, RunStatus, TrainerStatus

TRAINER = TrainerStatus(
    worker="t-1", heartbeat_age_s=1, updates_per_s=1234, steps_received_per_s=56.7, steps_received=98_765
)
ACTOR = ActorStatus(
    worker="a-1",
    slot=3,
    heartbeat_age_s=2,
    env_steps_per_s=850,
    steps_sent_per_s=0.5,
    env_steps=12_345,
    steps_sent=12_000,
    episodes=61,
    parameter_version=40,
)
RUNNING = RunStatus(
    task="pendulum",
    state="running",
    elapsed_s=83,
    remaining_s=7500,
    train_count=20_000,
    max_train_count=100_000,
    env_steps=12_345,
    evaluation=Evaluation(train_count=18_000, episodes=10, mean_reward=-151.25),
    memory_size=12_000,
    memory_capacity=100_000,
    backlog_bytes=3 << 19,
    backlog_limit_bytes=64 << 20,
    parameter_version=43,
    trainer=TRAINER,
    actors=(ACTOR,),
)
ADDRESS = "redis://:s3cret@broker:6379/0"


def changed(status: RunStatus = RUNNING, **fields) -> RunStatus:
    return RunStatus(**{name: getattr(status, name) for name in status.__struct_fields__} | fields)


def rendered(status: RunStatus, address: str = "") -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(live_table(status, address))
    return console.file.getvalue()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_log_lines_say_everything_the_run_and_its_workers_report() -> None:
    assert log_lines(RUNNING) == [
        "pendulum: running | elapsed 1m23s, left 2h05m | train 20,000/100,000 (20%) | "
        "eval -151.25 (10 episodes at train 18,000) | memory 12,000/100,000 | backlog 1.5 MiB/64.0 MiB",
        "  trainer t-1 | heartbeat 1s ago | 1.2k updates/s (20,000) | 57 steps received/s (98,765) | learning",
        "  actor 3 a-1 | heartbeat 2s ago | 850 env steps/s (12,345) | 0.5 steps sent/s (12,000) | lag 3 | "
        "61 episodes | playing",
    ]


@pytest.mark.parametrize("show", [rendered, lambda status, address="": "\n".join(log_lines(status, address))])
def test_missing_and_silent_workers_are_said_plainly(show) -> None:
    text = show(changed(state="waiting", trainer=None, actors=()), ADDRESS)
    assert "no trainer has joined yet; start one with: srl trainer --redis-url redis://:***@broker:6379/0" in text
    assert "no actor has joined yet; start one with: srl actor --redis-url redis://:***@broker:6379/0" in text
    assert "s3cret" not in text
    silent = changed(
        trainer=TrainerStatus(worker="t-1", heartbeat_age_s=95, waiting_for="[400] of 1000 warm-up transitions"),
        actor_num=4,
    )
    text = show(silent)
    assert "silent for 1m35s" in text
    assert "waiting: [400] of 1000 warm-up transitions" in text
    assert "1 of 4 actors joined; start more with: srl actor" in text


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_a_finished_run_asks_for_no_workers(state) -> None:
    assert len(log_lines(changed(state=state, trainer=None, actors=()), ADDRESS)) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"evaluation": None, "actors": ()}, "no finished episode yet (12,345 steps)"),
        ({"evaluation": None, "actors": (ActorStatus(worker="a"),)}, "no finished episode yet (12,345 steps)"),
        ({"evaluation": None}, "no evaluation yet"),
        ({"evaluation": Evaluation(train_count=1, episodes=0, mean_reward=math.nan)}, "no finished episode yet"),
        ({"evaluation": Evaluation(train_count=1, episodes=1, mean_reward=2.0)}, "eval 2 (1 episode at train 1)"),
    ],
)
def test_evaluation_is_a_number_or_words(fields, text: str) -> None:
    assert evaluation_text(changed(**fields)).startswith(text)


def test_faults_of_envs_are_shown_where_there_were_any() -> None:
    faulty = ActorStatus(worker="a", episodes=2, env_faults=1), ActorStatus(worker="b", env_faults=1200)
    lines = log_lines(changed(actors=faulty), ADDRESS)
    assert "| 2 episodes, 1 env fault |" in lines[2] and "| 0 episodes, 1,200 env faults |" in lines[3]
    assert "2 episodes, 1 env fault" in rendered(changed(actors=faulty))
    assert "fault" not in str(log_lines(RUNNING, ADDRESS))


def test_lost_messages_are_shown_where_there_were_any() -> None:
    assert "1 message lost with the broker" in log_lines(changed(messages_lost=1), ADDRESS)[0]
    assert "1,234 messages lost" in log_lines(changed(messages_lost=1234), ADDRESS)[0]
    assert "lost" not in str(log_lines(RUNNING, ADDRESS))


def test_nothing_ever_prints_nan() -> None:
    nan = math.nan
    status = changed(
        elapsed_s=nan,
        remaining_s=math.inf,
        evaluation=Evaluation(train_count=1, episodes=3, mean_reward=nan),
        trainer=TrainerStatus(worker="t", heartbeat_age_s=nan, updates_per_s=nan, steps_received_per_s=math.inf),
        actors=(ActorStatus(worker="c", env_steps_per_s=nan, steps_sent_per_s=nan),),
    )
    for text in [*log_lines(status), rendered(status), final_line(status)]:
        assert not re.search(r"\b(nan|inf)\b", text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (83, "1m23s"), (7500, "2h05m"), (273_600, "3d04h"), (-1, "0s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_hundred_percent_is_said_only_at_the_end() -> None:
    assert "(99%)" in log_lines(changed(train_count=99_999))[0]


def test_final_line_tells_how_it_ended() -> None:
    assert final_line(changed(state="done", train_count=100_000)) == (
        "pendulum: done after 1m23s | train 100,000 | env steps 12,345 | eval -151.25 (10 episodes at train 18,000)"
    )
    error = "Traceback (most recent call last):\n  ...\nValueError: reset hangs\n"
    assert final_line(changed(state="failed", error=error)).endswith("| ValueError: reset hangs")
    assert "no longer watched (running)" in final_line(RUNNING)


def test_log_pauses_grow_to_the_longest(caplog: pytest.LogCaptureFixture) -> None:
    clock, shown_s = Clock(), []
    caplog.set_level(logging.INFO, "srl")
    with Progress(live=False, clock=clock) as progress:
        for second in range(301):
            clock.now_s = 100.0 + second
            progress.update(RUNNING)
            if caplog.records:
                shown_s.append(second)
                assert len(caplog.records) == 3
                caplog.clear()
    assert shown_s == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert [record.getMessage() for record in caplog.records] == [final_line(RUNNING)]


def test_a_new_state_is_shown_at_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    caplog.set_level(logging.INFO, "srl")
    with Progress(live=False, clock=clock) as progress:
        progress.update(changed(state="waiting"))
        caplog.clear()
        progress.update(RUNNING)
        assert "pendulum: running" in caplog.messages[0]
        caplog.clear()
        progress.update(RUNNING)
        assert caplog.messages == []


def test_interval_limits_the_pause(caplog: pytest.LogCaptureFixture) -> None:
    clock, shown = Clock(), 0
    caplog.set_level(logging.INFO, "srl")
    with Progress(live=False, interval_s=0.5, clock=clock) as progress:
        for _ in range(5):
            progress.update(RUNNING)
            clock.now_s += 0.5
    shown = sum("running | elapsed" in message for message in caplog.messages)
    assert shown == 5


def test_live_table_ends_with_the_newest_status(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    caplog.set_level(logging.INFO, "srl")
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    with Progress(live=True, console=console, clock=clock) as progress:
        progress.update(RUNNING)
        first = console.file.getvalue()
        assert "trainer t-1" in first and "actor 3 a-1" in first
        progress.update(changed(train_count=20_001))
        assert console.file.getvalue() == first
        clock.now_s += 1
        progress.update(changed(train_count=20_002))
        assert "train 20,002/" in console.file.getvalue()
        progress.update(changed(train_count=20_003))
    assert "train 20,003/" in console.file.getvalue()
    assert "20,001" not in console.file.getvalue()
    assert caplog.messages == [final_line(changed(train_count=20_003))]


@pytest.mark.parametrize("live", [False, True])
def test_without_a_status_or_disabled_it_is_silent(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], live: bool
) -> None:
    caplog.set_level(logging.INFO, "srl")
    with Progress(live=False):
        pass
    with Progress(live=live, enabled=False) as progress:
        progress.update(RUNNING)
    assert capsys.readouterr() == ("", "")
    assert caplog.messages == []


@pytest.mark.parametrize("show", [rendered, lambda status, address="": "\n".join(log_lines(status, address))])
def test_workers_that_are_started_for_the_user_are_starting_not_missing(show) -> None:
    text = show(changed(state="waiting", trainer=None, actors=(), actor_num=2), None)
    assert "starting: trainer, 2 of 2 actors" in text
    assert "srl trainer" not in text


@pytest.mark.parametrize(
    ("limits", "remaining_s", "says"),
    [
        ({}, 3600, "cost 1.00 USD in 2.0 hours, forecast 1.50 USD"),
        ({}, None, "cost 1.00 USD in 2.0 hours"),
        ({"max_usd": 5.0}, 3600, "cost 1.00 of 5.00 USD in 2.0 hours, forecast 1.50 USD"),
        ({"max_usd": 1.25}, 3600, "cost 1.00 of 1.25 USD in 2.0 hours, forecast 1.25 USD"),
        ({"max_usd": 5.0}, None, "cost 1.00 of 5.00 USD in 2.0 hours"),
        ({"max_hours": 2.5}, 3600, "cost 1.00 USD in 2.0 of 2.5 hours, forecast 1.25 USD"),
        ({"max_hours": 1.0}, None, "cost 1.00 USD in 2.0 of 1 hours, forecast 1.00 USD"),
    ],
)
def test_what_a_run_costs_is_told_with_what_it_will_cost(
    limits: dict[str, float], remaining_s: float | None, says: str
) -> None:
    bill = Bill(hours=2.0, usd=1.0, usd_per_hour=0.5, **limits)
    status = changed(bill=bill, remaining_s=remaining_s)
    assert log_lines(status, ADDRESS)[0].endswith(f" | {says}") and says in " ".join(rendered(status).split())
