"""The Pendulum work of `benchmarks.speed job` with Stable-Baselines3's DQN; imports nothing of SRL.

`python -m benchmarks.peers` runs it in an environment that has requirements.txt. Same network (64x64), batch,
learning rate, discount, memory size, warm-up, target copies, action levels, and one update for each env step.
Its replay is uniform and its returns are of one step, which is less work than ours.
"""

import argparse
import json
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

LEVELS = 5
WARMUP = 1_000


class DiscreteActions(gymnasium.ActionWrapper[Any, Any, Any]):
    """Gives the one continuous action as many levels as SRL does."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.action_space
        assert isinstance(space, gymnasium.spaces.Box)
        self._levels = np.linspace(space.low, space.high, LEVELS, dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(LEVELS)

    def action(self, action: Any) -> np.ndarray:
        """Return the env's action."""
        return self._levels[int(action)]


def main() -> None:
    """Train, evaluate ten greedy episodes, and print their mean as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--envs", type=int, default=8, help="stepped together, with as many updates after each step")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    envs = make_vec_env("Pendulum-v1", n_envs=arguments.envs, wrapper_class=DiscreteActions)
    model = DQN(
        "MlpPolicy",
        envs,
        policy_kwargs={"net_arch": [64, 64]},
        learning_rate=1e-3,
        buffer_size=5_000,
        learning_starts=WARMUP,
        batch_size=32,
        gamma=0.99,
        train_freq=1,
        gradient_steps=-1,  # as many as env steps were taken
        target_update_interval=1_000,
        exploration_fraction=0.1,
        exploration_final_eps=0.1,
        device="cpu",
    )
    model.learn(WARMUP + arguments.updates)
    rewards, _ = evaluate_policy(
        model,
        make_vec_env("Pendulum-v1", n_envs=8, wrapper_class=DiscreteActions),
        n_eval_episodes=10,
        return_episode_rewards=True,
    )
    print(json.dumps({"mean": float(np.mean(rewards)), "updates": model._n_updates}))


if __name__ == "__main__":
    main()
