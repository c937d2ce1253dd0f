"""Pong from pixels, through a broker: create the task, come back, evaluate, leave a GIF and a learning curve.

Needs `pip install '.[all]'` and the workers of a distributed run (README.md, "On several machines"); with `--local`
everything runs on this machine.
"""

import argparse
import statistics
from pathlib import Path

import srl
from srl.algorithms import dqn
from srl.base.define import EnvObservationTypes
from srl.rl.processors.image_processor import ImageProcessor
from srl.runner.distribution import RedisParameters, TaskManager
from srl.utils.common import logger_print


def make_runner() -> srl.Runner:
    """Return the runner; the settings are DQN's for Atari (Mnih et al. 2015) with today's usual additions."""
    env = srl.EnvConfig("ALE/Pong-v5", kwargs=dict(frameskip=7, repeat_action_probability=0, full_action_space=False))
    config = dqn.Config(
        batch_size=32,
        target_model_update_interval=10_000,
        discount=0.99,
        lr=0.00025,
        enable_reward_clip=False,
        enable_double_dqn=True,
        enable_rescale=False,
    )
    config.memory.warmup_size = 1_000
    config.memory.capacity = 100_000
    config.memory.set_proportional_memory(beta_steps=1_000_000)
    config.epsilon.set_linear(200_000, 1.0, 0.1)
    config.image_block.set_r2d3_image()
    config.hidden_block.set_mlp((512,))
    config.window_length = 4
    config.processors = [
        ImageProcessor(
            image_type=EnvObservationTypes.GRAY_2ch,
            trimming=(30, 0, 210, 160),
            resize=(84, 84),
            enable_norm=True,
        )
    ]
    config.use_rl_processor = False
    return srl.Runner(env, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--actors", type=int, default=1, help="as many as are started, or will be")
    parser.add_argument("--directory", type=Path, default="pong", help="for checkpoints, history, pictures")
    parser.add_argument("--local", action="store_true", help="start broker, trainer and actors here")
    arguments = parser.parse_args()

    logger_print()
    runner = make_runner()
    directory = arguments.directory
    if arguments.local:
        runner.train_mp(
            actor_num=arguments.actors,
            max_train_count=arguments.updates,
            checkpoint_save_dir=directory,
            history_save_dir=directory,
        )
    else:
        # Without arguments the address comes from SRL_REDIS_URL and SRL_REDIS_PASSWORD.
        runner.train_distribution_start(
            RedisParameters(), actor_num=arguments.actors, max_train_count=arguments.updates
        )
        # From here on the client may leave. Whoever comes back does this:
        manager = TaskManager(RedisParameters())
        manager.train_wait(checkpoint_save_dir=directory, history_save_dir=directory)
        runner = manager.create_runner()

    print(f"mean score of 5 greedy games: {statistics.mean(runner.evaluate(5)):.1f} (-21 to 21)")
    runner.load_checkpoint(directory)
    runner.animation_save_gif(directory / "pong.gif")
    history = srl.Runner.load_history(directory)
    history.plot(ylabel_left=["eval_reward0"], xlabel="train", save_path=directory / "learning_curve.png")
    print(f"left in {directory}/: pong.gif, learning_curve.png, checkpoints, history.jsonl")


if __name__ == "__main__":
    main()
