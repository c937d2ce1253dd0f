"""Whatever dies, the run goes on: real processes, a real server, real faults; every step is accounted for."""

import dataclasses
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import toy
from fleet import LANES, Fleet, Server, seeded
from proxy import Proxy
from waiting import until

import srl
from srl.base.env import EnvConfig

pytestmark = pytest.mark.timeout(900)


def create(fleet: Fleet, **limits: Any) -> str:
    config = toy.Config(samples_per_insert=2.0)
    config.memory.capacity = 2_000_000
    env = EnvConfig("chaos/Numbered-v0", kwargs={"directory": str(fleet.directory / "steps")})
    runner = srl.Runner(env, config, seed=1)
    manager = runner.train_distribution_start(
        fleet.server.parameters,
        len(fleet.actors),
        **{"num_envs": LANES, "eval_episodes": 0, "checkpoint_interval_s": 1.0, "max_train_count": 10**9, **limits},
    )
    task: str = manager.task
    manager.close()
    for path in (fleet.directory / "steps").iterdir():
        path.unlink()  # of the env that the client looked at
    return task


def disturb(fleet: Fleet, rng: random.Random, kills: int, roles: dict[str, int]) -> dict[str, int]:
    """Kill, pause and stop processes at random moments, and start them again as a cluster would.

    Args:
        kills: how many.
        roles: weight of each role among them.
    """
    count = dict.fromkeys(roles, 0)
    first = rng.sample(list(roles), len(roles))  # each role at least once
    while sum(count.values()) < kills:
        role = first.pop() if first else rng.choices(list(roles), list(roles.values()))[0]
        process = {"trainer": fleet.trainer, "actor": rng.choice(fleet.actors), "client": fleet.client}[role]
        if not process.is_running:
            process.start()
        time.sleep(rng.uniform(0.2, 1.5))  # when something dies is up to chance
        kind = 1.0 if count[role] == 0 else rng.random()
        if kind < 0.1:
            process.signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.1, 3.0))
            process.signal(signal.SIGCONT)
        elif kind < 0.2 and role == "actor":
            process.stop()
        else:
            fleet.kill(process)
            count[role] += 1
        if rng.random() < 0.8:
            process.start() if not process.is_running else None
    fleet.start()
    return count


@pytest.mark.parametrize(
    ("kills", "append_only"),
    [
        pytest.param(2, False, id="empty"),
        pytest.param(2, True, id="append-only", marks=pytest.mark.slow),
        pytest.param(8, False, id="empty-long", marks=pytest.mark.slow),
        pytest.param(8, True, id="append-only-long", marks=pytest.mark.slow),
    ],
)
def test_a_killed_server_comes_back_and_the_run_goes_on(tmp_path: Path, kills: int, append_only: bool) -> None:
    rng = seeded()
    with Fleet(tmp_path, actors=2, append_only=append_only) as fleet:
        task, counters_went_back = create(fleet), False
        fleet.start()
        for _ in range(kills):
            fleet.wait_for_steps(rng.randrange(500, 5_000))
            before = fleet.progress
            if rng.random() < 0.3:
                fleet.server.pause(rng.uniform(0.5, 10.0))
                fleet.wait_for_steps(500)
            fleet.server.kill()
            fleet.kills += 1
            time.sleep(rng.uniform(0.0, 3.0))
            is_alone = rng.random() < 0.5
            if not is_alone:
                fleet.kill(fleet.trainer)  # what is on the volume is enough, though it is a moment old
                counters_went_back = True
            fleet.server.start()
            fleet.start()
            until(lambda: fleet.progress, what="the task's return")
            if is_alone and not append_only:
                # Without data of its own the server holds what its trainer restored: nothing is older than before.
                assert fleet.progress["env_steps"] >= before["env_steps"]
        fleet.wait_for_steps(500)
        fleet.settle()
        taken, inserted = fleet.check_every_step(killed_actors=0, losses=True)
        print(f"of {taken} steps {inserted} were inserted; lost messages: {fleet.progress['messages_lost']}")
        set_target(fleet, task, fleet.progress["train_count"] + 2_000)
        finish(fleet, task, counters_went_back=counters_went_back)


