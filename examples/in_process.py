"""One process, no broker: the quickest way to try something, and repeatable bit for bit for a seed."""

import argparse
import statistics

import srl
from srl.algorithms import dqn
from srl.utils.common import logger_print


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    logger_print()
    config = dqn.Config()
    config.hidden_block.set_mlp((64, 64))
    config.memory.set_proportional_memory()
    config.memory.capacity = 5_000
    config.memory.warmup_size = min(1_000, arguments.updates)
    runner = srl.Runner("Pendulum-v1", config, seed=arguments.seed)
    runner.train(max_train_count=arguments.updates)

    print(f"mean reward of 10 greedy episodes: {statistics.mean(runner.evaluate()):.1f} (about -150 is very good)")


if __name__ == "__main__":
    main()
