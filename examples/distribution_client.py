"""The client of a run whose trainer and actors are started apart, on this machine or others.

Start these in any order, each in a terminal or on a machine of its own (README.md, "On several machines"):

    redis-server --requirepass secret            a broker: Redis 7 or Valkey
    export SRL_REDIS_URL=redis://127.0.0.1:6379 SRL_REDIS_PASSWORD=secret
    srl trainer
    srl actor
    python examples/distribution_client.py

The client may leave: the task goes on, and `TaskManager(RedisParameters()).train_wait()` comes back to it.
"""

import argparse

import srl
from srl.algorithms import dqn
from srl.runner.distribution import RedisParameters
from srl.utils.common import logger_print


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--actors", type=int, default=1, help="as many as are started, or will be")
    arguments = parser.parse_args()

    logger_print()
    config = dqn.Config()
    config.hidden_block.set_mlp((64, 64))
    config.memory.set_proportional_memory()
    config.memory.capacity = 5_000
    config.memory.warmup_size = min(1_000, arguments.updates)
    runner = srl.Runner("Pendulum-v1", config)
    # Without arguments the address comes from SRL_REDIS_URL and SRL_REDIS_PASSWORD.
    runner.train_distribution(RedisParameters(), actor_num=arguments.actors, max_train_count=arguments.updates)
    print(runner.evaluate())


if __name__ == "__main__":
    main()
