"""How fast the parts and the whole are, on Pendulum-v1 with an MLP 64x64 and batches of 32.

    python -m benchmarks.speed learner | actor | broker-commands | end-to-end

Run each in a process of its own, on a machine that does nothing else; `python -m benchmarks` runs all.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ENV = "Pendulum-v1"
LANES = 8


def main() -> None:
    """Run one measurement and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in [
        ("learner", learner, "updates a second of learner and proportional memory"),
        ("actor", actor, f"env steps a second of one actor with {LANES} lanes, segments and messages included"),
    ]:
        command = commands.add_parser(name, help=text)
        command.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
        command.add_argument("--repeats", type=int, default=5)
        command.set_defaults(run=run)
    command = commands.add_parser("broker-commands", help="broker commands and bytes for each transition")
    command.add_argument("--updates", type=int, default=20_000)
    command.add_argument("--actors", type=int, default=2)
    command.set_defaults(run=broker_commands)
    command = commands.add_parser("end-to-end", help="seconds from starting python to an evaluated agent")
    command.add_argument("--updates", type=int, default=20_000)
    command.add_argument("--repeats", type=int, default=3)
    command.add_argument("--modes", nargs="+", choices=("train", "mp"), default=["train", "mp"])
    command.set_defaults(run=end_to_end)
    command = commands.add_parser("job", help="the work that end-to-end measures, in this process")
    command.add_argument("mode", choices=("train", "mp"))
    command.add_argument("--updates", type=int, default=20_000)
    command.set_defaults(run=job)
    arguments = parser.parse_args()
    arguments.run(arguments)


def learner(arguments: argparse.Namespace) -> None:
    """Time whole dispatches: sampling, updates, new priorities."""
    import srl
    from srl.runner.lanes import make_lanes
    from srl.runner.trainer import Trainer

    config = _config()
    runner = srl.Runner(ENV, config, seed=0)
    memory = config.make_memory(runner.spaces, 0, None)
    trainer = Trainer(config, runner.spaces, runner.learner, memory, distributed=False)
    player = make_actor(config, range(LANES), make_lanes(runner.env_config, config, range(LANES)))
    player.set_parameters(runner.parameters, 0)
    while len(memory) < memory.capacity - config.steps_per_segment(runner.spaces):
        trainer.insert(player.step().segments)
    updates = trainer.dispatch
    batches = memory.sample(updates, 0).batches
    for name, work in [
        ("learner and memory", lambda: trainer.learn(updates)),
        ("sampling alone", lambda: memory.sample(updates, 0)),
        ("learner alone", lambda: trainer.learner.update(batches)),
    ]:
        _report(name, "updates/s", _rates(work, updates, arguments))


def actor(arguments: argparse.Namespace) -> None:
    """Time env steps with everything an actor process does but the sending."""
    from srl.runner.distribution.servers import configure_actor_process

    configure_actor_process()
    import srl
    from srl.runner.actor import Produced
    from srl.runner.distribution.broker import MESSAGE_STEPS
    from srl.runner.distribution.wire import Experience, encode_experience
    from srl.runner.lanes import make_lanes

    config = _config()
    runner = srl.Runner(ENV, config, seed=0)
    player = make_actor(config, range(LANES), make_lanes(runner.env_config, config, range(LANES)))
    player.set_parameters(runner.parameters, 0)
    pending = Produced()
    message_bytes: list[int] = []

    def step() -> None:
        nonlocal pending
        produced = player.step()
        pending.segments += produced.segments
        pending.env_steps += produced.env_steps
        if sum(len(segment.actions) for segment in pending.segments) >= MESSAGE_STEPS:
            message = encode_experience(Experience("bench", len(message_bytes), pending.segments, pending.env_steps))
            message_bytes.append(len(message))
            pending = Produced()

    _report(f"actor with {LANES} lanes", "env steps/s", _rates(step, LANES, arguments))
    print(f"message of {MESSAGE_STEPS} transitions or more: {statistics.median(message_bytes):,.0f} bytes")


