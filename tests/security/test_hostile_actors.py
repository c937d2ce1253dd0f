"""An actor with a password of its own can slow a run but not stop it, nor fill the server's memory.

One run goes on through all of this, on a server with little memory, beside an actor that does nothing wrong.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import toy
from servers import BINARIES, server_with_users, worker
from waiting import until

import srl
from srl.base.segment import End, Segment
from srl.runner.distribution import TaskManager
from srl.runner.distribution.broker import EVENT_LENGTH, QUARANTINED, QUARANTINED_BYTES, Broker
from srl.runner.distribution.records import Refused
from srl.runner.distribution.wire import EvaluationRecord, Experience, encode_experience

pytestmark = pytest.mark.timeout(300)

SERVER_BYTES = 192 * 2**20


@dataclass
class Run:
    manager: TaskManager
    hostile: Any
    admin: Any
    client: Broker

    def key(self, part: str) -> str:
        return f"srl:{self.manager.task}:{part}"

    def goes_on(self, updates: int = 300) -> None:
        """Wait for more updates."""
        seen = self.train_count
        until(lambda: self.train_count >= seen + updates, what="further updates")

    def frees_memory(self) -> None:
        """Wait until the server has less than half of what it may have."""
        until(lambda: self.used_bytes() < SERVER_BYTES / 2, 20, "a server with free memory")

    @property
    def train_count(self) -> int:
        return self.manager.get_status().train_count

    def used_bytes(self) -> int:
        return int(self.admin.info("memory")["used_memory"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("hostile")
    memory = (f"maxmemory {SERVER_BYTES}", "maxmemory-policy noeviction")
    with contextlib.ExitStack() as stack:
        users = stack.enter_context(server_with_users(str(BINARIES["valkey"]), directory, *memory))
        runner = srl.Runner("CartPole-v1", toy.Config(), seed=1)
        manager = runner.train_distribution_start(users["client"], 1, max_train_count=10**9, eval_episodes=0)
        stack.callback(manager.close)
        for role in ("trainer", "actor"):
            log = directory / f"{role}.log"
            stack.enter_context(worker(role, users[role], log, SRL_ALLOW_PLUGINS="toy"))
        client = stack.enter_context(contextlib.closing(Broker(users["client"])))
        hostile, admin = (stack.enter_context(users[name].connect()) for name in ("actor", "admin"))
        made = Run(manager, hostile, admin, client)
        made.goes_on()
        yield made
        made.goes_on()
        status = made.manager.get_status()
        assert (status.state, len(status.actors)) == ("running", 1), (directory / "trainer.log").read_text()
        manager.cancel()


def flood(write: Callable[[], Any], seconds: float, watch: Callable[[], int]) -> int:
    """Write without pause for a while and return the most bytes that the server had."""
    ending_s, most = time.monotonic() + seconds, 0
    while time.monotonic() < ending_s:
        with contextlib.suppress(Exception):  # a full server refuses, and so it should
            write()
        most = max(most, watch())
    return most


def test_a_flood_of_experience(run: Run) -> None:
    refused = run.manager.get_status().messages_refused
    junk = b"x" * 100_000

    def write() -> None:
        with run.hostile.pipeline(transaction=False) as pipe:
            for _ in range(50):
                pipe.xadd(run.key("experience"), {"d": junk})
            pipe.execute()

    most = flood(write, 5.0, run.used_bytes)
    run.goes_on()
    print(f"the server had {most / 2**20:.0f} MB at most, of {SERVER_BYTES / 2**20:.0f}")
    assert most < 1.2 * SERVER_BYTES
    run.frees_memory()
    assert run.manager.get_status().messages_refused > refused
    kept = run.manager.refused_messages()
    assert 0 < len(kept) <= QUARANTINED and all(len(each.start) <= QUARANTINED_BYTES for each in kept)


def test_floods_of_everything_else_it_may_write(run: Run) -> None:
    number = iter(range(10**9))
    text = "x" * 10_000

    def names(key: str) -> Callable[[], None]:
        def write() -> None:
            run.hostile.hset(run.key(key), mapping={f"actor-{next(number)}": f"1 {text}" for _ in range(500)})

        return write

    def errors() -> None:
        with run.hostile.pipeline(transaction=False) as pipe:
            for _ in range(500):
                pipe.xadd(run.key("events"), {"worker": "actor-9", "message": text})
            pipe.execute()

    for write in (names("workers"), names("actors"), errors):
        most = flood(write, 3.0, run.used_bytes)
        assert most < 1.2 * SERVER_BYTES
        run.goes_on()
        run.frees_memory()
    assert len(run.client.events(run.manager.task)) <= EVENT_LENGTH
    told = [event.message for event in run.client.events(run.manager.task) if event.worker == "trainer"]
    assert any("more than they may" in message for message in told)


def play(**changes: Any) -> Segment:
    steps = 8
    segment = Segment(
        frames=np.zeros((steps + 1, 4), np.float32),
        actions=np.zeros(steps, np.int32),
        rewards=np.ones(steps, np.float32),
        end=End.TERMINATED,
        context=0,
        lane=0,
        sequence=0,
        version=1,
    )
    return dataclasses.replace(segment, **changes)


NAN, INF = float("nan"), float("inf")
SENDER = "actor-9/1:ab"
WHOLE = {field.name for field in dataclasses.fields(Experience)}


def wrong(**changes: Any) -> Experience:
    """Return a message of one segment in which something is wrong."""
    whole = {name: changes.pop(name) for name in WHOLE & changes.keys()}
    return Experience(**{"actor": SENDER, "sequence": 0, "segments": [play(**changes)], "env_steps": 8, **whole})


LONG = {"frames": np.zeros((999, 4), np.float32), "actions": np.zeros(998, np.int32), "rewards": np.zeros(998, "f4")}
LIES: dict[str, tuple[Experience, str]] = {
    "a reward that is nan": (wrong(rewards=np.full(8, NAN, np.float32)), "reward"),
    "a reward that is inf": (wrong(rewards=np.full(8, INF, np.float32)), "reward"),
    "a frame that is nan": (wrong(frames=np.full((9, 4), NAN, np.float32)), "observation"),
    "too few priorities": (wrong(priorities=np.ones(3, np.float32)), "lengths"),
    "frames of another env": (wrong(frames=np.zeros((9, 5), np.float32)), "frames of"),
    "frames of another dtype": (wrong(frames=np.zeros((9, 4), np.int8)), "frames of"),
    "actions of another env": (wrong(actions=np.zeros((8, 2), np.int32)), "actions"),
    "actions of another dtype": (wrong(actions=np.zeros(8, np.float32)), "actions"),
    "an action that is none": (wrong(actions=np.full(8, 2, np.int32)), "action"),
    "a negative action": (wrong(actions=np.full(8, -1, np.int32)), "action"),
    "unknown extras": (wrong(extras={"x": np.zeros(8)}), "extras"),
    "too long a segment": (wrong(**LONG, env_steps=998), "999 frames"),
    "steps it did not play": (wrong(env_steps=2**62), "env steps"),
    "the last number of all": (wrong(sequence=2**63 - 1), "number 9223372036854775807"),
    "a name of its own": (wrong(actor="trainer"), "calls itself 'trainer'"),
    "a long name": (wrong(actor="actor-9/1:" + "a" * 200), "calls itself"),
    "an infinite episode": (wrong(episode_rewards=[INF], episode_lengths=[8]), "not finite"),
    "episodes without end": (wrong(episode_rewards=[1.0] * 60_000, episode_lengths=[1] * 60_000), "60000 episodes"),
    "a nan evaluation": (wrong(evaluations=[EvaluationRecord(1, 1, NAN, 0.0)]), "not finite"),
}


def test_lies_in_messages(run: Run) -> None:
    run.goes_on()
    before = run.manager.get_status()
    for experience, _ in LIES.values():
        run.hostile.xadd(run.key("experience"), {"d": encode_experience(experience), "w": "actor-9"})
    refused_then = before.messages_refused + len(LIES)
    until(lambda: run.manager.get_status().messages_refused >= refused_then, what="the refusal of all lies")

    def of_the_liar() -> list[Refused]:
        kept = [each for each in run.manager.refused_messages() if each.sender == "actor-9"]
        return kept if len(kept) == len(LIES) else []

    kept = until(of_the_liar, what="the quarantine of all lies")
    for (name, (_, says)), refused in zip(LIES.items(), kept, strict=True):
        assert says in refused.reason, name
    run.goes_on()
    status = run.manager.get_status()
    assert status.messages_lost == before.messages_lost
    assert status.env_steps < before.env_steps + 10**8
    told = [event.message for event in run.client.events(run.manager.task)]
    assert any("of actor-9" in message for message in told)


def test_a_version_that_was_never_published_harms_nothing(run: Run) -> None:
    for number, version in enumerate((2**63 - 1, -1)):
        experience = Experience("actor-8/1:cd", number, [play(version=version)], 8)
        run.hostile.xadd(run.key("experience"), {"d": encode_experience(experience), "w": "actor-8"})
    run.goes_on()
    assert all(abs(row.get("version_lag", 0)) < 10**6 for row in run.client.history(run.manager.task))


def test_a_backlog_that_it_says_is_full(run: Run) -> None:
    for value in (10**17, -(10**17), "nonsense"):
        run.hostile.hset(run.key("actors"), "sent_bytes", value)
        run.goes_on()


def test_other_actors_places(run: Run) -> None:
    run.hostile.hset(run.key("actors"), mapping={"lease:actor-0": "9:stolen", "slots": 10**15})
    run.hostile.hset(run.key("workers"), "actor-0", "not a time")
    run.goes_on()


def test_an_error_that_would_end_the_run(run: Run) -> None:
    for worker_name in ("actor-9", "trainer", ""):
        fields = {"worker": worker_name, "message": "the end", "fatal": "1"}
        run.hostile.xadd(run.key("events"), fields)
    run.goes_on(1_000)
    assert run.manager.get_status().state == "running"


def test_the_lies_would_be_play_without_what_is_wrong_with_them(run: Run) -> None:
    """The cases above would prove nothing if their messages were refused for another reason."""
    refused = run.manager.get_status().messages_refused
    good = Experience("actor-7/1:ef", 0, [play(), play()], 16, [8.0], [8], [EvaluationRecord(1, 1, 8.0, 1.0)])
    run.hostile.xadd(run.key("experience"), {"d": encode_experience(good), "w": "actor-7"})
    until(lambda: run.client.redis.hget(run.key("task"), "sequence:actor-7/1:ef"), what="the insertion")
    run.goes_on()
    assert run.manager.get_status().messages_refused == refused

    def is_in_history() -> bool:
        rows = run.client.history(run.manager.task)
        return any(row.get("eval_reward0") == 8.0 and row["worker"] == "actor-7" for row in rows)

    until(is_in_history, what="the evaluation in the history")
