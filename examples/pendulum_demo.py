"""What `make demo` runs: DQN learns Pendulum-v1 with a trainer and two actors on this machine.

The same code trains on a cluster: see distribution_client.py. Everything it makes lies in ./demo; an
earlier demo there is replaced.
"""

import argparse
import shutil
import statistics
from pathlib import Path

import srl
from srl.algorithms import dqn
from srl.utils.common import logger_print

DEMO = Path("demo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20_000, help="updates of the network (20000)")
    parser.add_argument("--actors", type=int, default=2, help="actor processes (2)")
    parser.add_argument("--episodes", type=int, default=20, help="greedy episodes at the end (20)")
    parser.add_argument("--frames", type=int, default=200, help="steps of the animation (200, a whole episode)")
    arguments = parser.parse_args()
    checkpoints, history = DEMO / "checkpoints", DEMO / "history"
    for directory in (checkpoints, history):
        shutil.rmtree(directory, ignore_errors=True)

    logger_print()
    config = dqn.Config()
    config.hidden_block.set_mlp((64, 64))
    config.memory.set_proportional_memory()
    config.memory.capacity = 5_000
    config.memory.warmup_size = min(1_000, arguments.updates)
    runner = srl.Runner("Pendulum-v1", config)

    print(f"Learning Pendulum-v1: one trainer, {arguments.actors} actors, {arguments.updates:,} updates", flush=True)
    status = runner.train_mp(
        actor_num=arguments.actors,
        max_train_count=arguments.updates,
        eval_interval_s=0.2,
        checkpoint_save_dir=checkpoints,
        history_save_dir=history,
    )

    rewards = runner.evaluate(arguments.episodes)
    curve, animation = DEMO / "learning_curve.png", DEMO / "pendulum.gif"
    srl.Runner.load_history(history).plot(
        ylabel_left=["eval_reward0", "reward0"],
        title="DQN on Pendulum-v1: greedy evaluations beside training, and training episodes",
        save_path=curve,
    )
    runner.animation_save_gif(animation, max_steps=arguments.frames)

    print(
        f"""
Trained in {status.elapsed_s:.0f} s: {status.train_count:,} updates, {status.env_steps:,} env steps.
Mean reward of {len(rewards)} greedy episodes: {statistics.mean(rewards):.1f}, worst {min(rewards):.1f}
(a random agent gets about -1200; about -150 is as good as it gets).

What it left:
  {curve}      the learning curve
  {animation}            one episode of the trained agent
  {checkpoints}/             parameters, optimiser and counters, to go on from
  {history}/                 every number of the run, one JSON object a line

Try next:
  python examples/in_process.py               the same in one process, repeatable bit for bit
  python examples/own_env.py                  an env of your own
  README.md, "On several machines"            the same script against a broker
"""
    )


if __name__ == "__main__":
    main()
