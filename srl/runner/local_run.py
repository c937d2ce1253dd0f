"""A run in one process: actor, trainer and evaluator take turns, exactly repeatable for a seed."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from srl.base.algorithm import RLConfig
from srl.base.env import EnvConfig
from srl.runner.actor import Actor
from srl.runner.checkpoint import save_checkpoint
from srl.runner.evaluate import Evaluator
from srl.runner.history import HistoryWriter
from srl.runner.lanes import make_lanes
from srl.runner.progress import Progress
from srl.runner.run_config import RunConfig
from srl.runner.shutdown import StopEvent
from srl.runner.status import ActorStatus, Evaluation, RunState, RunStatus, TrainerStatus
from srl.runner.trainer import Trainer

REPORT_S = 1.0
"""Seconds between history rows."""


class LocalRun:
    """One call of `Runner.train`.

    Args:
        trainer: learns; it may have learned before, limits count from where it is.
        env_steps: what earlier calls of the same runner took; the run's clock of steps goes on from it.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        config: RLConfig,
        run_config: RunConfig,
        trainer: Trainer,
        *,
        env_steps: int,
        checkpoint_dir: Path | None,
        history_dir: Path | None,
    ) -> None:
        self._name = env_config.name
        self._configs: dict[str, Any] = {}
        if checkpoint_dir is not None:
            self._configs = {"env": env_config.to_dict(), "rl": config.to_dict()}
        self._run_config = run_config
        self._trainer = trainer
        lanes = make_lanes(env_config, config, range(run_config.num_envs))
        policy = config.make_policy(lanes.spaces)
        self._actor = Actor(
            lanes,
            policy,
            config,
            # A second call plays on, it does not play the first one's episodes again.
            seed=run_config.seed + env_steps,
            lane_numbers=range(run_config.num_envs),
            total_lanes=run_config.num_envs,
            distributed=False,
        )
        self._evaluator: Evaluator | None = None
        if run_config.eval_episodes:
            self._evaluator = Evaluator(
                env_config, config, policy, episodes=run_config.eval_episodes, seed=run_config.seed
            )
        self._history = HistoryWriter(history_dir) if history_dir is not None else None
        self._checkpoint_dir = checkpoint_dir
        self._first_update = trainer.train_count
        self._first_step = self._env_steps = env_steps
        self._episodes = 0
        self._rewards: list[float] = []
        self._evaluation: Evaluation | None = None
        self._last_report = (0.0, trainer.train_count, env_steps)
        self._rates = (0.0, 0.0)

    @property
    def env_steps(self) -> int:
        """Env steps of the runner so far."""
        return self._env_steps

    def run(self, stop: StopEvent, progress: Progress) -> None:
        """Train until a stop condition is met or `stop` is set; everything learned stays in the trainer."""
        try:
            self._train(stop, progress)
        except Exception as error:
            progress.update(self._status("failed", f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._close()

    def _train(self, stop: StopEvent, progress: Progress) -> None:
        self._started_s = time.monotonic()
        next_report_s = next_checkpoint_s = next_evaluation_s = 0.0
        if self._checkpoint_dir is not None:
            next_checkpoint_s = self._run_config.checkpoint_interval_s
        trainer, actor = self._trainer, self._actor
        actor.set_parameters(trainer.parameters, trainer.train_count)
        while not (stop.is_set() or self._finished()):
            self._turn()
            now_s = self._elapsed_s()
            if self._evaluator is not None:
                next_evaluation_s = self._evaluate(now_s, next_evaluation_s)
            if now_s >= next_report_s:
                next_report_s = now_s + REPORT_S
                self._report(now_s)
            if self._checkpoint_dir is not None and now_s >= next_checkpoint_s:
                next_checkpoint_s = now_s + self._run_config.checkpoint_interval_s
                self._save_checkpoint()
            progress.update(self._status("running"))
        trainer.insert(actor.flush(), env_steps=0)
        self._report(self._elapsed_s())
        if self._checkpoint_dir is not None:
            self._save_checkpoint()
        progress.update(self._status("cancelled" if stop.is_set() else "done"))

    def _turn(self) -> None:
        """One vector step, then the updates that are due after it."""
        trainer, actor = self._trainer, self._actor
        actor.train_count = trainer.train_count
        produced = actor.step()
        self._env_steps += produced.env_steps
        self._episodes += len(produced.episode_rewards)
        self._rewards += produced.episode_rewards
        trainer.insert(produced.segments, env_steps=produced.env_steps)
        learned = False
        while not self._finished():
            left = self._updates_left()
            updates = trainer.due(left)
            # Whole dispatches only, but for the last: the same updates, in fewer calls.
            if updates < min(left, trainer.dispatch):
                break
            trainer.learn(updates)
            learned = True
        if learned:
            actor.set_parameters(trainer.parameters, trainer.train_count)

    def _updates_left(self) -> int:
        limit = self._run_config.max_train_count
        return 1 << 62 if limit is None else self._first_update + limit - self._trainer.train_count

    def _finished(self) -> bool:
        config = self._run_config
        return (
            self._updates_left() <= 0
            or (config.max_steps is not None and self._env_steps - self._first_step >= config.max_steps)
            or (config.max_episodes is not None and self._episodes >= config.max_episodes)
            or (config.timeout is not None and self._elapsed_s() >= config.timeout)
        )

    def _evaluate(self, now_s: float, next_s: float) -> float:
        evaluator = self._evaluator
        assert evaluator is not None
        if not evaluator.running:
            if now_s >= next_s:
                self._evaluated_at = self._trainer.train_count
                evaluator.begin(self._trainer.parameters)
            return next_s
        rewards = evaluator.step()
        if rewards is None:
            return next_s
        mean = float(np.mean(rewards))
        self._evaluation = Evaluation(train_count=self._evaluated_at, episodes=len(rewards), mean_reward=mean)
        row = {"time": round(now_s, 3), "train": self._evaluated_at, "role": "eval", "worker": "local"}
        self._append({**row, "step": self._env_steps, "eval_reward0": mean})
        return now_s + self._run_config.eval_interval_s

    def _report(self, now_s: float) -> None:
        trainer = self._trainer
        before_s, updates, steps = self._last_report
        elapsed_s = max(now_s - before_s, 1e-6)
        self._rates = (trainer.train_count - updates) / elapsed_s, (self._env_steps - steps) / elapsed_s
        self._last_report = (now_s, trainer.train_count, self._env_steps)
        row: dict[str, Any] = {
            "time": round(now_s, 3),
            "train": trainer.train_count,
            "step": self._env_steps,
            "episode": self._episodes,
            "role": "trainer",
            "worker": "local",
            "memory": len(trainer.memory),
            "updates_per_s": round(self._rates[0], 1),
            "env_steps_per_s": round(self._rates[1], 1),
            **trainer.take_metrics(),
        }
        if self._rewards:
            row["reward0"] = float(np.mean(self._rewards))
            self._rewards = []
        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        if self._history is not None:
            self._history.append(row)

    def _save_checkpoint(self) -> None:
        assert self._checkpoint_dir is not None
        save_checkpoint(
            self._checkpoint_dir,
            train_count=self._trainer.train_count,
            parameters=self._trainer.parameters,
            learner_state=self._trainer.learner.get_state(),
            state={**self._trainer.get_state(), "env_steps": self._env_steps},
            config=self._configs,
        )

    def _status(self, state: RunState, error: str | None = None) -> RunStatus:
        config, trainer, now_s = self._run_config, self._trainer, self._elapsed_s()
        times_left_s = [] if config.timeout is None else [config.timeout - now_s]
        if config.max_train_count is not None and self._rates[0] > 0:
            times_left_s.append(self._updates_left() / self._rates[0])
        return RunStatus(
            task=self._name,
            state=state,
            error=error,
            elapsed_s=now_s,
            remaining_s=max(0.0, min(times_left_s)) if times_left_s else None,
            train_count=trainer.train_count,
            max_train_count=None if config.max_train_count is None else self._first_update + config.max_train_count,
            env_steps=self._env_steps,
            evaluation=self._evaluation,
            memory_size=len(trainer.memory),
            memory_capacity=trainer.memory.capacity,
            parameter_version=trainer.train_count,
            trainer=TrainerStatus(
                worker="local",
                updates_per_s=self._rates[0],
                steps_received_per_s=self._rates[1],
                steps_received=self._env_steps,
                waiting_for="" if self._rates[0] else trainer.limiter.waiting_for(len(trainer.memory)),
            ),
            actors=(
                ActorStatus(
                    worker="local",
                    env_steps_per_s=self._rates[1],
                    steps_sent_per_s=self._rates[1],
                    steps_sent=self._env_steps,
                    env_steps=self._env_steps,
                    episodes=self._episodes,
                    parameter_version=self._actor.version,
                ),
            ),
        )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _close(self) -> None:
        self._actor.close()
        if self._evaluator is not None:
            self._evaluator.close()
        if self._history is not None:
            self._history.close()
