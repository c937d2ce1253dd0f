"""Stable-Baselines3's DQN collecting Pong transitions without learning, beside `benchmarks.images actor`."""

import argparse
import time

import ale_py
import gymnasium
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

gymnasium.register_envs(ale_py)


class StopAfter(BaseCallback):
    """Ends training after so many seconds, the first two of which do not count."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._started_s = time.perf_counter()
        self._counted_from: tuple[float, int] | None = None
        self.rate = 0.0

    def _on_step(self) -> bool:
        now_s = time.perf_counter()
        if self._counted_from is None:
            if now_s - self._started_s > 2:
                self._counted_from = now_s, self.num_timesteps
            return True
        since_s, steps = self._counted_from
        self.rate = (self.num_timesteps - steps) / (now_s - since_s)
        return now_s - since_s < self._seconds


def main() -> None:
    """Print env steps a second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--processes", action="store_true", help="one for each env")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    env = make_atari_env(
        "ALE/Pong-v5",
        n_envs=arguments.lanes,
        vec_env_cls=SubprocVecEnv if arguments.processes else DummyVecEnv,
        seed=0,
        env_kwargs={"frameskip": 7, "repeat_action_probability": 0},
        wrapper_kwargs={"frame_skip": 1, "noop_max": 0},
    )
    # No exploration and no updates: every step asks the network, which is what ours does too.
    model = DQN(
        "CnnPolicy",
        VecFrameStack(env, 4),
        buffer_size=10_000,
        learning_starts=0,
        train_freq=(10**9, "step"),
        exploration_initial_eps=0.0,
        exploration_final_eps=0.0,
        device="cpu",
    )
    stop = StopAfter(arguments.seconds)
    model.learn(10**9, callback=stop)
    env.close()
    print(stop.rate)


if __name__ == "__main__":
    main()
