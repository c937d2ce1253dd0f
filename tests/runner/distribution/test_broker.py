import dataclasses
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from srl.base.errors import BrokerError, BrokerUnreachableError, ProtocolError
from srl.runner.distribution import broker as broker_module
from srl.runner.distribution import embedded
from srl.runner.distribution.broker import KEEP_FINISHED_S, Broker
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.distribution.outages import once, persist
from srl.runner.distribution.records import (
    Event,
    Lease,
    LeaseLostError,
    Position,
    TaskDefinition,
    TaskGoneError,
    TaskOverError,
)
from srl.runner.distribution.wire import PROTOCOL_VERSION

LIMIT = 1000


@pytest.fixture(scope="module", params=["unix", "tcp", "redis-server"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "redis-server":
            installed = shutil.which("redis-server")
            if installed is None:
                pytest.skip("no redis-server is installed")
            patch.setattr(embedded, "find_server", lambda: Path(installed))
        with EmbeddedBroker(port=None if request.param == "unix" else 0) as running:
            yield running


@pytest.fixture
def broker(server: EmbeddedBroker) -> Iterator[Broker]:
    made = Broker(server.parameters)
    made.redis.flushall()
    yield made
    made.close()


def definition(**changes: Any) -> TaskDefinition:
    run = {"actor_num": 2, "max_train_count": 100, "timeout": None, **changes.pop("run", {})}
    return dataclasses.replace(TaskDefinition({"name": "Toy-v0"}, {}, {}, run, 0), **changes)


def create(broker: Broker, name: str = "", **changes: Any) -> str:
    return broker.create_task(name, definition(**changes), LIMIT)


def acquire(broker: Broker, task: str, role: Any = "trainer", slots: int = 2) -> Lease:
    lease = broker.acquire(task, role, slots)
    assert lease is not None
    return lease


def commit(broker: Broker, lease: Lease, **changes: Any) -> None:
    broker.commit(lease, **{"train_count": 1, "progress": {}, **changes})


def receive(broker: Broker, task: str, after: str, count: int, block_ms: int) -> list[tuple[str, bytes]]:
    return [(message.id, message.data) for message in broker.receive(task, after, count, block_ms)]


EVERY_WRITE: dict[str, Callable[[Broker, Lease], Any]] = {
    "trainer-beat": lambda broker, lease: broker.beat(lease, "{}"),
    "trainer-commit": lambda broker, lease: commit(broker, lease, train_count=99, parameters=(99, b"stale")),
    "trainer-acknowledge": lambda broker, lease: commit(broker, lease, position=Position("9999999999999-0", 0, {})),
    "trainer-checkpoint": lambda broker, lease: broker.store_checkpoint(lease, b"stale"),
    "trainer-history": lambda broker, lease: broker.add_history(lease, {"train": 99}, "{}"),
    "actor-beat": lambda broker, lease: broker.beat(lease, "{}"),
    "actor-send": lambda broker, lease: broker.send(lease, b"message"),
}


def everything(broker: Broker) -> dict[bytes, Any]:
    """Return all data of the broker, for comparing."""
    read: dict[bytes, Callable[[bytes], Any]] = {
        b"hash": broker.redis.hgetall,
        b"zset": lambda key: broker.redis.zrange(key, 0, -1, withscores=True),
        b"stream": lambda key: (broker.redis.xrange(key), broker.redis.xinfo_stream(key)["last-generated-id"]),
    }
    return {key: read[broker.redis.type(key)](key) for key in broker.redis.scan_iter()}


# --- tasks ----------------------------------------------------------------------------------------------


def test_tasks_are_queued_oldest_first_even_within_a_millisecond(broker: Broker) -> None:
    created = [create(broker) for _ in range(20)]
    assert broker.tasks() == created
    assert [task for task, _ in broker.open_tasks()] == created
    assert broker.find_task() == created[-1]


def test_only_unfinished_tasks_wait_for_workers_but_all_are_listed(broker: Broker) -> None:
    first, second = create(broker), create(broker)
    broker.finish(first, "cancelled")
    assert [task for task, _ in broker.open_tasks()] == [second]
    assert broker.tasks() == [first, second]


def test_a_name_is_used_by_one_unfinished_task_only(broker: Broker) -> None:
    first = create(broker, "mine")
    with pytest.raises(BrokerError, match=r"'mine' is waiting.*another task_name"):
        create(broker, "mine")
    create(broker, "other")
    assert len(broker.tasks()) == 2
    broker.finish(first, "done")
    second = create(broker, "mine")
    assert second != first
    assert broker.find_task("mine") == second


@pytest.mark.parametrize("name", ["../outside", "/tmp/x", ".hidden", "a/b", "-x", "a b"])
def test_a_name_that_could_be_a_path_is_refused(broker: Broker, name: str) -> None:
    with pytest.raises(BrokerError, match="task_name"):
        create(broker, name)
    assert not broker.is_safe(name)


def test_tasks_without_a_name_never_conflict(broker: Broker) -> None:
    assert create(broker) != create(broker)


def test_a_task_is_found_by_id_and_by_name(broker: Broker) -> None:
    assert broker.find_task() is None
    assert broker.find_task("mine") is None
    mine, newest = create(broker, "mine"), create(broker)
    assert broker.find_task("mine") == mine
    assert broker.find_task(mine) == mine
    assert broker.find_task("") == newest
    assert broker.find_task("nobody's") is None


def test_ids_show_the_name_and_hold_nothing_odd(broker: Broker) -> None:
    task = create(broker, env={"name": "my.module:Odd Env/x-v0"})
    assert task.startswith("my.module-Odd-Env-x-v0-")


def test_a_definition_arrives_unchanged(broker: Broker) -> None:
    sent = definition(env={"name": "ö", "kwargs": {"a": [1, 2.5, None, True]}}, start_train_count=7, start_env_steps=9)
    task = broker.create_task("", sent, LIMIT)
    assert broker.definition(task) == sent


def test_another_protocol_version_is_refused_with_both_named(broker: Broker) -> None:
    task = create(broker, protocol=PROTOCOL_VERSION + 1)
    with pytest.raises(ProtocolError, match=rf"version {PROTOCOL_VERSION + 1}.* version {PROTOCOL_VERSION}\b"):
        broker.definition(task)


def test_an_expired_task_is_forgotten_and_said_to_be_gone(broker: Broker) -> None:
    task = create(broker)
    broker.redis.delete(f"srl:{task}:task")
    assert broker.tasks() == [] and broker.open_tasks() == []
    for look in (broker.definition, broker.snapshot):
        with pytest.raises(BrokerError, match=f"{task}.*not at .* any more"):
            look(task)


def test_a_repeated_creation_changes_nothing(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module.secrets, "token_hex", lambda size: "same")
    task = create(broker, "mine")
    lease = broker.acquire(task, "trainer")
    before = everything(broker)
    assert create(broker, "mine") == task
    assert everything(broker) == before
    assert lease is not None


# --- leases ---------------------------------------------------------------------------------------------


def test_there_is_one_trainer(broker: Broker) -> None:
    task = create(broker)
    assert broker.task_fields(task)["state"] == "waiting"
    lease = acquire(broker, task)
    assert lease.worker == "trainer"
    assert broker.task_fields(task)["state"] == "running"
    assert broker.acquire(task, "trainer") is None
    broker.release(lease)
    assert broker.acquire(task, "trainer") is not None


def test_actors_get_one_slot_each(broker: Broker) -> None:
    task = create(broker)
    leases = [acquire(broker, task, "actor", 3) for _ in range(3)]
    assert [lease.worker for lease in leases] == ["actor-0", "actor-1", "actor-2"]
    assert broker.acquire(task, "actor", 3) is None
    broker.release(leases[1])
    assert acquire(broker, task, "actor", 3).slot == 1


def test_a_lease_that_was_taken_but_not_answered_is_taken_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = create(broker)
    monkeypatch.setattr(broker_module.secrets, "token_hex", lambda size: "same call")
    assert broker.acquire(task, "trainer") == broker.acquire(task, "trainer")
    actor = acquire(broker, task, "actor")
    assert acquire(broker, task, "actor") == actor
    monkeypatch.undo()
    assert broker.acquire(task, "trainer") is None


def test_actors_alone_do_not_start_the_clock(broker: Broker) -> None:
    task = create(broker)
    acquire(broker, task, "actor")
    fields = broker.task_fields(task)
    assert fields["state"] == "waiting" and "started_ms" not in fields


def test_a_silent_worker_is_replaced_and_one_that_beats_is_not(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    task = create(broker)
    first = acquire(broker, task)
    monkeypatch.setattr(broker_module, "LEASE_MS", 100)
    ending = time.monotonic() + 0.3
    while time.monotonic() < ending:
        broker.beat(first, "{}")
        assert broker.acquire(task, "trainer") is None
    second = until(lambda: broker.acquire(task, "trainer"))
    assert second.token != first.token


def test_a_worker_that_was_cut_off_goes_on_where_nobody_replaced_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = create(broker)
    leases = [acquire(broker, task), acquire(broker, task, "actor")]
    monkeypatch.setattr(broker_module, "LEASE_MS", -1)  # their leases have run out
    for lease in leases:
        broker.beat(lease, "{}")
    broker.send(leases[1], b"message")


@pytest.mark.parametrize("what", EVERY_WRITE)
def test_whatever_a_replaced_worker_writes_is_refused(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    role: Any = what.partition("-")[0]
    task = create(broker)
    stale = acquire(broker, task, role, 1)
    broker.send(acquire(broker, task, "actor"), b"waits") if role == "trainer" else None
    monkeypatch.setattr(broker_module, "LEASE_MS", -1)
    acquire(broker, task, role, 1)
    before = everything(broker)
    with pytest.raises(LeaseLostError, match=stale.worker):
        EVERY_WRITE[what](broker, stale)
    assert not broker.finish(task, "failed", "stale", lease=stale)
    broker.release(stale)
    assert everything(broker) == before


@pytest.mark.parametrize("what", EVERY_WRITE)
@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_nothing_is_written_to_a_finished_task(broker: Broker, state: str, what: str) -> None:
    task = create(broker)
    lease = acquire(broker, task, what.partition("-")[0])
    broker.finish(task, state)
    before = everything(broker)
    with pytest.raises(TaskOverError, match=state):
        EVERY_WRITE[what](broker, lease)
    broker.release(lease)
    assert everything(broker).keys() == before.keys()
    assert broker.acquire(task, "trainer") is None
    assert broker.acquire(task, "actor") is None


def test_a_worker_of_a_lost_task_is_told(broker: Broker) -> None:
    task = create(broker)
    leases = {role: acquire(broker, task, role) for role in ("trainer", "actor")}
    broker.redis.flushall()
    for what, write in EVERY_WRITE.items():
        with pytest.raises(TaskGoneError, match="without its data"):
            write(broker, leases[what.partition("-")[0]])
    for lease in leases.values():
        broker.release(lease)
    broker.add_error(task, "trainer", "late")
    assert receive(broker, task, "0", 1, 1) == []
    assert broker.redis.keys() == []


def restore(broker: Broker, lease: Lease, **changes: Any) -> bool:
    kept: dict[str, Any] = {
        "backlog_limit_bytes": LIMIT,
        "elapsed_s": 100.0,
        "train_count": 7,
        "progress": {"env_steps": 30},
        "sequences": {"uid-a": 4},
        "parameters": (5, b"blob"),
        "checkpoint": b"state",
    }
    return broker.restore_task(lease, definition(), **{**kept, **changes})


def test_a_trainer_restores_its_lost_task_and_actors_take_their_places_again(broker: Broker) -> None:
    task = create(broker, "mine")
    trainer, first, second = acquire(broker, task), acquire(broker, task, "actor"), acquire(broker, task, "actor")
    assert not restore(broker, trainer), "a task that is there stays as it is"
    broker.redis.flushall()
    for lease in (trainer, first):
        with pytest.raises(TaskGoneError):
            broker.beat(lease, "{}")
    assert restore(broker, trainer) and not restore(broker, trainer)
    assert broker.find_task("mine") == task and [waiting for waiting, _ in broker.open_tasks()] == [task]
    assert broker.definition(task) == definition()
    found = broker.committed(task)
    assert (found.train_count, found.progress, found.version) == (7, {"env_steps": 30}, 5)
    assert found.position == Position("0", 0, {"uid-a": 4}) and 99 <= found.elapsed_s < 110
    assert broker.parameters_blob(task) == (5, b"blob") and broker.checkpoint_blob(task)[1] == b"state"
    assert broker.task_fields(task)["target_train_count"] == "100"
    broker.beat(trainer, "{}")
    assert broker.acquire(task, "trainer") is None
    assert broker.send(second, b"m").sent
    stranger = acquire(broker, task, "actor")
    assert stranger.slot == first.slot, "who is not back has no place"
    assert broker.acquire(task, "actor", 2) is None, "who is back keeps it, though it has not beaten yet"
    with pytest.raises(LeaseLostError, match="was replaced"):
        broker.send(first, b"m")
    # A trainer that comes late has no place to take: what another one did meanwhile must not be undone.
    broker.release(trainer)
    with pytest.raises(LeaseLostError):
        broker.beat(trainer, "{}")
    # The next token is above those that were given before.
    assert int(acquire(broker, task).token.partition(":")[0]) > int(trainer.token.partition(":")[0])


def test_a_task_of_many_actors_is_restored_without_parameters_too(broker: Broker) -> None:
    trainer = acquire(broker, create(broker))
    broker.redis.flushall()
    assert restore(broker, trainer, sequences={f"uid-{i}": i for i in range(20_000)}, parameters=(0, b""))
    assert broker.parameters_blob(trainer.task) == (0, None)
    assert broker.committed(trainer.task).position.sequences["uid-19999"] == 19999


def test_an_actor_learns_which_of_how_many_it_is(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    task = create(broker)
    acquire(broker, task)
    actors = [acquire(broker, task, "actor", slots=20) for _ in range(12)]
    places = [broker.beat(actor, "{}", count_actors=True) for actor in actors]
    assert [(place.rank, place.actors) for place in places] == [(i, 12) for i in range(12)]
    assert broker.beat(actors[3], "{}").actors == 0, "only who asks is told"
    for gone in (0, 7):
        broker.release(actors[gone])
    reply = broker.beat(actors[11], "{}", count_actors=True)
    assert (reply.rank, reply.actors) == (9, 10)
    monkeypatch.setattr(broker_module, "LEASE_MS", 30)
    until(lambda: broker.beat(actors[11], "{}", count_actors=True).actors == 1)


def test_actors_beyond_those_asked_for_enlarge_the_backlog(broker: Broker) -> None:
    task = create(broker)
    for _ in range(5):
        acquire(broker, task, "actor", slots=100)
    assert broker.committed(task).backlog_limit_bytes == 5 * LIMIT / 2
    assert broker.acquire(task, "actor", 2) is None


# --- experience -----------------------------------------------------------------------------------------


def test_messages_arrive_in_order_and_stay_until_they_are_committed(broker: Broker) -> None:
    task = create(broker)
    trainer, actor = acquire(broker, task), acquire(broker, task, "actor")
    for number in range(4):
        assert broker.send(actor, b"%d" % number).sent
    received = receive(broker, task, "0", 3, 1)
    assert [message for _, message in received] == [b"0", b"1", b"2"]
    assert [message for _, message in receive(broker, task, received[-1][0], 3, 1)] == [b"3"]
    commit(broker, trainer, position=Position(received[-1][0], 3, {}))
    assert [message for _, message in receive(broker, task, "0", 3, 1)] == [b"3"]


def test_another_trainer_finds_what_was_not_committed(broker: Broker) -> None:
    task = create(broker)
    trainer, actor = acquire(broker, task), acquire(broker, task, "actor")
    for number in range(3):
        broker.send(actor, b"%d" % number)
    received = receive(broker, task, "0", 3, 1)
    position = Position(received[0][0], 1, {"uid-a": 0, "uid-b": 5})
    commit(broker, trainer, train_count=8, progress={"env_steps": 40}, position=position, parameters=(3, b"blob"))
    commit(
        broker, trainer, train_count=9, progress={"env_steps": 41}, position=Position(received[0][0], 1, {"uid-a": 1})
    )
    broker.release(trainer)
    acquire(broker, task)
    found = broker.committed(task)
    assert found.progress == {"env_steps": 41}
    assert found.version == 3
    assert found.backlog_limit_bytes == LIMIT
    assert found.position == Position("0", 1, {"uid-a": 1, "uid-b": 5})
    assert [message for _, message in receive(broker, task, found.position.last, 9, 1)] == [b"1", b"2"]


def test_a_full_backlog_refuses_until_the_trainer_has_committed(broker: Broker) -> None:
    task = create(broker)
    trainer, actor = acquire(broker, task), acquire(broker, task, "actor")
    assert broker.send(actor, bytes(LIMIT - 10)).room == float("inf")  # what it was before
    assert broker.beat(actor, "{}").room == 10
    assert broker.send(actor, bytes(10)).sent
    refused = broker.send(actor, b"x")
    assert not refused.sent and refused.room == 0
    received = receive(broker, task, "0", 9, 1)
    assert [len(message) for _, message in received] == [LIMIT - 10, 10]
    position = Position(received[0][0], LIMIT - 10, {})
    commit(broker, trainer, position=position)
    commit(broker, trainer, position=position)  # its answer was lost
    assert broker.beat(actor, "{}").room == LIMIT - 10
    assert not broker.send(actor, bytes(LIMIT - 9)).sent
    assert broker.send(actor, bytes(LIMIT - 10)).sent


def test_an_empty_backlog_takes_a_message_above_the_limit(broker: Broker) -> None:
    task = create(broker)
    trainer, actor = acquire(broker, task), acquire(broker, task, "actor")
    assert broker.send(actor, bytes(3 * LIMIT)).sent
    assert not broker.send(actor, b"x").sent
    [(last, message)] = receive(broker, task, "0", 9, 1)
    commit(broker, trainer, position=Position(last, len(message), {}))
    assert broker.send(actor, bytes(2 * LIMIT)).sent


def test_receiving_waits_for_the_first_message(broker: Broker, server: EmbeddedBroker) -> None:
    task = create(broker)
    actor = acquire(broker, task, "actor")
    received: list[tuple[str, bytes]] = []
    waiting = threading.Thread(target=lambda: received.extend(receive(broker, task, "0", 9, 5_000)))
    waiting.start()
    until(lambda: int(broker.redis.info("clients")["blocked_clients"]))
    broker.send(actor, b"message")
    waiting.join(2)
    assert [message for _, message in received] == [b"message"]


def test_a_server_that_lost_its_last_second_does_not_block_or_open_the_backlog(broker: Broker) -> None:
    task = create(broker)
    trainer, actor = acquire(broker, task), acquire(broker, task, "actor")
    broker.send(actor, bytes(100))
    [(last, _)] = receive(broker, task, "0", 9, 1)
    for received_bytes in (50, 100_000):  # sent ones were lost, or commits were
        commit(broker, trainer, position=Position(last, received_bytes, {}))
        broker.send(actor, bytes(LIMIT - 10))
        assert broker.beat(actor, "{}").room == 10
        [(last, _)] = receive(broker, task, "0", 9, 1)


def test_what_stopping_actors_still_have_is_taken_above_the_limit_but_not_without_end(broker: Broker) -> None:
    task = create(broker)
    acquire(broker, task)
    actor = acquire(broker, task, "actor")
    assert broker.send(actor, bytes(LIMIT)).sent and not broker.send(actor, bytes(10)).sent
    taken = [broker.send(actor, bytes(LIMIT), is_last=True).sent for _ in range(10)]
    assert taken == [True] * broker_module.LAST_BACKLOGS + [False] * (10 - broker_module.LAST_BACKLOGS)


def test_a_row_whose_answer_was_lost_is_there_once(broker: Broker) -> None:
    task = create(broker)
    trainer = acquire(broker, task)
    for row in ({"train": 1}, {"train": 1}, {"train": 2}, {"train": 1}):
        broker.add_history(trainer, row)
    assert [row["train"] for row in broker.history(task)] == [1, 2, 1]


# --- parameters, counters, history ----------------------------------------------------------------------


def test_replies_tell_the_clock_and_the_newest_version(broker: Broker) -> None:
    task = create(broker, start_train_count=5)
    trainer, actor = acquire(broker, task), acquire(broker, task, "actor")
    reply = broker.beat(actor, "{}")
    assert (reply.train_count, reply.version) == (5, 0)
    assert broker.parameters_blob(task) == (0, None)
    commit(broker, trainer, train_count=50, parameters=(4, b"\x00blob\xff"))
    reply = broker.send(actor, b"m")
    assert (reply.train_count, reply.version) == (50, 4)
    assert broker.parameters_blob(task) == (4, b"\x00blob\xff")
    commit(broker, trainer, train_count=60)
    assert broker.beat(actor, "{}").train_count == 60
    assert broker.parameters_blob(task) == (4, b"\x00blob\xff")


def test_checkpoints_are_numbered_and_the_clients_comes_first(broker: Broker) -> None:
    task = broker.create_task("", definition(), LIMIT, b"start")
    assert broker.checkpoint_blob(task) == (0, b"start")
    lease = acquire(broker, task)
    broker.store_checkpoint(lease, b"later")
    assert broker.checkpoint_blob(task) == (1, b"later")
    assert broker.snapshot(task)["checkpoint"] == 1
    assert broker.checkpoint_blob(create(broker)) == (0, None)


def test_history_is_read_from_where_one_stopped(broker: Broker) -> None:
    task = create(broker)
    lease = acquire(broker, task)
    for train in range(4):
        broker.add_history(lease, {"train": train})
    rows = broker.history(task, count=3)
    assert [row["train"] for row in rows] == [0, 1, 2]
    assert [row["train"] for row in broker.history(task, rows[1]["id"])] == [2, 3]


def test_a_status_holds_what_workers_left(broker: Broker) -> None:
    task = create(broker)
    trainer, actor = acquire(broker, task), acquire(broker, task, "actor")
    assert broker.snapshot(task)["workers"] == {}
    broker.beat(actor, '{"a": 1}')
    broker.beat(trainer, '{"t": 1}')
    broker.add_history(trainer, {"train": 3}, '{"mean": 1}')
    broker.send(actor, b"12345")
    snapshot = broker.snapshot(task)
    assert {name: text for name, (_, text) in snapshot["workers"].items()} == {
        "actor-0": '{"a": 1}',
        "trainer": '{"t": 1}',
    }
    assert all(0 <= snapshot["now_ms"] - beat_ms < 5_000 for beat_ms, _ in snapshot["workers"].values())
    fields = snapshot["fields"]
    assert fields["evaluation"] == '{"mean": 1}'
    assert int(fields["sent_bytes"]) - int(fields["received_bytes"]) == 5
    broker.release(actor)
    assert broker.snapshot(task)["workers"].keys() == {"trainer"}
    broker.finish(task, "done", lease=trainer)
    broker.release(trainer)
    assert broker.snapshot(task)["workers"].keys() == {"trainer"}  # what it did stays to be seen


def test_errors_and_the_end_are_events(broker: Broker) -> None:
    task = create(broker)
    assert broker.events(task) == []
    broker.add_error(task, "actor-1", "it broke")
    broker.finish(task, "failed", "why")
    first, second = broker.events(task)
    assert (first.worker, first.message) == ("actor-1", "it broke")
    assert second == Event(second.id, "", "failed")
    assert broker.events(task, first.id) == [second]
    assert broker.task_fields(task)["error"] == "why"


def test_a_client_that_waits_is_woken_by_the_end(broker: Broker) -> None:
    task = create(broker)
    found: list[Event] = []
    waiting = threading.Thread(target=lambda: found.extend(broker.events(task, block_ms=5_000)))
    waiting.start()
    until(lambda: int(broker.redis.info("clients")["blocked_clients"]))
    broker.finish(task, "cancelled")
    waiting.join(2)
    assert [event.message for event in found] == ["cancelled"]


# --- the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(["done", "failed", "cancelled"], 2)))
def test_a_final_state_stays(broker: Broker, first: str, second: str) -> None:
    task = create(broker)
    assert broker.finish(task, first)
    assert not broker.finish(task, second)
    assert broker.task_fields(task)["state"] == first


def test_keys_belong_to_the_task_and_expire_after_its_end(broker: Broker) -> None:
    task = broker.create_task("", definition(), LIMIT, b"checkpoint")
    trainer, actor = acquire(broker, task), acquire(broker, task, "actor")
    broker.beat(actor, "{}")
    broker.send(actor, b"m")
    commit(broker, trainer, parameters=(1, b"p"))
    broker.add_history(trainer, {})
    broker.add_error(task, "trainer", "text")
    keys = {key.decode() for key in broker.redis.scan_iter()} - {"srl:tasks", "srl:queue"}
    parts = ("task", "actors", "workers", "experience", "checkpoint", "history", "events")
    assert keys == {f"srl:{task}:{part}" for part in parts}
    broker.finish(task, "done", lease=trainer)
    broker.add_error(task, "actor-0", "too late, but kept")
    remaining = {key.decode() for key in broker.redis.scan_iter()} - {"srl:tasks"}
    assert remaining == keys - {f"srl:{task}:experience"}
    assert all(0 < broker.redis.ttl(key) <= KEEP_FINISHED_S for key in remaining)


def test_an_error_after_the_end_of_a_quiet_task_expires_too(broker: Broker) -> None:
    task = create(broker)
    broker.finish(task, "cancelled")
    broker.redis.delete(f"srl:{task}:events")
    broker.add_error(task, "trainer", "late")
    assert broker.redis.ttl(f"srl:{task}:events") != -1


def test_two_tasks_never_mix(broker: Broker) -> None:
    one, two = create(broker), create(broker)
    leases = {task: (acquire(broker, task), acquire(broker, task, "actor")) for task in (one, two)}
    for task, (trainer, actor) in leases.items():
        broker.send(actor, task.encode())
        commit(broker, trainer, parameters=(1, task.encode()), progress={"of": task})
        broker.store_checkpoint(trainer, task.encode())
        broker.add_history(trainer, {"of": task})
        broker.add_error(task, "trainer", task)
        broker.beat(actor, f'{{"of": "{task}"}}')
    borrowed = dataclasses.replace(leases[one][0], task=two)
    with pytest.raises(LeaseLostError):
        broker.beat(borrowed, "{}")
    broker.finish(one, "done")
    for task in (one, two):
        assert broker.parameters_blob(task) == (1, task.encode())
        assert broker.checkpoint_blob(task) == (1, task.encode())
        assert [row["of"] for row in broker.history(task)] == [task]
        assert broker.events(task)[0].message == task
        assert broker.snapshot(task)["workers"]["actor-0"][1] == f'{{"of": "{task}"}}'
    assert [message for _, message in receive(broker, two, "0", 9, 1)] == [two.encode()]


# --- outages --------------------------------------------------------------------------------------------


@pytest.fixture(params=[None, 0], ids=["unix", "tcp"])
def own_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(port=request.param) as running:
        yield running


def test_an_outage_is_waited_out_with_one_line_each_way(
    own_server: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "srl")
    broker = Broker(own_server.parameters)
    broker.redis.ping()
    own_server.stop()
    tries: list[int] = []

    def restart() -> None:
        tries.append(1)
        if len(tries) == 3:
            own_server.start()

    assert persist(broker.redis.ping, broker, threading.Event(), restart)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        f"the broker at {broker.parameters.address} does not answer",
        f"the broker at {broker.parameters.address} answers again",
    ]


def test_a_stop_ends_the_wait_for_a_broker(own_server: EmbeddedBroker) -> None:
    broker = Broker(own_server.parameters)
    own_server.stop()
    stop = threading.Event()
    stop.set()
    assert persist(broker.redis.ping, broker, stop) is None


def test_who_does_not_wait_gets_a_clear_error(own_server: EmbeddedBroker) -> None:
    broker = Broker(own_server.parameters)
    assert once(broker.redis.ping, broker)
    own_server.stop()
    with pytest.raises(BrokerUnreachableError, match="does not answer"):
        once(broker.redis.ping, broker)


def test_a_call_that_is_wrong_is_not_repeated(own_server: EmbeddedBroker) -> None:
    broker = Broker(own_server.parameters)
    calls: list[int] = []

    def wrong() -> None:
        calls.append(1)
        broker.redis.execute_command("NONSENSE")

    with pytest.raises(Exception, match="unknown command"):
        persist(wrong, broker, threading.Event())
    assert calls == [1]
