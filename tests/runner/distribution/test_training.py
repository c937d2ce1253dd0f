"""Trainers, actors and clients as real processes that are paused, stopped and killed."""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import envs  # noqa: F401  # registers test/Faulty-v0
import pytest
import toy
from counted_env import steps_taken
from waiting import until

import srl
from srl.algorithms import dqn
from srl.base.env import EnvConfig
from srl.base.errors import BrokerError, WorkerError
from srl.runner.distribution import RedisParameters, TaskManager
from srl.runner.distribution.broker import Broker
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.distribution.local_workers import LocalWorkers
from srl.runner.distribution.wire import decode_tree

ALLOW = ["toy", "counted_env"]


@pytest.fixture
def server() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as running:
        yield running


@pytest.fixture
def broker(server: EmbeddedBroker) -> Broker:
    return Broker(server.parameters)


class Worker:
    """A worker process; its output is kept."""

    def __init__(
        self, parameters: RedisParameters, role: str, log: Path, allow: list[str] | None, options: Sequence[str]
    ) -> None:
        environment = {
            **os.environ,
            **parameters.to_env(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "SRL_ALLOW_PLUGINS": ",".join(ALLOW if allow is None else allow),
        }
        self._log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "srl.runner.distribution.worker", role, *options],
            stdin=subprocess.PIPE,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=environment,
        )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def end(self, number: int) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(20)


