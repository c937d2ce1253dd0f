"""Train on an env of your own: name it 'module:id', so that workers can make it too.

A worker imports only what its starter allows, never what a message names. `train_mp` allows the modules
that the runner's env needs; elsewhere say `srl actor --allow corridor`, where `corridor` can be imported.
"""

import argparse
import statistics

import corridor  # noqa: F401  # registers Corridor-v0

import srl
from srl.algorithms import dqn
from srl.utils.common import logger_print


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5_000)
    arguments = parser.parse_args()

    logger_print()
    # Values spread from the goal with every copy to the target network; often, as the problem is small.
    config = dqn.Config(target_model_update_interval=200)
    config.hidden_block.set_mlp((64, 64))
    config.memory.warmup_size = min(500, arguments.updates)
    runner = srl.Runner(srl.EnvConfig("corridor:Corridor-v0", kwargs={"length": 10}), config)
    runner.train_mp(actor_num=2, max_train_count=arguments.updates)

    mean = statistics.mean(runner.evaluate())
    print(f"mean reward of 10 greedy episodes: {mean:.2f} (the shortest ways earn 0.1 to 0.5)")


if __name__ == "__main__":
    main()
