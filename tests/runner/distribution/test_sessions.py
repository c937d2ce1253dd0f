"""Trainers and actors as threads of the test, over a real broker."""

import contextlib
import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
import toy
from counted_env import Counted, Unchanged, make_counted, unchanged
from envs import ShortLives
from waiting import until

import srl
from srl.algorithms import dqn
from srl.base.env import EnvConfig, as_seeds
from srl.base.errors import BrokerError, BrokerUnreachableError, ProtocolError, WorkerError
from srl.base.segment import End, Segment
from srl.base.settings import Settings
from srl.runner.distribution import (
    RedisParameters,
    TaskManager,
    actor_link,
    actor_run_forever,
    actor_server,
    outages,
    servers,
    task_manager,
    trainer_run_forever,
    trainer_server,
    trainer_session,
)
from srl.runner.distribution import (
    broker as broker_module,
)
from srl.runner.distribution.broker import Broker
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.distribution.keeper import TaskKeeper
from srl.runner.distribution.records import Lease, Position, TaskDefinition, TaskGoneError
from srl.runner.distribution.wire import PROTOCOL_VERSION, Experience, decode_experience, encode_experience, encode_tree
from srl.runner.plugins import config_from_dict, load_plugins
from srl.runner.run_config import RunConfig
from srl.runner.status import Bill

WORKERS = {"trainer": trainer_run_forever, "actor": actor_run_forever}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as running:
        yield running


@pytest.fixture
def broker(server: EmbeddedBroker) -> Iterator[Broker]:
    made = Broker(server.parameters)
    made.redis.flushall()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests stays as it is, and idle workers look around often."""
    monkeypatch.setattr(servers, "configure_actor_process", lambda: None)
    monkeypatch.setattr(servers, "IDLE_S", 0.02)
    monkeypatch.setattr(trainer_session, "BEAT_S", 0.1)
    monkeypatch.setattr(actor_link, "BEAT_S", 0.1)


@contextlib.contextmanager
def working(parameters: RedisParameters, *roles: str | Callable[..., None]) -> Iterator[threading.Event]:
    """Run workers while the block is entered; the event stops them before."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run(role: str | Callable[..., None]) -> None:
        try:
            (WORKERS[role] if isinstance(role, str) else role)(parameters, None, stop=stop)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(role,), name=str(role)) for role in roles]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def make_runner(**kwargs: Any) -> srl.Runner:
    return srl.Runner(EnvConfig("test/Counted-v0", kwargs=kwargs), toy.Config(), seed=1)


def start(
    parameters: RedisParameters, runner: srl.Runner | None = None, actor_num: int = 1, **limits: Any
) -> TaskManager:
    limits = limits or {"timeout": 60}
    manager: TaskManager = (runner or make_runner()).train_distribution_start(
        parameters, actor_num, **{"num_envs": 4, "eval_episodes": 0, **limits}
    )
    return manager


def acquire(broker: Broker, task: str, role: Any) -> Lease:
    lease = until(lambda: broker.acquire(task, role, 2))
    assert isinstance(lease, Lease)
    return lease


def publish(broker: Broker, trainer: Lease, version: int, value: float = 0.0) -> None:
    tree = {"weights": np.full((2, 2), value, np.float32), "bias": np.zeros(2, np.float32)}
    blob = encode_tree(tree, {"train_count": version})
    broker.commit(trainer, train_count=version, progress={}, parameters=(version, blob))


def receive(broker: Broker, task: str, after: str = "0") -> list[tuple[str, bytes]]:
    return [(each.id, each.data) for each in broker.receive(task, after, 100, 10)]


def message(actor: Lease, sequence: int, steps: int = 8) -> bytes:
    segment = Segment(
        frames=np.zeros((steps + 1, 2), np.float32),
        actions=np.zeros(steps, np.int32),
        rewards=np.ones(steps, np.float32),
        end=End.TRUNCATED,
        context=0,
        lane=0,
        sequence=sequence,
        version=1,
    )
    return encode_experience(Experience(actor.sender, sequence, [segment], steps, [float(steps)], [steps]))


def env_steps(manager: TaskManager) -> int:
    return manager.get_status().env_steps


# --- whole runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("actors", [1, 4, 16])
@pytest.mark.parametrize("ratio", [0.5, 8.0])
def test_the_learner_keeps_the_asked_ratio(server: EmbeddedBroker, broker: Broker, actors: int, ratio: float) -> None:
    runner = make_runner()
    runner.config.samples_per_insert, runner.config.memory.capacity = ratio, 100_000
    updates = 4_000 if ratio > 1 else 600
    manager = start(server.parameters, runner, actors, max_train_count=updates)
    with working(server.parameters, "trainer", *["actor"] * actors):
        status = manager.train_wait(progress=False, timeout=60)
    assert (status.state, status.train_count) == ("done", updates)
    since_warm_up = status.memory_size - runner.config.memory.warmup_size
    assert updates * runner.config.batch_size / since_warm_up == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize(("algorithm", "actors"), [("toy", 1), ("toy", 3), ("dqn", 2)])
