"""Each user of a server may do its work and nothing else; what others try is refused by the server itself."""

import contextlib
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import toy
from click.testing import CliRunner
from servers import BINARIES, server_with_users, worker

import srl
from srl.base.errors import BrokerError
from srl.cli.main import cli
from srl.runner.distribution import RedisParameters, TaskManager
from srl.runner.distribution.accounts import ROLES
from srl.runner.distribution.broker import Broker
from srl.runner.distribution.outages import persist
from srl.runner.distribution.records import ScriptsMissingError

Users = dict[str, RedisParameters]


@pytest.fixture(scope="module", params=BINARIES)
def users(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    binary = BINARIES[request.param]
    if binary is None:
        pytest.skip(f"no {request.param}-server is installed")
    with server_with_users(binary, tmp_path_factory.mktemp("server")) as found:
        yield dict(found)


@pytest.fixture
def brokers(users: Users) -> Iterator[dict[str, Broker]]:
    with contextlib.ExitStack() as stack:
        yield {role: stack.enter_context(contextlib.closing(Broker(users[role]))) for role in ROLES}


@pytest.fixture(scope="module")
def manager(users: Users) -> Iterator[TaskManager]:
    with contextlib.closing(start(users)) as made:
        yield made
        made.cancel()


def start(users: Users, **limits: Any) -> TaskManager:
    runner = srl.Runner("CartPole-v1", toy.Config(), seed=1)
    return runner.train_distribution_start(users["client"], **{"actor_num": 1, "max_train_count": 10**9, **limits})


def test_a_run_in_which_everybody_has_a_user_of_its_own(users: Users, tmp_path: Path) -> None:
    manager = start(users, max_train_count=20_000, eval_episodes=1, eval_interval_s=0.1)
    with (
        worker("trainer", users["trainer"], tmp_path / "trainer.log", SRL_ALLOW_PLUGINS="toy"),
        worker("actor", users["actor"], tmp_path / "actor.log", SRL_ALLOW_PLUGINS="toy"),
    ):
        status = manager.train_wait(progress=False, history_save_dir=tmp_path / "history", timeout=60)
    logs = (tmp_path / "trainer.log").read_text() + (tmp_path / "actor.log").read_text()
    assert (status.state, status.train_count) == ("done", 20_000), logs
    assert "NOPERM" not in logs and "permission" not in logs
    roles = {row["role"] for row in srl.Runner.load_history(tmp_path / "history").rows}
    assert roles == {"trainer", "eval"}
    manager.close()


ATTACKS: dict[str, Callable[["redis.Redis[bytes]", str], Any]] = {
    "other parameters": lambda c, t: c.hset(f"srl:{t}:task", "parameters", b"mine"),
    "another definition": lambda c, t: c.hset(f"srl:{t}:task", "definition", "{}"),
    "the trainer's place": lambda c, t: c.hset(f"srl:{t}:task", "lease:trainer", "1:mine"),
    "no trainer": lambda c, t: c.hdel(f"srl:{t}:task", "lease:trainer"),
    "another checkpoint": lambda c, t: c.hset(f"srl:{t}:checkpoint", "blob", b"mine"),
    "the checkpoint": lambda c, t: c.hget(f"srl:{t}:checkpoint", "blob"),
    "history": lambda c, t: c.xadd(f"srl:{t}:history", {"row": "{}"}),
    "reading history": lambda c, t: c.xrange(f"srl:{t}:history"),
    "reading experience": lambda c, t: c.xrange(f"srl:{t}:experience"),
    "taking experience": lambda c, t: c.xread({f"srl:{t}:experience": "0"}),
    "no experience": lambda c, t: c.delete(f"srl:{t}:experience"),
    "trimmed experience": lambda c, t: c.xtrim(f"srl:{t}:experience", 0),
    "no task": lambda c, t: c.unlink(f"srl:{t}:task"),
    "an end by time": lambda c, t: c.expire(f"srl:{t}:task", 1),
    "a task of its own": lambda c, t: c.zadd("srl:queue", {"mine": 1}),
    "a copy": lambda c, t: c.copy(f"srl:{t}:task", "srl:mine:actors"),
    "loading a script": lambda c, t: c.script_load("return 1"),
    "a key of its own": lambda c, t: c.set("mine", "x"),
    "a foreign key": lambda c, t: c.get("other"),
    "all keys": lambda c, t: c.keys("*"),
    "scanning": lambda c, t: c.scan(),
    "an own script": lambda c, t: c.eval("while true do end", 0),
    "no scripts": lambda c, t: c.script_flush(),
    "a function": lambda c, t: c.function_load("#!lua name=mine\nredis.register_function('f', function() end)"),
    "everything": lambda c, t: c.flushall(),
    "this database": lambda c, t: c.flushdb(),
    "configuration": lambda c, t: c.config_get("*"),
    "a file": lambda c, t: c.config_set("dir", "/"),
    "saving": lambda c, t: c.save(),
    "users": lambda c, t: c.acl_list(),
    "a user": lambda c, t: c.execute_command("ACL", "SETUSER", "mine", "on", "nopass", "+@all", "~*"),
    "clients": lambda c, t: c.client_list(),
    "no clients": lambda c, t: c.execute_command("CLIENT", "KILL", "TYPE", "normal"),
    "monitoring": lambda c, t: c.execute_command("MONITOR"),
    "publishing": lambda c, t: c.publish("channel", "x"),
    "debugging": lambda c, t: c.execute_command("DEBUG", "SLEEP", "0"),
    "a replica": lambda c, t: c.execute_command("REPLICAOF", "127.0.0.1", "1"),
    "a module": lambda c, t: c.execute_command("MODULE", "LOAD", "/tmp/x.so"),
    "moving keys": lambda c, t: c.execute_command("MIGRATE", "127.0.0.1", "1", "srl:queue", 0, 1),
    "a blocked server": lambda c, t: c.execute_command("WAIT", 9, 0),
    "information": lambda c, t: c.info(),
    "the end": lambda c, t: c.execute_command("SHUTDOWN", "NOSAVE"),
}
OTHERS_WORK = list(ATTACKS).index("a key of its own")
"""Those before it are what a client or a trainer may do."""
READING = {"the checkpoint", "reading history", "reading experience", "taking experience"}
REFUSED = {
    **{role: list(ATTACKS)[OTHERS_WORK:] for role in ("client", "trainer")},
    "actor": list(ATTACKS),
    "viewer": [attack for attack in ATTACKS if attack not in READING],
}
CASES = [(role, attack) for role in ROLES for attack in REFUSED[role]]


@pytest.mark.parametrize(("role", "attack"), CASES)
def test_what_a_role_may_not_do_is_refused(
    users: Users, brokers: dict[str, Broker], manager: TaskManager, role: str, attack: str
) -> None:
    before = brokers["client"].redis.hgetall(f"srl:{manager.task}:task")
    with contextlib.closing(users[role].connect()) as client, pytest.raises(redis.exceptions.NoPermissionError):
        ATTACKS[attack](client, manager.task)
    assert brokers["client"].redis.hgetall(f"srl:{manager.task}:task") == before


def test_an_actor_cannot_use_the_scripts_of_others(brokers: dict[str, Broker], manager: TaskManager) -> None:
    actor, task = brokers["actor"], manager.task
    mine = actor.acquire(task, "actor")
    assert mine is not None and actor.send(mine, b"message").sent
    lease = brokers["trainer"].acquire(task, "trainer")
    assert lease is not None
    attacks: list[Callable[[], Any]] = [
        lambda: actor.acquire(task, "trainer"),
        lambda: actor.finish(task, "cancelled"),
        lambda: actor.beat(lease, "{}"),
        lambda: actor.commit(lease, train_count=9, progress={}, parameters=(9, b"mine")),
        lambda: actor.store_checkpoint(lease, b"mine"),
        lambda: actor.add_history(lease, {}),
        lambda: actor.release(lease),
        lambda: actor.receive(task, "0", 9, 1),
        lambda: actor.create_task("mine", brokers["client"].definition(task), 1),
    ]
    for attack in attacks:
        with pytest.raises(redis.exceptions.NoPermissionError):
            attack()
    assert brokers["trainer"].beat(lease, "{}").train_count == 0
    for broker, held in ((actor, mine), (brokers["trainer"], lease)):
        broker.release(held)


def test_a_viewer_sees_everything_and_changes_nothing(
    brokers: dict[str, Broker], users: Users, manager: TaskManager
) -> None:
    viewer, task = brokers["viewer"], manager.task
    before = brokers["client"].redis.hgetall(f"srl:{task}:task")
    with contextlib.closing(TaskManager(users["viewer"], task)) as seen:
        assert seen.get_status().task == task and task in [status.task for status in seen.tasks()]
        assert seen.history() == [] and seen.errors() == []
        attacks: list[Callable[[], Any]] = [
            seen.cancel,
            lambda: seen.end("mine"),
            lambda: viewer.acquire(task, "actor"),
            lambda: viewer.add_error(task, "mine", "mine"),
            lambda: viewer.write_bill("{}"),
            lambda: viewer.create_task("mine", brokers["client"].definition(task), 1),
        ]
        for attack in attacks:
            with pytest.raises(redis.exceptions.NoPermissionError):
                attack()
    assert brokers["client"].redis.hgetall(f"srl:{task}:task") == before


def test_an_actor_waits_until_somebody_loads_the_scripts(
    brokers: dict[str, Broker], users: Users, manager: TaskManager
) -> None:
    """The script cache of a server that was started again is empty."""
    actor = brokers["actor"]
    lease = actor.acquire(manager.task, "actor")
    assert lease is not None
    with contextlib.closing(users["admin"].connect()) as admin:
        admin.script_flush()
    with pytest.raises(ScriptsMissingError, match="no trainer or client"):
        actor.beat(lease, "{}")
    reply = persist(lambda: actor.beat(lease, "{}"), actor, threading.Event(), brokers["client"].load_scripts)
    assert reply is not None and reply.train_count == 0
    actor.release(lease)


def test_nobody_gets_in_without_a_user(users: Users) -> None:
    known = users["actor"]
    for credentials in ({}, {"password": "x"}, {"username": "actor", "password": "x"}, {"username": "root"}):
        stranger = RedisParameters(host=known.host, port=known.port, **credentials)
        with pytest.raises(BrokerError, match="refused the log-in"):
            stranger.wait_until_reachable(timeout_s=5)


def test_the_command_prints_hashes_and_keeps_passwords_for_their_owner(tmp_path: Path) -> None:
    with CliRunner().isolated_filesystem(tmp_path):
        first = CliRunner().invoke(cli, ["broker-acl"])
        Path("broker-passwords/actor").write_text("an own password\n")
        second = CliRunner().invoke(cli, ["broker-acl"])
        passwords = {role: Path("broker-passwords", role).read_text().strip() for role in ROLES}
        modes = {stat.S_IMODE(Path("broker-passwords", role).stat().st_mode) for role in ROLES}
        Path("broker-passwords/actor").write_text("two\nlines\n")
        refused = CliRunner().invoke(cli, ["broker-acl"])
    assert first.exit_code == second.exit_code == 0 and modes == {0o600}
    assert len(set(passwords.values())) == 4
    assert not any(password in second.output for password in passwords.values())
    changed = [line for line in second.output.splitlines() if line not in first.output.splitlines()]
    assert [line.split()[1] for line in changed] == ["actor"]
    assert refused.exit_code == 2 and "one line" in refused.output
