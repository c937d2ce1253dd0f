"""What is learned: several seeds, 100 greedy evaluation episodes each.

    python -m benchmarks.learning Pendulum-v1 --mode mp --updates 20000 --seeds 5
    python -m benchmarks.learning CartPole-v1 --mode train --steps 50000 --seeds 5 --set n_step=3

`--mode`: `train` is one process, `mp` the embedded broker with two actors, `broker` a server on loopback TCP
with `trainer_run_forever` and one `actor_run_forever` started apart from the client.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import srl
from srl.algorithms import dqn
from srl.base.settings import set_by_path
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.distribution.local_workers import LocalWorkers


def main() -> None:
    """Train and evaluate each seed, then print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env")
    parser.add_argument("--mode", choices=("train", "mp", "broker"), default="train")
    parser.add_argument("--actors", type=int, default=None, help="default: 2 for mp, 1 for broker")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="settings of dqn.Config")
    arguments = parser.parse_args()
    means = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        started_s = time.monotonic()
        runner = srl.Runner(arguments.env, make_config(arguments.set), seed=seed)
        train(runner, arguments)
        trained_s = time.monotonic() - started_s
        rewards = runner.evaluate(arguments.episodes)
        means.append(statistics.mean(rewards))
        print(
            f"seed {seed}: mean {means[-1]:8.1f}  worst {min(rewards):8.1f}  updates {runner.train_count:,}  "
            f"env steps {runner.env_steps:,}  trained in {trained_s:.1f} s",
            flush=True,
        )
    print(
        f"mean of {arguments.episodes} greedy episodes over {len(means)} seeds: {statistics.mean(means):.1f}, ", end=""
    )
    print(f"lowest {min(means):.1f}, highest {max(means):.1f}")


def make_config(settings: list[str]) -> dqn.Config:
    """Return the config of the README's script, with `PATH=VALUE` settings on top."""
    config = dqn.Config()
    config.hidden_block.set_mlp((64, 64))
    config.memory.set_proportional_memory()
    config.memory.capacity = 5000
    for setting in settings:
        path, _, value = setting.partition("=")
        set_by_path(config, path, value)
    return config


def train(runner: srl.Runner, arguments: argparse.Namespace) -> None:
    """Train in the asked mode."""
    limits = {"max_train_count": arguments.updates, "max_steps": arguments.steps}
    if arguments.mode == "train":
        runner.train(**limits, progress=False)
    elif arguments.mode == "mp":
        runner.train_mp(arguments.actors or 2, **limits, progress=False)
    else:
        actors = arguments.actors or 1
        with (
            tempfile.TemporaryDirectory() as logs,
            EmbeddedBroker(host="127.0.0.1", port=0) as broker,
            LocalWorkers(broker.parameters, actors, Path(logs)),
        ):
            runner.train_distribution(broker.parameters, actors, **limits, progress=False)


if __name__ == "__main__":
    main()
