"""What the tests of resuming share. Run as a program it trains, from the newest checkpoint where there is one."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import srl
from srl.base.algorithm import RLConfig
from srl.runner.checkpoint import load_checkpoint


def make_config(algorithm: str, kind: str) -> RLConfig:
    if algorithm == "toy":
        import toy

        config: Any = toy.Config(window_length=2, n_step=2)
        config.memory.capacity, config.memory.warmup_size, config.memory.kind = 300, 50, kind
        config.memory.rank_interval = 7
        return config
    from srl.algorithms import dqn

    config = dqn.Config(batch_size=8, n_step=3)
    config.hidden_block.layer_sizes = (8,)
    config.memory.capacity, config.memory.warmup_size, config.memory.kind = 1000, 100, kind
    return config


def make_runner(algorithm: str, kind: str, env: str, seed: int) -> srl.Runner:
    import envs  # noqa: F401  # registers them

    return srl.Runner(env, make_config(algorithm, kind), seed=seed)


def train_to(runner: srl.Runner, directory: Path, total: int, **arguments: Any) -> None:
    """Train until the run has done `total` updates, however many it has done already."""
    runner.train(
        **{
            "max_train_count": total - runner.train_count,
            "num_envs": 3,
            "eval_episodes": 0,
            "progress": False,
            "checkpoint_save_dir": directory,
            "checkpoint_interval_s": 0.1,
            "history_save_dir": directory / "history",
            **arguments,
        }
    )


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit()) if directory.exists() else []


def everything(directory: Path, runner: srl.Runner) -> dict[str, Any]:
    """Return all that the newest checkpoint stands for: states, and what the memory holds there, as lists."""
    loaded = load_checkpoint(directory)
    memory: Any = runner.config.make_memory(runner.spaces, 0, directory / "memory")
    memory.go_back(loaded.run_state["memory"])
    stored = {
        name: [array[span].tolist() for span in memory._stored_spans()]
        for name, array in memory._arrays.items()
        if len(array) == memory._slots
    }
    # Steps that a segment does not have, a frame that starts no transition: whatever was there before.
    unused = memory._arrays["steps"]
    for name in ("actions", "rewards"):
        stored[name] = [
            np.where(unused[span] > 0, memory._arrays[name][span], 0).tolist() for span in memory._stored_spans()
        ]
    del loaded.run_state["memory"]["identity"]
    trees = {"parameters": loaded.parameters, "learner": loaded.learner_state, "run": loaded.run_state}
    text = json.dumps({**trees, "state": loaded.state}, default=lambda array: array.tolist())
    return {**json.loads(text), "stored": stored}


if __name__ == "__main__":
    algorithm, kind, env, seed, directory, total = sys.argv[1:]
    trained = make_runner(algorithm, kind, env, int(seed))
    if checkpoints(Path(directory)):
        trained.load_checkpoint(directory)
    train_to(trained, Path(directory), int(total))