def test_a_run_in_lockstep_gives_the_same_result_twice(
    server: EmbeddedBroker, broker: Broker, algorithm: str, actors: int
) -> None:
    learned = []
    for early in (0, 1):
        runner = make_runner()
        if algorithm == "dqn":
            config = dqn.Config()
            config.hidden_block.set_mlp((8,))
            config.memory.set_proportional_memory()
            config.memory.warmup_size = 100
            runner = srl.Runner("CartPole-v1", config, seed=3)
        manager = start(server.parameters, runner, actors, max_train_count=333, lockstep=True, eval_episodes=2)
        # Who comes when, and how fast it plays, must not matter.
        with contextlib.ExitStack() as stack:
            for role in [*["actor"] * early, "trainer", *["actor"] * (actors - early)]:
                stack.enter_context(working(server.parameters, role))
            status = manager.train_wait(progress=False, timeout=60)
        assert (status.state, status.train_count) == ("done", 333)
        manager.load_into(runner)
        learned.append((status.env_steps, status.memory_size, runner.parameters))
    assert learned[0][:2] == learned[1][:2]
    jax.tree.map(np.testing.assert_array_equal, learned[0][2], learned[1][2])


def test_a_run_in_lockstep_survives_its_workers_and_its_broker(tmp_path: Path) -> None:
    with EmbeddedBroker() as own:
        manager = start(own.parameters, None, 2, max_train_count=2_000, lockstep=True)
        with working(own.parameters, "trainer", "actor"):
            with working(own.parameters, "actor"):
                until(lambda: env_steps(manager) > 500)
            seen = env_steps(manager)  # the other actor waits for it
            with working(own.parameters, "actor"):
                until(lambda: env_steps(manager) > seen + 500)
                own.stop()
                own.start()
                until(lambda: Broker(own.parameters).tasks() == [manager.task])
                assert manager.train_wait(progress=False, timeout=60).train_count == 2_000


@pytest.mark.parametrize("first", ["client", "workers"])
def test_a_run_ends_at_exactly_the_asked_count(server: EmbeddedBroker, broker: Broker, first: str) -> None:
    runner = make_runner()
    with contextlib.ExitStack() as stack:
        if first == "workers":
            stack.enter_context(working(server.parameters, "trainer", "actor"))
        manager = start(server.parameters, runner, max_train_count=101)
        if first == "client":
            stack.enter_context(working(server.parameters, "trainer", "actor"))
        status = manager.train_wait(progress=False)
    assert (status.state, status.train_count, status.max_train_count) == ("done", 101, 101)
    manager.load_into(runner)
    assert runner.train_count == 101
    assert runner.env_steps == status.env_steps > 100


def test_train_distribution_brings_everything_home(server: EmbeddedBroker, broker: Broker, tmp_path: Path) -> None:
    runner = make_runner()
    with working(server.parameters, "trainer", "actor"):
        status = runner.train_distribution(
            server.parameters,
            max_train_count=60,
            num_envs=4,
            eval_episodes=2,
            eval_interval_s=0,
            checkpoint_save_dir=tmp_path / "checkpoints",
            history_save_dir=tmp_path / "history",
            progress=False,
        )
    assert runner.train_count == 60
    loaded = make_runner()
    loaded.load_checkpoint(tmp_path / "checkpoints")
    assert (loaded.train_count, loaded.env_steps) == (60, status.env_steps)
    np.testing.assert_equal(dict(loaded.parameters), dict(runner.parameters))
    rows = srl.Runner.load_history(tmp_path / "history").rows
    last = [row for row in rows if row["role"] == "trainer"][-1]
    assert (last["train"], last["step"]) == (60, status.env_steps)
    assert {row["reward0"] for row in rows if "reward0" in row} == {20.0}
    assert [row["eval_reward0"] for row in rows if row["role"] == "eval"][:1] == [20.0]
    assert all(0 <= row["time"] < 60 for row in rows)
    assert status.evaluation is not None and status.evaluation.mean_reward == 20.0
    assert runner.evaluate(2) == [20.0, 20.0]


@pytest.mark.parametrize(
    ("limit", "reached"),
    [
        ({"timeout": 0.5}, lambda status: 0.5 <= status.elapsed_s < 5),
        ({"max_steps": 400}, lambda status: 400 <= status.env_steps < 4000),
        ({"max_episodes": 12}, lambda status: 240 <= status.env_steps < 4000),
    ],
    ids=["timeout", "steps", "episodes"],
)
def test_every_stop_condition_ends_a_run(server: EmbeddedBroker, broker: Broker, limit: Any, reached: Any) -> None:
    with working(server.parameters, "trainer", "actor"):
        status = start(server.parameters, **limit).train_wait(progress=False)
    assert status.state == "done"
    assert reached(status), status


def test_tasks_are_served_one_after_the_other_and_never_mixed(server: EmbeddedBroker, broker: Broker) -> None:
    runners = [make_runner(size=size, reward=float(size)) for size in (2, 4, 5)]
    managers = [start(server.parameters, runner, max_train_count=20 + i) for i, runner in enumerate(runners)]
    with working(server.parameters, "trainer", "actor", "actor"):
        statuses = [manager.train_wait(progress=False) for manager in managers]
    assert [status.train_count for status in statuses] == [20, 21, 22]
    for runner, manager, size in zip(runners, managers, (2, 4, 5), strict=True):
        manager.load_into(runner)
        assert runner.parameters["weights"].shape == (size, size)
        rewards = {row["reward0"] for row in broker.history(manager.task) if "reward0" in row}
        assert rewards <= {20.0 * size}
    started = [int(broker.task_fields(manager.task)["started_ms"]) for manager in managers]
    finished = [int(broker.task_fields(manager.task)["finished_ms"]) for manager in managers]
    assert started[1] >= finished[0] and started[2] >= finished[1]