@pytest.fixture
def start_worker(server: EmbeddedBroker, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(role: str, allow: list[str] | None = None, options: Sequence[str] = ()) -> Worker:
        workers.append(Worker(server.parameters, role, tmp_path / f"worker-{len(workers)}.log", allow, options))
        return workers[-1]

    yield start
    for worker in workers:
        assert worker.process.stdin is not None
        worker.process.stdin.close()
    for worker in workers:
        worker.process.wait(20)


def make_runner(**kwargs: Any) -> srl.Runner:
    return srl.Runner(EnvConfig("test/Counted-v0", kwargs=kwargs), toy.Config(), seed=1)


def start_task(server: EmbeddedBroker, runner: srl.Runner, actor_num: int = 1, **limits: Any) -> TaskManager:
    arguments = {"num_envs": 4, "eval_episodes": 0, **limits}
    manager: TaskManager = runner.train_distribution_start(server.parameters, actor_num, **arguments)
    return manager


def test_train_mp_does_exactly_what_was_asked(tmp_path: Path) -> None:
    config = dqn.Config(lr=0.002)
    config.hidden_block.set_mlp((16,))
    config.memory.set_proportional_memory()
    config.memory.capacity, config.memory.warmup_size = 2000, 100
    runner = srl.Runner("CartPole-v1", config, seed=3)
    status = runner.train_mp(
        actor_num=2,
        max_train_count=301,
        eval_episodes=1,
        checkpoint_save_dir=tmp_path / "checkpoints",
        history_save_dir=tmp_path / "history",
        progress=False,
    )
    assert (status.state, status.train_count, runner.train_count) == ("done", 301, 301)
    assert runner.env_steps == status.env_steps >= 400
    assert {actor.worker for actor in status.actors} == {"actor-0", "actor-1"}
    assert len(runner.evaluate(3)) == 3
    assert (tmp_path / "checkpoints" / "301").is_dir()
    assert srl.Runner.load_history(tmp_path / "history").rows[-1]["train"] == 301
    runner.train(max_train_count=20, eval_episodes=0, progress=False)
    assert runner.train_count == 321


def test_train_mp_says_what_broke_in_a_worker() -> None:
    with pytest.raises(WorkerError, match=r"(?s)actor-0.*Traceback.*the counted env broke"):
        make_runner(fail_at=1).train_mp(max_train_count=1000, num_envs=2, eval_episodes=0, progress=False)


TRAIN_MP = """
import sys, toy, srl, counted_env
from srl.utils.common import logger_print
logger_print()
runner = srl.Runner("test/Counted-v0", toy.Config())
try:
    where = {"checkpoint_save_dir": sys.argv[1], "history_save_dir": sys.argv[1]}
    runner.train_mp(max_train_count=1_000_000, eval_episodes=0, **where)
finally:
    print("has", runner.train_count, "updates")
"""


def test_train_mp_that_is_stopped_keeps_what_was_learned(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", TRAIN_MP, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        until(lambda: any(row.get("train", 0) > 0 for row in rows(tmp_path)))
        run.send_signal(signal.SIGTERM)
        output = run.stdout.read()
    assert run.returncode == 143, output
    [count] = re.findall(r"has (\d+) updates", output)
    loaded = make_runner()
    loaded.load_checkpoint(tmp_path)
    assert loaded.train_count == int(count) > 0
    assert "srl trainer" not in output and "goes on" not in output  # it started the workers, and they have ended


def rows(directory: Path) -> list[dict[str, Any]]:
    return srl.Runner.load_history(directory).rows if (directory / "history.jsonl").exists() else []


@pytest.mark.slow
def test_train_mp_outlives_its_broker_and_its_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[EmbeddedBroker] = []
    workers: list[LocalWorkers] = []
    monkeypatch.setattr(EmbeddedBroker, "__enter__", lambda self: (self.start(), started.append(self), self)[-1])
    enter = LocalWorkers.__enter__
    monkeypatch.setattr(LocalWorkers, "__enter__", lambda self: (enter(self), workers.append(self), self)[-1])
    killed = []

    def kill() -> None:
        until(lambda: started and workers)
        manager = TaskManager(started[0].parameters)
        pids = [started[0].pid, workers[0].pids["actor-0"], workers[0].pids["trainer"]]
        for pid in pids:
            seen = until(lambda: manager.get_status().train_count)
            os.kill(pid, signal.SIGKILL)
            # A client that does not wait is told that the broker does not answer, or does not know the task.
            until(lambda seen=seen: goes_on(manager, seen))
            killed.append(pid)

    def goes_on(manager: TaskManager, seen: int) -> bool:
        try:
            return manager.get_status().train_count > seen
        except BrokerError:
            return False

    killer = threading.Thread(target=kill)
    killer.start()
    runner = make_runner()
    status = runner.train_mp(
        max_train_count=60_000, eval_episodes=0, progress=False, checkpoint_interval_s=0.2, history_save_dir=tmp_path
    )
    killer.join()
    assert len(killed) == 3
    assert (status.state, status.train_count, runner.train_count) == ("done", 60_000, 60_000)


def test_local_workers_that_always_die_are_given_up_and_none_is_left(server: EmbeddedBroker, tmp_path: Path) -> None:
    with LocalWorkers(server.parameters, 1, tmp_path, ALLOW) as workers:
        manager = start_task(server, make_runner(), max_train_count=1_000_000)
        until(lambda: manager.get_status().env_steps)
        pids = set(workers.pids.values())

        def check() -> None:
            os.kill(workers.pids["actor-0"], signal.SIGKILL)
            until(lambda: Path(f"/proc/{workers.pids['actor-0']}/status").read_text().count("State:\tZ"))
            workers.check()
            pids.update(workers.pids.values())

        with pytest.raises(WorkerError, match=r"(?s)actor-0 ended with exit code -9, again.*actor-0\.log"):
            manager.train_wait(progress=False, check=check)
    assert len(pids) == 5 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "stopped" in (tmp_path / "trainer.log").read_text()


@pytest.mark.parametrize(
    "has_volume", [pytest.param(True, id="volume"), pytest.param(False, id="no-volume", marks=pytest.mark.slow)]
)
def test_a_killed_trainer_loses_no_step_and_counts_none_twice(
    server: EmbeddedBroker, broker: Broker, start_worker: Callable[..., Worker], tmp_path: Path, has_volume: bool
) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    runner = make_runner(directory=str(counts))
    runner.config.memory.capacity = 1_000_000
    manager = start_task(server, runner, 2, timeout=300)
    options = [str(tmp_path / "volume")] if has_volume else []
    trainers, actors = [start_worker("trainer", options=options)], [start_worker("actor"), start_worker("actor")]
    seen = until(lambda: manager.get_status().env_steps)
    until(lambda: manager.get_status().env_steps > seen + 1_000)
    trainers[0].end(signal.SIGKILL)
    trainers.append(start_worker("trainer", options=options))
    until(lambda: "goes on at" in trainers[-1].output)
    seen = manager.get_status().env_steps
    until(lambda: manager.get_status().env_steps > seen)
    assert [actor.end(signal.SIGTERM) for actor in actors] == [0, 0]
    until(lambda: manager.get_status().backlog_bytes == 0)
    assert trainers[-1].end(signal.SIGTERM) == 0
    status = manager.get_status()
    taken = steps_taken(counts)
    assert status.env_steps == taken
    lost = "memory of the trainer before is not here"
    assert [lost in trainer.output for trainer in trainers] == [False, not has_volume]
    if has_volume:
        # Every transition is in the memory once; the last step of a cut segment comes with the next one.
        assert status.memory_size == taken


def test_killed_workers_are_replaced_and_the_count_is_exact(
    server: EmbeddedBroker, broker: Broker, start_worker: Callable[..., Worker]
) -> None:
    manager = start_task(server, make_runner(), max_train_count=15_000, checkpoint_interval_s=0.2)
    trainer, actor = start_worker("trainer"), start_worker("actor")
    until(lambda: broker.checkpoint_blob(manager.task)[0] >= 2)
    actor.end(signal.SIGKILL)
    trainer.end(signal.SIGKILL)
    killed_s = time.monotonic()
    before = manager.get_status()
    number, blob = broker.checkpoint_blob(manager.task)
    assert not before.finished and blob is not None
    restart = decode_tree(blob)[1]["train_count"]
    others = start_worker("trainer"), start_worker("actor")
    until(lambda: "goes on at" in others[0].output, 20)
    assert time.monotonic() - killed_s < 15
    status = manager.train_wait(progress=False, timeout=60)
    assert (status.state, status.train_count) == ("done", 15_000)
    assert f"goes on at {restart} updates" in others[0].output
    assert broker.checkpoint_blob(manager.task)[0] > number
    assert status.env_steps > before.env_steps > 0
    assert status.actors[0].worker == "actor-0" and "actor-0: serving" in others[1].output


def test_workers_that_are_paused_and_stopped_lose_nothing(
    server: EmbeddedBroker, broker: Broker, start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    manager = start_task(server, make_runner(directory=str(counts)), actor_num=2, timeout=100)
    trainer, actors = start_worker("trainer"), [start_worker("actor"), start_worker("actor")]
    until(lambda: manager.get_status().env_steps > 1000)
    trainer.process.send_signal(signal.SIGSTOP)
    until(lambda: "backlog is full" in str(manager.get_status().actors))
    trainer.process.send_signal(signal.SIGCONT)
    seen = manager.get_status().env_steps
    until(lambda: manager.get_status().env_steps > seen)
    assert [actor.end(signal.SIGTERM) for actor in actors] == [0, 0]
    assert manager.get_status().actors == ()
    until(lambda: manager.get_status().backlog_bytes == 0)
    assert manager.get_status().env_steps == steps_taken(counts)
    assert trainer.end(signal.SIGTERM) == 0
    # It left a checkpoint of its very last update, and the run goes on from there.
    left = manager.get_status()
    blob = broker.checkpoint_blob(manager.task)[1]
    assert blob is not None and decode_tree(blob)[1]["train_count"] == left.train_count
    assert (left.state, left.trainer) == ("running", None)
    other = start_worker("trainer")
    until(lambda: f"goes on at {left.train_count} updates" in other.output)
    assert manager.get_status().env_steps == left.env_steps


CLIENT = """
import toy, srl, counted_env
from srl.runner.distribution import RedisParameters
from srl.utils.common import logger_print
logger_print()
srl.Runner("test/Counted-v0", toy.Config()).train_distribution(RedisParameters(), max_train_count=1_000_000)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_client_that_is_stopped_leaves_the_task_running(server: EmbeddedBroker, number: int, code: int) -> None:
    environment = {**os.environ, **server.parameters.to_env(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert client.stdout is not None
    for line in client.stdout:
        if "no trainer has joined yet" in line:
            break
    client.send_signal(number)
    output = client.stdout.read()
    assert client.wait(20) == code
    assert "stopped waiting; task" in output and "goes on" in output
    assert TaskManager(server.parameters).get_status().state == "waiting"


def test_an_env_of_ones_own_needs_to_be_allowed(server: EmbeddedBroker, start_worker: Callable[..., Worker]) -> None:
    runner = srl.Runner("counted_env:test/Counted-v0", toy.Config(), seed=1)
    start_worker("trainer", ["toy"])
    careful = start_worker("actor", ["toy"])
    with pytest.raises(WorkerError, match=r"actor-0: .*'counted_env'.*--allow counted_env"):
        start_task(server, runner, max_train_count=10).train_wait(progress=False, timeout=30)
    assert careful.end(signal.SIGTERM) == 0
    start_worker("actor")
    status = start_task(server, runner, max_train_count=10).train_wait(progress=False, timeout=30)
    assert status.state == "done"


def test_an_unfit_actor_does_not_end_a_healthy_run(
    server: EmbeddedBroker, broker: Broker, start_worker: Callable[..., Worker]
) -> None:
    runner = srl.Runner("counted_env:test/Counted-v0", toy.Config(), seed=1)
    manager = start_task(server, runner, actor_num=2, max_train_count=100_000_000)
    start_worker("trainer")
    start_worker("actor")
    until(lambda: manager.get_status().train_count > 0)
    unfit = start_worker("actor", allow=["toy"])
    until(lambda: "counted_env" in unfit.output)
    until(lambda: any("counted_env" in message for message in (event.message for event in broker.events(manager.task))))
    before = manager.get_status().train_count
    until(lambda: manager.get_status().train_count > before)
    assert manager.get_status().state == "running"
    assert manager.cancel()


def test_an_env_that_hangs_in_the_actors_process_ends_it_with_its_stack(
    server: EmbeddedBroker, broker: Broker, start_worker: Callable[..., Worker]
) -> None:
    env = EnvConfig("test/Faulty-v0", {"how": "hang", "at_reset": 5}, env_timeout_s=0.5)
    manager = start_task(server, srl.Runner(env, toy.Config()), max_train_count=100_000_000)
    start_worker("trainer")
    actor = start_worker("actor", ["toy", "envs"])
    assert actor.process.wait(30) == 70
    told = [event.message for event in broker.events(manager.task)]
    assert len(told) == 1
    assert re.search(
        r"(?s)test/Faulty-v0 lane \d: a reset takes longer than env_timeout_s = 0.5 s, at step 0 of its episode 4\."
        r".*envs\.py.*in _break.*env_processes=True",
        told[0],
    )
    assert not [name for name in broker.snapshot(manager.task)["workers"] if name != "trainer"]
    assert manager.cancel()


def test_an_env_that_hangs_when_its_task_ends_does_not_hold_the_actor(
    server: EmbeddedBroker, start_worker: Callable[..., Worker]
) -> None:
    env = EnvConfig("test/Faulty-v0", {"how": "hang", "at_step": 50}, env_timeout_s=4.0)
    manager = start_task(server, srl.Runner(env, toy.Config()), max_train_count=100_000_000)
    start_worker("trainer")
    actor = start_worker("actor", ["toy", "envs"])
    until(lambda: any(actor.parameter_version for actor in manager.get_status().actors))
    assert manager.cancel()
    assert actor.process.wait(30) == 70


def test_a_client_that_comes_back_late_gets_the_whole_history(
    server: EmbeddedBroker, broker: Broker, tmp_path: Path
) -> None:
    manager = start_task(server, make_runner(), max_train_count=10)
    with broker.redis.pipeline(transaction=False) as pipe:
        for number in range(12_000):
            pipe.xadd(f"srl:{manager.task}:history", {"row": f'{{"train": {number}}}'})
        pipe.execute()
    manager.cancel()
    TaskManager(server.parameters).train_wait(history_save_dir=tmp_path, progress=False)
    assert [row["train"] for row in rows(tmp_path)] == list(range(12_000))


@pytest.mark.parametrize("role", ["trainer", "actor"])
def test_a_worker_without_a_broker_says_so_and_fails(role: str, tmp_path: Path) -> None:
    with EmbeddedBroker(port=0) as gone:
        parameters = gone.parameters
    parameters.connect_timeout_s = 0.2
    worker = Worker(parameters, role, tmp_path / "log", None, [])
    assert worker.process.wait(20) == 1
    assert "no broker could be used at redis://127.0.0.1" in worker.output
    assert "Traceback" not in worker.output


def test_workers_end_with_the_process_that_started_them(server: EmbeddedBroker, tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from srl.runner.distribution import RedisParameters
from srl.runner.distribution.local_workers import LocalWorkers
with LocalWorkers(RedisParameters(), 1, Path({str(tmp_path)!r}), ["toy"]) as workers:
    print(*workers.pids.values(), flush=True)
    sys.stdin.read()
"""
    environment = {**os.environ, **server.parameters.to_env(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    descriptors = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
    until(lambda: all("waiting for tasks" in path.read_text() for path in tmp_path.glob("*.log")))
    parent.kill()
    parent.wait()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 20)[0]
        os.close(descriptor)


def test_few_broker_commands_are_needed(server: EmbeddedBroker, broker: Broker, tmp_path: Path) -> None:
    config = toy.Config(updates_per_dispatch=16)
    runner = srl.Runner("MountainCar-v0", config, seed=1)
    manager: TaskManager = runner.train_distribution_start(server.parameters, 2, timeout=60)
    with LocalWorkers(server.parameters, 2, tmp_path, ALLOW):
        until(lambda: manager.get_status().env_steps > 2000)
        broker.redis.config_resetstat()
        before = manager.get_status().env_steps
        manager.train_wait(timeout=3, progress=False)
        requests = broker.redis.info("stats")["total_reads_processed"]  # a script is one command
        transitions = manager.get_status().env_steps - before
    assert requests / transitions <= 0.05, (requests, transitions)
