"""How fast learning from images is: 84 x 84 grey frames, four at once, batches of 32.

    python -m benchmarks.images learner --torch-python .venv-peers/bin/python
    python -m benchmarks.images learner --torch-python .venv-peers/bin/python --block r2d3 --load
    python -m benchmarks.images actor --peer-python .venv-peers/bin/python

`learner` measures double DQN updates a second, sampling from a proportional memory included, and beside it PyTorch
doing the same update on a batch that is there already. Both are fresh processes that take turns, so that what else the
machine does meets both. `--load` keeps one core busy meanwhile, as an actor on the same machine does.

`actor` measures Pong steps a second (seven frames each) of one actor with eight lanes and DQN's network, segments and
messages included, and beside it Stable-Baselines3's DQN collecting as many lanes, in one process and with a process
for each env. Networks have one thread each, all cores are there for the games.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.speed import LANES, make_actor, rate

TORCH = Path(__file__).parent / "peers" / "torch_image_update.py"
STABLE_BASELINES3 = Path(__file__).parent / "peers" / "stable_baselines3_pong.py"


def main() -> None:
    """Run one measurement and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("learner", help="updates a second, beside PyTorch")
    command.add_argument("--torch-python", help="interpreter that has torch; without it only ours is measured")
    command.add_argument("--repeats", type=int, default=3)
    command.add_argument("--load", action="store_true", help="keep one core busy meanwhile")
    command.set_defaults(run=learner)
    inner = commands.add_parser("updates", help="what `learner` starts: our updates a second, in this process")
    inner.set_defaults(run=updates)
    for one in (command, inner):
        one.add_argument("--block", choices=("dqn", "r2d3"), default="dqn")
    playing = commands.add_parser("actor", help="Pong steps a second, beside Stable-Baselines3")
    playing.add_argument("--peer-python", help="interpreter that has it, with ale-py; without it only ours is measured")
    playing.add_argument("--repeats", type=int, default=3)
    playing.set_defaults(run=actor)
    inner_playing = commands.add_parser("steps", help="what `actor` starts: our steps a second, in this process")
    inner_playing.set_defaults(run=steps)
    for one in (command, inner, playing, inner_playing):
        one.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    arguments = parser.parse_args()
    arguments.run(arguments)


def learner(arguments: argparse.Namespace) -> None:
    """Let both take turns and print medians and their ratio."""
    options = ["--block", arguments.block, "--seconds", str(arguments.seconds)]
    programs = {"srl": [sys.executable, "-m", "benchmarks.images", "updates", *options]}
    if arguments.torch_python:
        programs["torch"] = [arguments.torch_python, str(TORCH), *options]
    with _busy() if arguments.load else contextlib.nullcontext():
        _take_turns(programs, arguments.repeats, "updates/s", dict(os.environ))


def updates(arguments: argparse.Namespace) -> None:
    """Time whole dispatches: sampling, updates, new priorities."""
    from srl.algorithms import dqn
    from srl.base.segment import End, Segment
    from srl.base.spaces import DiscreteActions, ObservationSpec, Spaces
    from srl.runner.trainer import Trainer

    spaces = Spaces(ObservationSpec((84, 84), "uint8", scale=1 / 255), DiscreteActions(6), window_length=4)
    config = dqn.Config(lr=0.00025, window_length=4, samples_per_insert=1e9)
    config.memory.set_proportional_memory()
    config.memory.capacity = 5_000
    getattr(config.image_block, f"set_{arguments.block}_image")()
    memory = config.make_memory(spaces, 0, None)
    trainer = Trainer(config, spaces, config.make_learner(spaces, 0), memory, distributed=False)
    rng = np.random.default_rng(0)
    for sequence in range(30):
        frames = rng.integers(0, 256, (65, 84, 84), np.uint8)
        actions, rewards = rng.integers(0, 6, 64).astype(np.int32), rng.normal(size=64).astype(np.float32)
        trainer.insert([Segment(frames, actions, rewards, End.TRUNCATED, 0, 0, sequence, 0)])
    for _ in range(2):
        trainer.learn(trainer.dispatch)
    print(rate(lambda: trainer.learn(trainer.dispatch), trainer.dispatch, arguments.seconds))


def actor(arguments: argparse.Namespace) -> None:
    """Let both take turns and print medians and their ratio."""
    from srl.runner.distribution.servers import actor_environment

    options = ["--seconds", str(arguments.seconds)]
    programs = {"srl": [sys.executable, "-m", "benchmarks.images", "steps", *options]}
    if arguments.peer_python:
        peer = [arguments.peer_python, str(STABLE_BASELINES3), "--lanes", str(LANES), *options]
        programs["stable-baselines3"] = peer
        programs["stable-baselines3, processes"] = [*peer, "--processes"]
    _take_turns(programs, arguments.repeats, "steps/s", {**os.environ, **actor_environment()})


def steps(arguments: argparse.Namespace) -> None:
    """Time vector steps, with segments and encoded messages."""
    import srl
    from srl.algorithms import dqn
    from srl.rl.processors.image_processor import ImageProcessor
    from srl.runner.distribution.wire import Experience, encode_experience
    from srl.runner.lanes import make_lane_groups

    env = srl.EnvConfig("ALE/Pong-v5", kwargs={"frameskip": 7, "repeat_action_probability": 0})
    config = dqn.Config(window_length=4, processors=[ImageProcessor(resize=(84, 84))])
    config.memory.set_proportional_memory()
    parameters = srl.Runner(env, config, seed=0).parameters
    actors = [make_actor(config, numbers, lanes) for numbers, lanes in make_lane_groups(env, config, range(LANES))]
    for player in actors:
        player.set_parameters(parameters, 0)
        player.begin()

    def step() -> None:
        for player in actors:
            produced = player.finish()
            player.begin()
            if produced.segments:
                encode_experience(Experience("actor", 0, produced.segments))

    for _ in range(20):
        step()
    print(rate(step, LANES, arguments.seconds))


def _take_turns(programs: dict[str, list[str]], repeats: int, unit: str, environment: dict[str, str]) -> None:
    """Run programs that print a rate, one after the other, and print medians and the ratio of ours to the other."""
    rates: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, command in programs.items():
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            rates[name].append(float(done.stdout.split()[-1]))
            print(f"{name}: {rates[name][-1]:.1f} {unit}", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(", ".join(f"{name} {median:.1f} {unit}" for name, median in medians.items()))
    if others := [median for name, median in medians.items() if name != "srl"]:
        print(f"ratio of medians, to the best other: {medians['srl'] / max(others):.2f}")


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
