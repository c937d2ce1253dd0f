"""Train on pictures: catch a ball that every other picture hides, so it takes several pictures to know its way.

An image observation gets convolutions by itself; `window_length` says how many pictures the network sees at once.
"""

import argparse
import statistics

import catch  # noqa: F401  # registers Catch-v0

import srl
from srl.algorithms import dqn
from srl.utils.common import logger_print


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=4_000)
    arguments = parser.parse_args()

    logger_print()
    config = dqn.Config(lr=0.0005, target_model_update_interval=500, window_length=4)
    config.hidden_block.set_mlp((128,))
    config.memory.capacity = 20_000
    config.memory.warmup_size = min(1_000, 32 * arguments.updates)
    runner = srl.Runner("catch:Catch-v0", config)
    runner.train_mp(actor_num=1, max_train_count=arguments.updates)

    mean = statistics.mean(runner.evaluate(100))
    print(f"mean reward of 100 greedy episodes: {mean:.2f} (-1 misses every ball, 1 catches all)")


if __name__ == "__main__":
    main()