def broker_commands(arguments: argparse.Namespace) -> None:
    """Count what a whole run asks of the broker."""
    import srl
    from srl.runner.distribution.embedded import EmbeddedBroker
    from srl.runner.distribution.local_workers import LocalWorkers

    runner = srl.Runner(ENV, _config(), seed=0)
    with (
        tempfile.TemporaryDirectory() as logs,
        EmbeddedBroker() as broker,
        LocalWorkers(broker.parameters, arguments.actors, Path(logs)),
        broker.parameters.connect() as client,
    ):
        client.config_resetstat()
        status = runner.train_distribution(
            broker.parameters, arguments.actors, max_train_count=arguments.updates, progress=False
        )
        commands: Any = client.info("commandstats")
        network: Any = client.info("stats")
    calls = {name.removeprefix("cmdstat_"): row["calls"] for name, row in commands.items()}
    steps = status.env_steps
    total_bytes = network["total_net_input_bytes"] + network["total_net_output_bytes"]
    print(f"{steps:,} transitions, {status.train_count:,} updates in {status.elapsed_s:.1f} s")
    requests, executed = network["total_reads_processed"], sum(calls.values())
    print(f"commands sent to the broker: {requests:,}, {requests / steps:.4f} a transition")
    print(f"executed there, with those inside scripts: {executed:,}, {executed / steps:.4f} a transition")
    print(f"network: {total_bytes / 1e6:.1f} MB, {total_bytes / steps:.0f} bytes a transition")
    for name, count in sorted(calls.items(), key=lambda item: -item[1]):
        print(f"  {name:24} {count:8,}")


def end_to_end(arguments: argparse.Namespace) -> None:
    """Time fresh interpreters that train and evaluate."""
    for mode in arguments.modes:
        results = [time_job(mode, arguments.updates) for _ in range(arguments.repeats)]
        seconds = [seconds for seconds, _ in results]
        means = ", ".join(f"{mean:.0f}" for _, mean in results)
        _report(f"{mode}: {arguments.updates:,} updates and 10 evaluation episodes", "s", seconds)
        print(f"  mean rewards {means}")


def time_job(mode: str, updates: int) -> tuple[float, float]:
    """Return the wall time in seconds of a fresh interpreter doing the job, and the agent's mean reward."""
    command = [sys.executable, "-m", "benchmarks.speed", "job", mode, "--updates", str(updates)]
    return time_command(command)


def time_command(command: list[str]) -> tuple[float, float]:
    """Return the wall time in seconds of a program, and the `mean` of the JSON object it prints last."""
    started_s = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - started_s, float(json.loads(done.stdout.splitlines()[-1])["mean"])


def job(arguments: argparse.Namespace) -> None:
    """Train and evaluate as the README's script does."""
    import srl

    runner = srl.Runner(ENV, _config())
    if arguments.mode == "train":
        runner.train(max_train_count=arguments.updates, progress=False)
    else:
        runner.train_mp(actor_num=2, max_train_count=arguments.updates, progress=False)
    print(json.dumps({"mean": statistics.mean(runner.evaluate(10))}))


def _config() -> Any:
    from srl.algorithms import dqn

    config = dqn.Config()
    config.hidden_block.set_mlp((64, 64))
    config.memory.set_proportional_memory()
    config.memory.capacity = 5_000
    return config


def make_actor(config: Any, numbers: Sequence[int], lanes: Any) -> Any:
    """Return an actor of these lanes, of `LANES` in all; it has no parameters yet."""
    from srl.runner.actor import Actor

    policy = config.make_policy(lanes.spaces)
    return Actor(lanes, policy, config, seed=0, lane_numbers=numbers, total_lanes=LANES, distributed=True)


def _rates(work: Callable[[], Any], amount: int, arguments: argparse.Namespace) -> list[float]:
    """Return how much is done a second, for each measurement; what has to be compiled is done before."""
    for _ in range(10):
        work()
    return [rate(work, amount, arguments.seconds) for _ in range(arguments.repeats)]


def rate(work: Callable[[], Any], amount: int, seconds: float) -> float:
    """Return how much is done a second where each call of `work` does `amount`."""
    count, started_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < seconds:
        work()
        count += amount
    return count / elapsed_s


def _report(name: str, unit: str, values: list[float]) -> None:
    digits = 0 if statistics.median(values) >= 100 else 1
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    print(f"{name}: {middle} {unit} (median of {len(values)}; {low} to {high})", flush=True)


if __name__ == "__main__":
    main()