def test_a_client_leaves_and_another_comes_back(server: EmbeddedBroker, broker: Broker, tmp_path: Path) -> None:
    parameters = server.parameters
    assert TaskManager(parameters).create_runner() is None
    with pytest.raises(BrokerError, match=r"no task at .*train_distribution_start"):
        TaskManager(parameters).get_status()
    start(parameters, max_train_count=3000).close()
    with working(parameters, "trainer", "actor"):
        first = TaskManager(parameters)
        until(lambda: len(broker.history(first.task)) > 2)
        left = first.train_wait(history_save_dir=tmp_path, timeout=0, progress=False)
        assert not left.finished
        first.close()
        back = TaskManager(parameters)
        status = back.train_wait(checkpoint_save_dir=tmp_path, history_save_dir=tmp_path, progress=False)
    assert status.train_count == 3000
    rows = srl.Runner.load_history(tmp_path).rows
    ids = [row["id"] for row in rows]
    assert ids == sorted(set(ids), key=ids.index) and len(ids) == len(broker.history(back.task))
    runner = back.create_runner()
    assert runner is not None
    assert (runner.train_count, runner.env_config.name) == (3000, "test/Counted-v0")
    assert isinstance(runner.config, toy.Config)
    assert runner.evaluate(1) == [20.0]
    assert back.read_parameter() is not None
    assert (tmp_path / "3000").is_dir()


def test_a_trained_runner_goes_on(server: EmbeddedBroker, broker: Broker) -> None:
    runner = make_runner()
    runner.train(max_train_count=40, eval_episodes=0, progress=False)
    learned, steps = dict(runner.parameters), runner.env_steps
    manager = start(server.parameters, runner, max_train_count=20)
    tree, _ = task_manager.decode_tree(broker.checkpoint_blob(manager.task)[1] or b"")
    np.testing.assert_equal(tree["parameters"], learned)
    status = manager.get_status()
    assert (status.train_count, status.max_train_count, status.env_steps) == (40, 60, steps)
    with working(server.parameters, "trainer", "actor"):
        manager.train_wait(progress=False)
        manager.load_into(runner)
        assert runner.train_count == 60
        assert runner.env_steps > steps
        # A second run counts its own steps and episodes, not those of the first.
        steps = runner.env_steps
        again = start(server.parameters, runner, max_steps=200).train_wait(progress=False)
        assert 200 <= again.env_steps - steps < 4000
        episodes = start(server.parameters, runner, max_episodes=8).train_wait(progress=False)
        assert episodes.env_steps - steps >= 160


def test_cancel_stops_the_workers_and_they_take_the_next_task(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters)
    with working(server.parameters, "trainer", "actor"):
        until(lambda: env_steps(manager) > 0)
        assert manager.cancel()
        assert not manager.cancel()
        assert manager.train_wait(progress=False).state == "cancelled"
        second = start(server.parameters, max_train_count=10)
        assert second.train_wait(progress=False, timeout=20).state == "done"
    assert manager.get_status().state == "cancelled"


