"""A run in one process: actor, trainer and evaluator take turns, exactly repeatable for a seed."""

import functools
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from srl.base.algorithm import RLConfig, Tree
from srl.base.env import EnvConfig
from srl.base.errors import CheckpointError
from srl.base.spaces import Spaces
from srl.runner.actor import Actor
from srl.runner.checkpoint import save_checkpoint
from srl.runner.evaluate import Evaluator
from srl.runner.history import HistoryWriter
from srl.runner.lanes import make_lanes
from srl.runner.progress import Progress
from srl.runner.run_config import RunConfig
from srl.runner.saving import Saving
from srl.runner.shutdown import StopEvent
from srl.runner.status import ActorStatus, Evaluation, RunState, RunStatus, TrainerStatus
from srl.runner.trainer import Trainer

logger = logging.getLogger("srl")

REPORT_S = 1.0
"""Seconds between history rows."""


class LocalRun:
    """One call of `Runner.train`.

    Args:
        trainer: learns; it may have learned before, limits count from where it is.
        env_steps: what earlier calls of the same runner took; the run's clock of steps goes on from it.
        actor_state: what the actor was doing then; it goes on with that.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        config: RLConfig,
        run_config: RunConfig,
        trainer: Trainer,
        *,
        env_steps: int,
        actor_state: Tree | None,
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
            # Without the actor's state a second call does not play the first one's episodes again either.
            seed=run_config.seed + env_steps,
            lane_numbers=range(run_config.num_envs),
            total_lanes=run_config.num_envs,
            distributed=False,
        )
        self.actor_state: Tree | None = None
        """What the actor was doing at the end, for the next call; `None` where something broke."""
        if actor_state is not None:
            self._resume_actor(actor_state)
        self._evaluator: Evaluator | None = None
        if run_config.eval_episodes:
            self._evaluator = Evaluator(
                env_config, config, policy, episodes=run_config.eval_episodes, seed=run_config.seed
            )
        self._history = HistoryWriter(history_dir) if history_dir is not None else None
        self._checkpoint_dir = checkpoint_dir
        self._checkpoints, self._rows = Saving("checkpoints"), Saving("history rows")
        self._mark: Tree | None = None  # of the memory, at the newest checkpoint
        if checkpoint_dir is not None:
            mark = trainer.memory.mark()
            if mark is None:
                logger.info("the replay memory is not in files: whoever resumes this run fills it anew")
            elif env_steps:
                self._mark = mark  # a call that goes on begins at a checkpoint
        self._reserve = _frames_of_a_turn(config, lanes.spaces, run_config.num_envs)
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
        self._learn()  # what was due when the last call ended
        self._actor.set_parameters(self._trainer.parameters, self._trainer.train_count)
        while not (stop.is_set() or self._finished()):
            self._turn()
            now_s = self._elapsed_s()
            if self._evaluator is not None:
                next_evaluation_s = self._evaluate(now_s, next_evaluation_s)
            if now_s >= next_report_s:
                next_report_s = now_s + REPORT_S
                self._report(now_s)
            if self._checkpoint_dir is not None and (now_s >= next_checkpoint_s or self._is_room_short()):
                next_checkpoint_s = now_s + self._run_config.checkpoint_interval_s
                self._save_checkpoint()
            progress.update(self._status("running"))
        self._report(self._elapsed_s())
        self.actor_state = self._actor.get_state()
        if self._checkpoint_dir is not None:
            self._save_checkpoint()
        self._checkpoints.raise_failure()
        self._rows.raise_failure()
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
        if self._learn():
            actor.set_parameters(trainer.parameters, trainer.train_count)

    def _learn(self) -> bool:
        """Do the updates that are due; returns whether there were any."""
        trainer, learned = self._trainer, False
        while not self._finished():
            left = self._updates_left()
            updates = trainer.due(left)
            # Whole dispatches only, but for the last: the same updates, in fewer calls.
            if updates < min(left, trainer.dispatch):
                break
            trainer.learn(updates)
            learned = True
        return learned

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
        history = self._history
        if history is not None:
            self._rows.attempt(lambda: history.append(row))

    def _save_checkpoint(self) -> None:
        directory, mark = self._checkpoint_dir, self._trainer.memory.mark()
        assert directory is not None
        run_state: dict[str, Any] = {"actor": self._actor.get_state()}
        if mark is not None:
            run_state["memory"] = mark
        save = functools.partial(
            save_checkpoint,
            directory,
            train_count=self._trainer.train_count,
            parameters=self._trainer.parameters,
            learner_state=self._trainer.learner.get_state(),
            state={**self._trainer.get_state(), "env_steps": self._env_steps},
            config=self._configs,
            run_state=run_state,
        )
        if self._checkpoints.attempt(save):
            self._mark = mark

    def _is_room_short(self) -> bool:
        """Return whether the memory could soon not go back to the newest checkpoint any more."""
        memory = self._trainer.memory
        if self._mark is None or memory.room(self._mark) >= self._reserve:
            return False
        if self._checkpoints.failure is not None:
            return False  # and it is not tried again in every turn
        now = memory.mark()
        if now is not None and memory.room(now) >= self._reserve:
            return True
        logger.warning("memory.capacity is too low for so many lanes: a killed run cannot always be resumed exactly")
        self._mark = None
        return False

    def _resume_actor(self, state: Tree) -> None:
        try:
            self._trainer.insert(self._actor.set_state(state), env_steps=0)
        except CheckpointError as error:
            logger.warning("all lanes start new episodes: %s", error)

    def _status(self, state: RunState, error: str | None = None) -> RunStatus:
        config, trainer, now_s = self._run_config, self._trainer, self._elapsed_s()
        times_left_s = [] if config.timeout is None else [config.timeout - now_s]
        if config.max_train_count is not None and self._rates[0] > 0:
            times_left_s.append(self._updates_left() / self._rates[0])
        return RunStatus(
            task=self._name,
            state=state,
            error=error,
            warning="; ".join(filter(None, [self._checkpoints.note(), self._rows.note()])),
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


def _frames_of_a_turn(config: RLConfig, spaces: Spaces, lanes: int) -> int:
    """Return how many frames one turn stores at most: in each lane a segment is full, and the next one ends."""
    return (2 * lanes + 1) * (config.steps_per_segment(spaces) + 1)
