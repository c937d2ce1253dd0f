"""What it costs that nothing is lost, and how long it takes until the run goes on.

python -m benchmarks.reliability fail-over     # seconds from a kill to the next update or step
python -m benchmarks.reliability killed-actors # Pendulum with an actor killed every 5 s, 5 seeds
python -m benchmarks.reliability overhead      # updates/s with frequent checkpoints and with none, in turns
python -m benchmarks.reliability soak          # resident memory of trainer and actor over 20 minutes
python -m benchmarks.reliability checks        # share of the time from actor to memory that checks of messages take
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import srl
from benchmarks.learning import PRESETS, make_config
from benchmarks.speed import LANES, make_actor, rate
from srl.algorithms import dqn
from srl.base.define import EnvObservationTypes
from srl.base.errors import SrlError
from srl.base.segment import Segment
from srl.rl.processors.image_processor import ImageProcessor
from srl.runner.distribution import TaskManager, wire
from srl.runner.distribution.broker import MESSAGE_STEPS, Broker
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.distribution.gate import Gate
from srl.runner.distribution.local_workers import LocalWorkers
from srl.runner.distribution.records import TaskDefinition
from srl.runner.distribution.servers import configure_actor_process
from srl.runner.lanes import make_lanes

PENDULUM = PRESETS["pendulum"]


def main() -> None:
    """Run one measurement and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fail-over")
    command.add_argument("--kills", type=int, default=5, help="of each role")
    command.set_defaults(run=fail_over)
    command = commands.add_parser("killed-actors")
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--every-s", type=float, default=5.0)
    command.set_defaults(run=killed_actors)
    command = commands.add_parser("overhead")
    command.add_argument("--repeats", type=int, default=5)
    command.set_defaults(run=overhead)
    command = commands.add_parser("soak")
    command.add_argument("--minutes", type=float, default=20.0)
    command.set_defaults(run=soak)
    command = commands.add_parser("checks")
    command.add_argument("--repeats", type=int, default=9)
    command.set_defaults(run=checks)
    arguments = parser.parse_args()
    arguments.run(arguments)