@pytest.mark.parametrize(
    "outages_s",
    [
        pytest.param([2.0], id="short", marks=pytest.mark.slow),
        pytest.param([30.0, 3.0, 12.0, 1.0], id="long", marks=pytest.mark.slow),
    ],
)
def test_a_bad_network_loses_nothing(tmp_path: Path, outages_s: list[float]) -> None:
    rng = seeded()
    server = Server(tmp_path / "server", append_only=False)
    server.start()
    with Proxy(server.port, rng) as proxy:
        address = dataclasses.replace(server.parameters, port=proxy.port)
        with Fleet(tmp_path, actors=2, address=address, server=server) as fleet:
            task = create(fleet)
            fleet.start()
            fleet.wait_for_steps(500)
            proxy.delay_s, proxy.loss = 0.05, 0.05
            fleet.wait_for_steps(500)
            for outage_s in outages_s:
                for interrupt in (proxy.cut, lambda: setattr(proxy, "is_silent", True)):
                    interrupt()
                    time.sleep(outage_s)  # the fault itself takes this long
                    assert all(process.is_running for process in fleet.processes), "an outage ends nobody"
                    proxy.mend()
                    fleet.wait_for_steps(500)
            proxy.delay_s = proxy.loss = 0.0
            fleet.settle()
            taken, inserted = fleet.check_every_step(killed_actors=0)
            print(f"of {taken} steps {inserted} were inserted")
            for actor in fleet.actors:
                assert actor.output.count("does not answer") == actor.output.count("answers again")
                assert actor.output.count("does not answer") <= 2 * len(outages_s), "one line each time it goes"
            set_target(fleet, task, fleet.progress["train_count"] + 2_000)
            finish(fleet, task)


def finish(fleet: Fleet, task: str, *, counters_went_back: bool = False) -> None:
    """Let the run end at the count it was asked for, and check what everybody says of that."""
    fleet.start()
    target = int(fleet.broker.task_fields(task)["target_train_count"])
    until(lambda: fleet.broker.task_fields(task).get("state") == "done", 240, "the end")
    assert int(fleet.broker.task_fields(task)["train_count"]) == target
    until(lambda: f"the client saw: done {target}" in fleet.client.output, what="the client's end")
    rows = srl.Runner.load_history(fleet.directory / "history").rows
    steps = [row["step"] for row in rows if row["role"] == "trainer"]
    assert counters_went_back or steps == sorted(steps)
    assert rows[-1]["train"] == target
    saved = sorted(int(path.name) for path in (fleet.directory / "checkpoints").iterdir() if path.name.isdigit())
    assert saved[-1] == target


@pytest.mark.parametrize(
    ("kills", "append_only"),
    [
        pytest.param(8, False, id="short"),
        pytest.param(80, False, id="long", marks=pytest.mark.slow),
    ],
)
def test_killed_workers_and_clients_lose_nothing(tmp_path: Path, kills: int, append_only: bool) -> None:
    rng = seeded()
    with Fleet(tmp_path, actors=2, append_only=append_only) as fleet:
        task = create(fleet)
        fleet.start()
        fleet.wait_for_steps(500)
        killed = disturb(fleet, rng, kills, {"trainer": 1, "actor": 4, "client": 1})
        fleet.wait_for_steps(500)
        fleet.settle()
        taken, inserted = fleet.check_every_step(killed_actors=killed["actor"])
        # A message counts the steps of its lanes, also those whose segment is not complete yet.
        assert inserted <= fleet.progress["env_steps"] <= taken
        print(f"killed {killed}; of {taken} steps {inserted} were inserted, the rest was with killed actors")
        # The same task goes on to an end that is set now.
        target = fleet.progress["train_count"] + 2_000
        set_target(fleet, task, target)
        finish(fleet, task)


def set_target(fleet: Fleet, task: str, target: int) -> None:
    """Change the asked count of a task while nobody works on it."""
    definition = fleet.broker.definition(task)
    run = {**definition.run, "max_train_count": target}
    changed = dataclasses.replace(definition, run=run)
    fleet.broker.redis.hset(
        f"srl:{task}:task",
        mapping={"definition": json.dumps(dataclasses.asdict(changed)), "target_train_count": target},
    )