def test_a_run_that_is_asked_to_end_is_done_with_all_it_learned(
    server: EmbeddedBroker, broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, waiting = start(server.parameters), start(server.parameters)
    with working(server.parameters, "trainer", "actor"):
        until(lambda: manager.get_status().train_count > 0)
        assert waiting.end("enough") and waiting.get_status().state == "cancelled", "nobody has taken it"
        assert manager.end("enough") and not manager.end("again")
        status = manager.train_wait(progress=False, checkpoint_save_dir=tmp_path)
    assert status.state == "done" and not manager.end("too late")
    assert "client: enough" in caplog.text
    learned = make_runner()
    learned.load_checkpoint(tmp_path)
    assert learned.train_count == status.train_count > 0


def test_the_end_that_was_asked_for_comes_though_the_trainer_is_another_one(
    server: EmbeddedBroker, broker: Broker
) -> None:
    manager = start(server.parameters)
    with working(server.parameters, "trainer", "actor"):
        until(lambda: manager.get_status().train_count > 0)
    assert manager.end("enough")
    with working(server.parameters, "trainer"):
        assert manager.train_wait(progress=False, timeout=30).state == "done"


def test_a_spent_budget_takes_no_more_tasks_and_is_shown(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters)
    bill = Bill(hours=1.0, usd=4.0, usd_per_hour=2.0, max_usd=5.0)
    broker.write_bill(msgspec.json.encode(bill).decode())
    assert manager.get_status().bill == bill
    start(server.parameters)
    broker.write_bill(msgspec.json.encode(msgspec.structs.replace(bill, usd=5.01)).decode())
    with pytest.raises(BrokerError, match=r"budget of 5\.00 USD is spent \(5\.01 USD in 1\.0 hours\).*no more tasks"):
        start(server.parameters)
    assert len(manager.tasks()) == 2


# --- counting -------------------------------------------------------------------------------------------


def test_every_step_that_was_taken_is_counted_once(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters, actor_num=2)
    before = Counted.steps
    with working(server.parameters, "trainer"):
        with working(server.parameters, "actor", "actor"):
            until(lambda: env_steps(manager) > 500)
        taken = Counted.steps - before
        assert until(lambda: env_steps(manager) >= taken)
        until(lambda: manager.get_status().backlog_bytes == 0)
    assert env_steps(manager) == taken
    # The next trainer counts on from there.
    with working(server.parameters, "trainer", "actor"):
        until(lambda: env_steps(manager) > taken)
    assert env_steps(manager) <= Counted.steps - before


def test_a_message_that_arrives_twice_is_inserted_once(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters)
    actor = acquire(broker, manager.task, "actor")
    for sequence in (0, 0, 1, 0, 1):
        broker.send(actor, message(actor, sequence))
    with working(server.parameters, "trainer"):
        until(lambda: env_steps(manager) and manager.get_status().backlog_bytes == 0)
        assert (env_steps(manager), manager.get_status().memory_size) == (16, 16)
    # Another trainer knows what the first has seen.
    for sequence in (1, 2):
        broker.send(actor, message(actor, sequence))
    with working(server.parameters, "trainer"):
        until(lambda: manager.get_status().backlog_bytes == 0)
        assert env_steps(manager) == 24


def test_the_next_trainer_takes_what_was_not_committed(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters)
    actor, dead = acquire(broker, manager.task, "actor"), acquire(broker, manager.task, "trainer")
    broker.send(actor, message(actor, 0))
    broker.send(actor, message(actor, 1))
    first, _ = receive(broker, manager.task)
    position = Position(first[0], len(first[1]), {actor.sender: 0})
    broker.commit(dead, train_count=0, progress={"env_steps": 8}, position=position)
    broker.release(dead)
    with working(server.parameters, "trainer"):
        until(lambda: manager.get_status().backlog_bytes == 0)
        assert env_steps(manager) == 16


def test_a_history_row_tells_only_what_the_next_trainer_knows(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters, timeout=60, parameter_send_interval_s=60)  # nothing else commits in time
    actor = acquire(broker, manager.task, "actor")
    broker.send(actor, message(actor, 0))
    with working(server.parameters, "trainer"):
        until(lambda: (status := manager.get_status()).trainer and status.trainer.steps_received == 8)
        seen = len(manager.history())
        until(lambda: len(manager.history()) > seen + 1)
        assert max(row["step"] for row in manager.history()) <= env_steps(manager)
    assert (manager.history()[-1]["step"], manager.history()[-1]["episode"]) == (8, 1)


def test_a_message_is_stored_once_however_many_trainers_are_killed_before_they_commit_it(
    server: EmbeddedBroker, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def working_here() -> contextlib.AbstractContextManager[threading.Event]:
        return working(server.parameters, functools.partial(trainer_run_forever, work_dir=tmp_path))

    manager = start(server.parameters)
    key, actor = f"srl:{manager.task}:task", acquire(broker, manager.task, "actor")
    with working_here():
        broker.send(actor, message(actor, 0))
        until(lambda: env_steps(manager) == 8)
    before = broker.redis.hgetall(key)
    with working_here():
        broker.send(actor, message(actor, 1))
        until(lambda: env_steps(manager) == 16)
    # As a kill would have left it that came before the last commit: the memory has the message, and it comes again.
    broker.redis.delete(key)
    broker.redis.hset(key, mapping=before)
    broker.send(actor, message(actor, 1))
    with monkeypatch.context() as patch:
        patch.setattr(Broker, "receive", lambda self, *_: [])
        with working_here():  # a trainer that goes before it has received anything
            until(lambda: manager.get_status().trainer)
    with working_here():
        until(lambda: env_steps(manager) == 16)
        assert manager.get_status().memory_size == 16
        broker.send(actor, message(actor, 2))
        until(lambda: env_steps(manager) == 24)
        assert manager.get_status().memory_size == 24


def test_a_message_that_cannot_be_read_is_reported_and_the_run_goes_on(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters)
    actor = acquire(broker, manager.task, "actor")
    good = message(actor, 0)
    other_version = good[:4] + (99).to_bytes(2, "little") + good[6:]
    for sent in (other_version, b"nonsense", good):
        broker.send(actor, sent)
    with working(server.parameters, "trainer"):
        until(lambda: manager.get_status().backlog_bytes == 0)
        assert env_steps(manager) == 8
        [event] = until(lambda: broker.events(manager.task))
        assert re.search(rf"refused 2 .*of actor-0: .*version 99.*version {PROTOCOL_VERSION}\b", event.message)
        kept = manager.refused_messages()
        assert [(each.sender, each.start) for each in kept] == [("actor-0", other_version), ("actor-0", b"nonsense")]
        assert manager.get_status().messages_refused == 2
        until(lambda: broker.history(manager.task)[-1].get("messages_refused") == 2)


# --- actors ---------------------------------------------------------------------------------------------


def test_actors_act_with_what_is_published_and_report_its_version(server: EmbeddedBroker, broker: Broker) -> None:
    runner = make_runner()
    runner.config.epsilon = 0.0  # type: ignore[attr-defined]
    manager = start(server.parameters, runner)
    trainer = acquire(broker, manager.task, "trainer")
    with working(server.parameters, "actor"):
        until(lambda: "first parameters" in str(manager.get_status().actors))
        publish(broker, trainer, version=7)
        sent = until(lambda: receive(broker, manager.task))
        segments = decode_experience(sent[0][1]).segments
        assert {segment.version for segment in segments} == {7}
        assert not any(segment.actions.any() for segment in segments)  # of equal values it takes the first
        until(lambda: manager.get_status().actors[0].parameter_version == 7)
        manager.cancel()
    assert env_steps(manager) == 0


def test_a_full_backlog_holds_an_actor_until_there_is_room(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters)
    trainer = acquire(broker, manager.task, "trainer")
    publish(broker, trainer, version=1)
    with working(server.parameters, "actor"):
        until(lambda: "backlog is full" in str(manager.get_status().actors))
        status = manager.get_status()
        assert 0 < status.backlog_bytes <= status.backlog_limit_bytes
        waiting = receive(broker, manager.task)
        sequences = [decode_experience(sent).sequence for _, sent in waiting]
        size = sum(len(sent) for _, sent in waiting)
        assert size == status.backlog_bytes
        broker.commit(trainer, train_count=1, progress={}, position=Position(waiting[-1][0], size, {}))
        more = until(lambda: receive(broker, manager.task))
        sequences += [decode_experience(sent).sequence for _, sent in more]
        broker.finish(manager.task, "cancelled")
    assert sequences == list(range(len(sequences)))


def test_a_backlog_is_as_short_for_frames_that_compress_well(server: EmbeddedBroker, broker: Broker) -> None:
    runner = make_runner(size=512)
    manager = start(server.parameters, runner)
    parameters = encode_tree(runner.learner.parameters, {"train_count": 1})
    broker.commit(acquire(broker, manager.task, "trainer"), train_count=1, progress={}, parameters=(1, parameters))
    with working(server.parameters, "actor"):
        until(lambda: "backlog is full" in str(manager.get_status().actors))
        waiting = [data for _, data in receive(broker, manager.task)]
        limit = manager.get_status().backlog_limit_bytes
        broker.finish(manager.task, "cancelled")
    assert sum(len(data) for data in waiting) < limit / 10
    transitions = [len(segment.actions) for data in waiting for segment in decode_experience(data).segments]
    assert 0 < sum(transitions) < limit / (512 * 4)


def test_a_memory_that_does_not_fit_the_trainer_is_an_error_at_the_client(
    server: EmbeddedBroker, broker: Broker
) -> None:
    config = dqn.Config()
    config.memory.capacity = 10**12
    manager = start(server.parameters, srl.Runner(EnvConfig("test/Counted-v0"), config))
    with (
        working(server.parameters, "trainer"),
        pytest.raises(WorkerError, match=r"(?s)trainer.*needs .* of memory, but .* lower memory\.capacity"),
    ):
        manager.train_wait(progress=False, timeout=20)


def test_an_actor_that_stops_before_a_full_backlog_loses_nothing(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters)
    publish(broker, acquire(broker, manager.task, "trainer"), version=1)
    before = Counted.steps
    with working(server.parameters, "actor"):
        until(lambda: "backlog is full" in str(manager.get_status().actors))
    sent = sum(decode_experience(data).env_steps for _, data in receive(broker, manager.task))
    assert sent == Counted.steps - before


def test_an_actor_that_cannot_send_what_it_has_when_it_stops_says_what_is_lost(
    server: EmbeddedBroker, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actor_link, "FLUSH_S", 0.1)
    monkeypatch.setattr(broker_module, "LAST_BACKLOGS", 0)
    manager = start(server.parameters)
    publish(broker, acquire(broker, manager.task, "trainer"), version=1)
    before = Counted.steps
    with working(server.parameters, "actor"):
        until(lambda: "backlog is full" in str(manager.get_status().actors))
    sent = sum(decode_experience(data).env_steps for _, data in receive(broker, manager.task))
    lost = [int(number) for number in re.findall(r"(\d+) env steps could not be sent", caplog.text)]
    assert lost and sent + sum(lost) == Counted.steps - before


def test_an_env_that_breaks_reaches_the_client_with_its_traceback(server: EmbeddedBroker, broker: Broker) -> None:
    manager = start(server.parameters, make_runner(fail_at=1))
    with working(server.parameters, "trainer", "actor"):
        with pytest.raises(WorkerError, match=r"(?s)actor-0.*Traceback.*counted_env\.py.*the counted env broke"):
            manager.train_wait(progress=False)
        # The workers live on.
        assert start(server.parameters, max_train_count=5).train_wait(progress=False, timeout=20).state == "done"


def test_an_env_that_breaks_before_a_full_backlog_is_reported_all_the_same(
    server: EmbeddedBroker, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_link, "FLUSH_S", 0.1)
    env = EnvConfig("test/Broken-v0", {"what": "reward", "value": "inf", "at": 100})
    manager = start(server.parameters, srl.Runner(env, toy.Config()))
    broker.redis.hset(f"srl:{manager.task}:task", "backlog_limit", 1)
    broker.send(acquire(broker, manager.task, "actor"), b"it is full")
    broker.redis.hset(f"srl:{manager.task}:task", "actor_num", 2)
    publish(broker, acquire(broker, manager.task, "trainer"), version=1)
    with working(server.parameters, "actor"):
        event = until(lambda: next(iter(broker.events(manager.task)), None))
    assert event.fatal and "a reward inf at step 100" in event.message


def test_a_lane_that_dies_natively_is_replaced_and_the_run_goes_on(
    server: EmbeddedBroker, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    victim = as_seeds(1, [2], 0)  # of the runner's seed
    env = EnvConfig("test/Faulty-v0", {"how": "exit", "at_step": 5, "victims": victim}, env_processes=True)
    manager = start(server.parameters, srl.Runner(env, toy.Config(), seed=1), max_train_count=300)
    with working(server.parameters, "trainer", "actor"):
        status = manager.train_wait(progress=False)
    assert (status.state, status.train_count) == ("done", 300)
    [told] = [event.message for event in broker.events(manager.task) if event.worker]
    assert re.search(r"(?s)test/Faulty-v0 lane 2: .*ended with exit code 139, at step 5 of its episode", told)
    assert told in caplog.text


def test_an_env_that_fails_often_is_counted_and_told_now_and_then(server: EmbeddedBroker, broker: Broker) -> None:
    runner = srl.Runner(EnvConfig("test/Faulty-v0", {"at_step": 5}), toy.Config(), seed=1)
    manager = start(server.parameters, runner)
    with working(server.parameters, "trainer", "actor"):
        until(lambda: broker.events(manager.task))
        told = manager.get_status().actors[0].env_faults
        until(lambda: manager.get_status().actors[0].env_faults > told + 20)
        assert len(broker.events(manager.task)) == 1
    first, last = [event.message for event in broker.events(manager.task)]
    assert re.search(r"(?s)test/Faulty-v0 lane \d.*at step \d.*Traceback.*envs\.py.*the faulty env broke", first)
    assert re.search(r"and \d+ other faults of envs before it", last)


@pytest.mark.parametrize("processes", [False, True])
def test_an_env_that_fails_on_every_reset_ends_the_task(
    server: EmbeddedBroker, broker: Broker, processes: bool
) -> None:
    env = EnvConfig("test/Faulty-v0", {"at_reset": 1}, env_processes=processes)
    manager = start(server.parameters, srl.Runner(env, toy.Config()))
    told = r"(?s)actor-0: test/Faulty-v0 lane 0: .*fault 3 in a row.*Traceback.*envs\.py.*the faulty env broke"
    with working(server.parameters, "trainer", "actor"), pytest.raises(WorkerError, match=told):
        manager.train_wait(progress=False, timeout=20)


def test_a_slow_start_keeps_the_lease(server: EmbeddedBroker, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = start(server.parameters)
    building, go_on = threading.Semaphore(0), threading.Event()

    def slowly(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(*arguments: Any, **options: Any) -> Any:
            building.release()
            assert go_on.wait(20)
            return original(*arguments, **options)

        return build

    monkeypatch.setattr(actor_server, "make_lane_groups", slowly(actor_server.make_lane_groups))
    monkeypatch.setattr(trainer_server, "Trainer", slowly(trainer_server.Trainer))
    with working(server.parameters, "trainer", "actor"):
        assert building.acquire(timeout=20) and building.acquire(timeout=20)
        names = ("trainer", "actor-0")
        until(lambda: broker.snapshot(manager.task)["workers"].keys() == set(names))
        beats = [broker.snapshot(manager.task)["workers"][name][0] for name in names]
        until(
            lambda: all(broker.snapshot(manager.task)["workers"][n][0] > b for n, b in zip(names, beats, strict=True))
        )
        assert "envs to be ready" in manager.get_status().actors[0].waiting_for
        assert "to be ready" in str(manager.get_status().trainer)
        go_on.set()
        until(lambda: env_steps(manager) > 0)


# --- configuration and versions -------------------------------------------------------------------------


def test_every_setting_arrives_unchanged(server: EmbeddedBroker, broker: Broker) -> None:
    config = changed(dqn.Config())
    config.processors = [ShortLives(steps=7)]
    config.image_block.set_custom(Unchanged(channels=3))
    env_config = EnvConfig(
        "test/Counted-v0",
        kwargs={"size": 3, "reward": 0.5},
        max_episode_steps=9,
        frameskip=2,
        render_observation=True,
        env_timeout_s=7.0,
        env_processes=True,
        gym_make_func=make_counted,
        gym_wrappers=[unchanged],
    )
    run_config = changed(RunConfig(max_train_count=1, max_steps=1, max_episodes=1, timeout=1))
    defaults = (dqn.Config(), EnvConfig("x"), RunConfig(max_train_count=1))
    for sent, default in zip((config, env_config, run_config), defaults, strict=True):
        same = {name for name, value in leaves(sent) if value == dict(leaves(default)).get(name)}
        assert same <= UNCHANGEABLE, f"{type(sent).__name__}: give {same} a value that differs"
    runner = make_runner(size=3)
    manager = task_manager.create_task(server.parameters, env_config, config, run_config, runner.spaces, None)
    definition = broker.definition(manager.task)
    load_plugins(["counted_env"])
    assert config_from_dict(definition.rl).to_dict() == config.to_dict()
    assert EnvConfig.from_dict(definition.env) == env_config
    assert RunConfig.from_dict(definition.run) == run_config
    assert trainer_server.Spaces.from_dict(definition.spaces) == runner.spaces


UNCHANGEABLE = {"algorithm", "version"}


def changed(settings: Any) -> Any:
    """Return settings with every number and switch set to another value that is allowed."""
    for name in settings.documentation():
        value = getattr(settings, name)
        if isinstance(value, Settings):
            changed(value)
            continue
        if isinstance(value, bool):
            candidates: list[Any] = [not value]
        elif isinstance(value, int):
            candidates = [value + 1, value - 1]
        elif isinstance(value, float):
            candidates = [value * 0.5, value * 2, 0.25]
        elif isinstance(value, tuple):
            candidates = [(16, 8)]
        elif value is None:
            candidates = [2.5, 7]
        elif isinstance(value, str):
            candidates = ["linear", "rank", "dueling", "r2d3", "tanh", "bfloat16"]
        else:
            continue
        for candidate in candidates:
            with contextlib.suppress(srl.base.errors.ConfigError):
                setattr(settings, name, candidate)
                if getattr(settings, name) != value:
                    break
    return settings


def leaves(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.to_dict().items():
        nested = getattr(settings, name, None)
        if isinstance(nested, Settings):
            yield from leaves(nested, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_another_protocol_is_refused_by_workers_and_client_with_both_versions(
    server: EmbeddedBroker, broker: Broker
) -> None:
    definition = broker.definition(start(server.parameters, max_train_count=5).task)
    broker.redis.flushall()
    old = TaskDefinition(**{**definition.__dict__, "protocol": 99})
    task = broker.create_task("", old, 1000)
    with working(server.parameters, "trainer", "actor"):
        until(lambda: len(broker.events(task)) == 2)
        events = broker.events(task)
        assert {event.worker.partition(" ")[0] for event in events} == {"trainer", "actor"}
        for event in events:
            assert re.search(rf"protocol version 99.* version {PROTOCOL_VERSION};.*same SRL version", event.message)
        with pytest.raises(ProtocolError, match=rf"version 99.* version {PROTOCOL_VERSION}\b"):
            TaskManager(server.parameters, task).train_wait(progress=False)
        assert broker.task_fields(task)["state"] == "waiting"  # others may speak it
        assert start(server.parameters, max_train_count=5).train_wait(progress=False, timeout=20).state == "done"
    assert len(broker.events(task)) == 2


def test_another_version_of_the_algorithm_is_refused_with_both_versions(server: EmbeddedBroker, broker: Broker) -> None:
    definition = broker.definition(start(server.parameters).task)
    assert definition.rl["version"] == toy.Config.version
    broker.redis.flushall()
    for changes, says in (
        ({"version": 7}, rf"of toy version 7, this process has version {toy.Config.version};.*same version of SRL"),
        ({"learning_speed": 7}, "has no setting 'learning_speed'"),
    ):
        other = TaskDefinition(**{**definition.__dict__, "rl": {**definition.rl, **changes}})
        manager = TaskManager(server.parameters, broker.create_task("", other, 1000))
        with working(server.parameters, "trainer"), pytest.raises(WorkerError, match=says):
            manager.train_wait(progress=False, timeout=20)


# --- leases and outages ---------------------------------------------------------------------------------


def test_a_replaced_trainer_leaves_and_its_place_is_safe(
    server: EmbeddedBroker, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = start(server.parameters)
    with working(server.parameters, "trainer"):
        until(lambda: manager.get_status().parameter_version)
        monkeypatch.setattr(broker_module, "LEASE_MS", -1)
        mine = broker.acquire(manager.task, "trainer")
        monkeypatch.undo()
        assert mine is not None
        broker.beat(mine, '{"worker": "mine"}')
        until(lambda: "trainer was replaced" in caplog.text)
        broker.beat(mine, '{"worker": "mine"}')
    status = manager.get_status()
    assert status.state == "running" and status.trainer is not None and status.trainer.worker == "mine"


def test_a_broker_that_comes_back_empty_gets_its_task_back(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with EmbeddedBroker() as own:
        own_broker = Broker(own.parameters)
        manager = start(own.parameters, max_train_count=6_000, checkpoint_interval_s=0.2)
        with working(own.parameters, "trainer", "actor"):
            client = threading.Thread(
                target=manager.train_wait, kwargs={"progress": False, "history_save_dir": tmp_path}
            )
            client.start()
            for _ in range(2):
                before = until(lambda: own_broker.checkpoint_blob(manager.task)[0] and manager.get_status())
                own.stop()
                own.start()
                until(lambda: own_broker.tasks() == [manager.task])
                after = manager.get_status()
                assert after.train_count >= before.train_count and after.env_steps >= before.env_steps
                assert after.parameter_version >= before.parameter_version
                until(lambda seen=after.env_steps: env_steps(manager) > seen)
            client.join(60)
            assert not client.is_alive()
            status = manager.get_status()
        assert (status.state, status.train_count) == ("done", 6_000)
        assert status.max_train_count == 6_000 and status.actors[0].worker == "actor-0"
        counts = [row["train"] for row in srl.Runner.load_history(tmp_path).rows if row["role"] == "trainer"]
        assert counts == sorted(counts) and counts[-1] == 6_000
    assert caplog.text.count("restored it at") == 2
    # Trainer, actor and client are one process here with a broker object each: each says it once.
    assert caplog.text.count("does not answer") <= 6 and caplog.text.count("answers again") <= 6


@pytest.mark.parametrize("moment", ["does not answer", "waiting for its trainer to restore it"])
def test_an_actor_that_stops_in_an_outage_sends_what_it_has(
    moment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restore, may_restore, before = TaskKeeper.restore, threading.Event(), Counted.steps
    monkeypatch.setattr(TaskKeeper, "restore", lambda self: may_restore.wait(20) and restore(self))
    with EmbeddedBroker() as own:
        manager = start(own.parameters)
        with working(own.parameters, "trainer"):
            with working(own.parameters, "actor") as stop:
                until(lambda: env_steps(manager) > 200)
                own.stop()
                if moment != "does not answer":
                    own.start()
                until(lambda: moment in caplog.text)
                stop.set()
                if moment == "does not answer":
                    own.start()
                may_restore.set()
            taken = Counted.steps - before
            until(lambda: manager.get_status().backlog_bytes == 0)
            status = manager.get_status()
    assert "could not be sent" not in caplog.text
    # What the old server had not given to the trainer yet is counted.
    assert taken - status.env_steps <= status.messages_lost * 200


def test_a_lost_task_that_nobody_restores_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "GONE_S", 0.2)
    monkeypatch.setattr(outages, "GONE_POLL_S", 0.05)
    with EmbeddedBroker() as own:
        manager = start(own.parameters, max_train_count=1_000_000)
        with working(own.parameters, "actor"):
            until(lambda: manager.get_status().actors)
            own.stop()
            own.start()
            with pytest.raises(TaskGoneError, match="restarted without its data"):
                manager.train_wait(progress=False)
            second = start(own.parameters, max_train_count=10)
            with working(own.parameters, "trainer"):
                assert second.train_wait(progress=False, timeout=20).state == "done"


def test_a_short_outage_loses_nothing(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = start(broker.parameters)
    before = Counted.steps
    with working(broker.parameters, "trainer"):
        with working(broker.parameters, "actor"):
            until(lambda: env_steps(manager) > 200)
            for _ in range(3):  # cut every connection, in the middle of whatever is going on
                seen = env_steps(manager)
                broker.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                until(lambda seen=seen: env_steps(manager) > seen)
        taken = Counted.steps - before
        until(lambda: env_steps(manager) >= taken and manager.get_status().backlog_bytes == 0)
        assert env_steps(manager) == taken
    assert manager.get_status().state == "running"


def test_workers_that_come_first_wait_for_the_broker_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with EmbeddedBroker(port=0) as own:
        pass
    with working(own.parameters, "trainer", "actor"):
        until(lambda: caplog.text.count("waiting for up to 30 s for the broker") == 2)
        with own:
            assert start(own.parameters, max_train_count=10).train_wait(progress=False).state == "done"
    assert caplog.text.count("for up to 30 s") == 2  # one each


def test_workers_give_up_on_a_broker_that_never_comes() -> None:
    with EmbeddedBroker(port=0) as own:
        parameters = own.parameters
    parameters.connect_timeout_s = 0.2
    for run in WORKERS.values():
        with pytest.raises(BrokerUnreachableError, match=r"no broker .*in 0\.2 s"):
            run(parameters, None)
    with pytest.raises(BrokerUnreachableError):
        TaskManager(parameters)


def test_the_client_says_who_is_missing(
    server: EmbeddedBroker, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "srl")
    manager = start(server.parameters, actor_num=2)
    manager.train_wait(timeout=0)
    assert "no trainer has joined yet; start one with: srl trainer" in caplog.text
    assert "no actor has joined yet; start one with: srl actor" in caplog.text
    broker.beat(acquire(broker, manager.task, "actor"), '{"worker": "actor-0"}')
    caplog.clear()
    manager.train_wait(timeout=0)
    assert "1 of 2 actors joined" in caplog.text


def test_memory_files_live_as_long_as_their_task(server: EmbeddedBroker, broker: Broker, tmp_path: Path) -> None:
    manager = start(server.parameters, max_train_count=3000)
    stop = threading.Event()
    trainer = threading.Thread(
        target=trainer_run_forever, args=(server.parameters, None), kwargs={"work_dir": tmp_path, "stop": stop}
    )
    trainer.start()
    try:
        with working(server.parameters, "actor"):
            until(lambda: list(tmp_path.glob(f"{manager.task}/*.bin")))
            assert manager.train_wait(progress=False).state == "done"
        until(lambda: not list(tmp_path.iterdir()))
    finally:
        stop.set()
        trainer.join(20)