@contextmanager
def running(
    runner: srl.Runner, actors: int, port: int | None = None, **limits: Any
) -> Iterator[tuple[TaskManager, LocalWorkers, EmbeddedBroker]]:
    """Give a task of the runner on an embedded broker, and the workers that serve it."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedBroker(port=port) as broker:
        manager = runner.train_distribution_start(broker.parameters, actors, **limits)
        work_dir = Path(directory, "work")
        modules = runner.env_config.modules()
        with LocalWorkers(broker.parameters, actors, Path(directory, "logs"), modules, work_dir) as workers:
            yield manager, workers, broker
        manager.close()


def fail_over(arguments: argparse.Namespace) -> None:
    """Kill each role and wait for what it does to be done again."""
    runner = pendulum(0, updates_per_step=0.25)
    with running(runner, 1, max_train_count=10**9, eval_episodes=0) as (manager, workers, broker):

        def steps() -> int:
            return manager.get_status().env_steps

        def updates() -> int:
            return manager.get_status().train_count

        def goes_on(counter: Callable[[], int], seen: int) -> bool:
            broker.check()
            workers.check()  # which start again what has died
            return patiently(counter) > seen

        # The bound on restarts is for workers that cannot run at all.
        workers.restarts.most = broker.restarts.most = 10**6
        until(lambda: updates() > 1_000)
        roles: dict[str, tuple[Callable[[], int], Callable[[], int]]] = {
            "trainer": (lambda: workers.pids["trainer"], updates),
            "actor": (lambda: workers.pids["actor-0"], steps),
            "broker (comes back empty)": (lambda: broker.pid, steps),
        }
        for role, (process, counter) in roles.items():
            times_s = []
            for _ in range(arguments.kills):
                until(lambda: manager.get_status().trainer is not None and manager.get_status().actors)
                seen = counter()
                until(lambda seen=seen, counter=counter: counter() > seen)
                os.kill(process(), signal.SIGKILL)
                started_s, seen = time.monotonic(), patiently(counter)
                until(lambda seen=seen, counter=counter: goes_on(counter, seen))
                times_s.append(time.monotonic() - started_s)
            print(
                f"{role}: goes on after {statistics.median(times_s):.1f} s ({min(times_s):.1f} to {max(times_s):.1f})"
            )


def killed_actors(arguments: argparse.Namespace) -> None:
    """Train Pendulum with two actors, one of which is killed every few seconds."""
    means = []
    for seed in range(arguments.seeds):
        runner, rng, kills = pendulum(seed), random.Random(seed), 0
        with running(runner, 2, max_train_count=PENDULUM.updates, eval_episodes=0) as (manager, workers, _):
            done = threading.Event()

            def kill(workers: LocalWorkers = workers, done: threading.Event = done, rng: random.Random = rng) -> None:
                nonlocal kills
                while not done.wait(arguments.every_s):
                    os.kill(workers.pids[f"actor-{rng.randrange(2)}"], signal.SIGKILL)
                    kills += 1

            # The bound on restarts is for workers that cannot run at all.
            workers.restarts.most = 10**6
            started_s = time.monotonic()
            killer = threading.Thread(target=kill)
            killer.start()
            try:
                manager.train_wait(progress=False, check=workers.check)
            finally:
                done.set()
                killer.join()
            manager.load_into(runner)
        means.append(statistics.mean(runner.evaluate(100)))
        print(f"seed {seed}: mean {means[-1]:.1f}, {kills} kills in {time.monotonic() - started_s:.0f} s", flush=True)
    print(f"mean of 100 greedy episodes: lowest {min(means):.1f}, of {len(means)} seeds {means}")


def overhead(arguments: argparse.Namespace) -> None:
    """Compare the learner's rate of runs with default checkpoints and with none."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(arguments.repeats):
        for name, limits in {
            "with": {},
            "without": {"checkpoint_interval_s": 1e6, "checkpoint_interval_updates": 10**9},
        }.items():
            runner = pendulum(0)
            runner.config.samples_per_insert = 1e6  # the learner waits for nobody
            with running(runner, 1, timeout=25, eval_episodes=0, **limits) as (manager, _, _):
                until(lambda manager=manager: manager.get_status().train_count > 1_000)
                started_s, seen = time.monotonic(), manager.get_status().train_count
                threading.Event().wait(15)
                rates[name].append((manager.get_status().train_count - seen) / (time.monotonic() - started_s))
                manager.cancel()
            print(f"{name} checkpoints: {rates[name][-1]:.0f} updates/s", flush=True)
    ratio = statistics.median(rates["with"]) / statistics.median(rates["without"])
    print(f"ratio of medians: {ratio:.3f}")


def soak(arguments: argparse.Namespace) -> None:
    """Print the resident memory of trainer and actor once a minute, after two minutes of warm-up."""
    runner = pendulum(0)
    sizes: dict[str, list[float]] = {}
    with running(runner, 1, max_train_count=10**9) as (manager, workers, _):
        until(lambda: manager.get_status().train_count > 1_000)
        threading.Event().wait(120)
        for minute in range(round(arguments.minutes) + 1):
            for name, process in workers.pids.items():
                sizes.setdefault(name, []).append(resident_bytes(process) / 1e6)
            print(
                f"minute {minute}: " + ", ".join(f"{name} {size[-1]:.1f} MB" for name, size in sizes.items()),
                flush=True,
            )
            if minute < round(arguments.minutes):
                threading.Event().wait(60)
        print(f"{manager.get_status().train_count:,} updates, {manager.get_status().env_steps:,} env steps")
    for name, size in sizes.items():
        print(f"{name}: {min(size) / size[0] - 1:+.1%} to {max(size) / size[0] - 1:+.1%} of the first")


