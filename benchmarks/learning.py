"""What is learned: several seeds, 100 greedy evaluation episodes each.

    python -m benchmarks.learning --preset cartpole
    python -m benchmarks.learning --preset pendulum --mode mp
    python -m benchmarks.learning --preset cartpole --first-seed 5 --set lr=0.0005
    python -m benchmarks.learning MountainCar-v0 --steps 100000 --set n_step=5
    python -m benchmarks.learning --preset catch --mode broker
    python -m benchmarks.learning --preset pong --mode mp --actors 1 --seeds 1 --episodes 20 --history pong

`--mode`: `train` is one process, `mp` the embedded broker with two actors, `broker` a server on loopback TCP
with `trainer_run_forever` and one `actor_run_forever` started apart from the client.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import srl
from srl.algorithms import dqn
from srl.base.processor import Processor
from srl.base.settings import set_by_path
from srl.rl.processors.image_processor import ImageProcessor
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.distribution.local_workers import LocalWorkers


@dataclass(frozen=True)
class Preset:
    """An env, when training ends, and settings of `dqn.Config` as `PATH=VALUE`."""

    env: str | srl.EnvConfig
    updates: int | None = None
    steps: int | None = None
    timeout_s: float | None = None
    settings: tuple[str, ...] = ()
    processors: tuple[Processor, ...] = ()


PRESETS = {
    # The README's script.
    "pendulum": Preset(
        "Pendulum-v1",
        updates=20_000,
        settings=("hidden_block.mlp=64,64", "memory.kind=proportional", "memory.capacity=5000"),
    ),
    # 475 of 500 counts as solved. Far sight (discount) keeps the cart from drifting out late in an episode, and a
    # learning rate that ends at 0 keeps the last updates from undoing what was learned.
    "cartpole": Preset(
        "CartPole-v1",
        steps=50_000,
        settings=(
            "hidden_block.mlp=128,128",
            "batch_size=64",
            "discount=0.995",
            "epsilon.linear=25000,1.0,0.05",
            "lr.linear=50000,0.001,0.0",
            "target_model_update_interval=200",
            "huber_delta=10",
            "segment_length=32",
        ),
    ),
    # -100 counts as solved.
    "acrobot": Preset(
        "Acrobot-v1",
        steps=60_000,
        settings=(
            "hidden_block.mlp=128,128",
            "batch_size=64",
            "epsilon.linear=8000,1.0,0.04",
            "lr.linear=60000,0.001,0.0",
            "target_model_update_interval=200",
            "huber_delta=10",
            "segment_length=32",
        ),
    ),
    # 1 catches every ball; what sees single pictures only misses many.
    "catch": Preset(
        "examples.catch:Catch-v0",
        updates=6_000,
        settings=(
            "window_length=4",
            "hidden_block.mlp=128",
            "lr=0.0005",
            "target_model_update_interval=500",
            "memory.capacity=20000",
            "epsilon.linear=3000,1.0,0.05",
        ),
    ),
    # A random agent scores -20.7. Pictures are smaller than usual, so that two cores do enough updates in an hour.
    "pong": Preset(
        srl.EnvConfig("ALE/Pong-v5", kwargs={"frameskip": 7, "repeat_action_probability": 0}),
        timeout_s=3_600,
        settings=(
            "window_length=4",
            "lr=0.00025",
            "target_model_update_interval=1000",
            "memory.kind=proportional",
            "memory.capacity=100000",
            "memory.warmup_size=5000",
            "epsilon.linear=30000,1.0,0.02",
            "use_rl_processor=false",
        ),
        processors=(ImageProcessor(trimming=(30, 0, 210, 160), resize=(52, 52)),),
    ),
}


def main() -> None:
    """Train and evaluate each seed, then print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?", help="a Gymnasium id, learned with the library's defaults")
    parser.add_argument("--preset", choices=PRESETS)
    parser.add_argument("--mode", choices=("train", "mp", "broker"), default="train")
    parser.add_argument("--actors", type=int, default=None, help="default: 2 for mp, 1 for broker")
    parser.add_argument("--updates", type=int, help="in place of the preset's limits")
    parser.add_argument("--steps", type=int, help="in place of the preset's limits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--history", help="keep each seed's history with evaluations under this name and its number")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="settings of dqn.Config")
    arguments = parser.parse_args()
    if (arguments.env is None) == (arguments.preset is None):
        parser.error("name either an env or a --preset")
    preset = PRESETS[arguments.preset] if arguments.preset else Preset(arguments.env)
    limits: dict[str, Any] = {"max_train_count": arguments.updates, "max_steps": arguments.steps}
    if not any(limits.values()):
        limits = {"max_train_count": preset.updates, "max_steps": preset.steps, "timeout": preset.timeout_s}
    means = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        config = make_config([*preset.settings, *arguments.set])
        config.processors = list(preset.processors)
        runner = srl.Runner(preset.env, config, seed=seed)
        started_s = time.monotonic()
        if arguments.history:
            # Evaluations take their time from training, so only where somebody wants to see them.
            limits |= {"history_save_dir": f"{arguments.history}-{seed}", "eval_interval_s": 60.0, "eval_episodes": 4}
        train(runner, arguments.mode, arguments.actors, limits)
        trained_s = time.monotonic() - started_s
        rewards = runner.evaluate(arguments.episodes)
        means.append(statistics.mean(rewards))
        print(
            f"seed {seed}: mean {means[-1]:8.1f}  worst {min(rewards):8.1f}  updates {runner.train_count:,}  "
            f"env steps {runner.env_steps:,}  trained in {trained_s:.1f} s",
            flush=True,
        )
    print(
        f"mean of {arguments.episodes} greedy episodes over {len(means)} seeds: {statistics.mean(means):.1f}, "
        f"lowest {min(means):.1f}, highest {max(means):.1f}"
    )


def make_config(settings: list[str]) -> dqn.Config:
    """Return the default config with `PATH=VALUE` settings on top, in order."""
    config = dqn.Config()
    for setting in settings:
        path, _, value = setting.partition("=")
        set_by_path(config, path, value)
    return config


def train(runner: srl.Runner, mode: str, actors: int | None, limits: dict[str, Any]) -> None:
    """Train in the asked mode."""
    if mode == "train":
        # Nobody looks at evaluations beside training here, and learning does not depend on them.
        runner.train(**{"eval_episodes": 0, **limits}, progress=False)
    elif mode == "mp":
        runner.train_mp(actors or 2, **limits, progress=False)
    else:
        with (
            tempfile.TemporaryDirectory() as logs,
            EmbeddedBroker(host="127.0.0.1", port=0) as broker,
            LocalWorkers(broker.parameters, actors or 1, Path(logs), runner.env_config.modules()),
        ):
            runner.train_distribution(broker.parameters, actors or 1, **limits, progress=False)


if __name__ == "__main__":
    main()