def checks(arguments: argparse.Namespace) -> None:
    """Play, and send what is played through a broker into a memory; print what share of the time the checks take.

    All in one process, one after the other. Checks are the checksums at both ends and the gate.
    """
    configure_actor_process()
    pong = dqn.Config(processors=[ImageProcessor(EnvObservationTypes.GRAY_2ch, resize=(84, 84))], window_length=4)
    pong.memory.capacity = 10_000
    game = srl.EnvConfig("ALE/Pong-v5", kwargs={"frameskip": 7, "repeat_action_probability": 0})
    for what, runner in (("Pendulum", pendulum(0)), ("Pong", srl.Runner(game, pong, seed=0))):
        config = runner.config
        lanes = make_lanes(runner.env_config, config, range(LANES))
        player = make_actor(config, range(LANES), lanes)
        player.set_parameters(runner.parameters, 0)
        memory = config.make_memory(runner.spaces, 0, None)
        shares, rates = share_of_checks(player, memory, Gate(config, runner.spaces, memory, LANES), arguments.repeats)
        lanes.close()
        print(
            f"{what}: checks take {statistics.median(shares):.2%} of the time "
            f"({min(shares):.2%} to {max(shares):.2%}), {statistics.median(rates):.0f} env steps/s",
            flush=True,
        )


def share_of_checks(player: Any, memory: Any, gate: Gate, repeats: int) -> tuple[list[float], list[float]]:
    """Return the checks' share of the time and env steps/s, of each repeat."""
    spent_s = 0.0

    def timed(check: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            nonlocal spent_s
            started_s = time.perf_counter()
            try:
                return check(*arguments)
            finally:
                spent_s += time.perf_counter() - started_s

        return wrapper

    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(contextlib.closing(Broker(stack.enter_context(EmbeddedBroker()).parameters)))
        run = {"actor_num": 1, "max_train_count": None, "timeout": None}
        lease = broker.acquire(broker.create_task("", TaskDefinition({"name": "x"}, {}, {}, run, 0), 2**40), "actor")
        assert lease is not None
        stack.enter_context(mock.patch.object(wire.zlib, "crc32", timed(zlib.crc32)))
        stack.enter_context(mock.patch.object(gate, "check", timed(gate.check)))
        pending: list[Segment] = []
        numbers = itertools.count()

        def step() -> None:
            pending.extend(player.step().segments)
            if sum(len(segment.actions) for segment in pending) < MESSAGE_STEPS:
                return
            number = next(numbers)
            broker.send(lease, wire.encode_experience(wire.Experience(lease.sender, number, pending, 0)))
            pending.clear()
            [message] = broker.receive(lease.task, "0", 1, 100)
            broker.redis.xtrim(f"srl:{lease.task}:experience", 0)
            experience = wire.decode_experience(message.data)
            gate.check(experience, {lease.sender: number - 1})
            memory.insert(experience.segments)

        shares, rates = [], []
        for _ in range(repeats):
            spent_s, started_s = 0.0, time.perf_counter()
            rates.append(rate(step, LANES, 2.0))
            shares.append(spent_s / (time.perf_counter() - started_s))
    return shares, rates


def pendulum(seed: int, updates_per_step: float | None = None) -> srl.Runner:
    """Return a runner with the README's settings."""
    config = make_config(list(PENDULUM.settings))
    if updates_per_step is not None:
        config.samples_per_insert = updates_per_step * config.batch_size
    return srl.Runner(PENDULUM.env, config, seed=seed)


def until(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    """Wait for something true."""
    deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("it did not happen in time")
        pause.wait(0.05)


def patiently(count: Callable[[], int]) -> int:
    """Return a count, or -1 while the broker does not know the task."""
    try:
        return count()
    except SrlError:
        return -1


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process, without the pages of files (the memory's, and libraries)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
