"""The facade: `srl.Runner` trains, evaluates, saves, loads and shows an agent.

Scripts, the command line and the task manager use it; the work is done by the modules it calls.
"""

import logging
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from srl.base.algorithm import Learner, RLConfig, Tree
from srl.base.env import EnvConfig, env_config, make_agent_env
from srl.base.errors import CheckpointError, ConfigError, MissingExtraError
from srl.base.spaces import Spaces
from srl.runner import checkpoint
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.history import History
from srl.runner.plugins import needed_modules
from srl.runner.run_config import RunConfig, make_run_config
from srl.runner.status import RunStatus

logger = logging.getLogger("srl")


class Runner:
    """An env, an algorithm's config, and what has been learned.

    Args:
        env: a Gymnasium id or a `srl.EnvConfig`.
        rl_config: such as `srl.algorithms.dqn.Config()`.
        seed: everything random follows from it; by default a new one each time.

    Raises:
        ConfigError, EnvError, SpaceError, MissingExtraError: anything that could not work, before any work.
    """

    def __init__(self, env: str | EnvConfig, rl_config: RLConfig, seed: int | None = None) -> None:
        if not isinstance(rl_config, RLConfig):
            raise ConfigError(f"rl_config is an algorithm's config such as dqn.Config(), not {rl_config!r}")
        self.env_config = env_config(env)
        self.config = rl_config
        if seed is not None and (not isinstance(seed, int) or seed < 0):
            raise ConfigError(f"seed must be a whole number from 0 on, not {seed!r}")
        self.seed = secrets.randbelow(1 << 31) if seed is None else seed
        rl_config.validate()
        self.spaces, self._probed = self._probe(), rl_config.to_dict()
        self.env_steps = 0
        """Env steps of this runner's training so far."""
        self._learner: Learner | None = None
        self._trainer: Any = None
        self._trainer_state: dict[str, Any] | None = None
        self._made_from: Any = None  # the settings that the trainer was made from
        self._run_state: Tree = {}  # what the actor was doing and what the memory held, where that is known

    # --- training ------------------------------------------------------------------------------------

    def train(
        self,
        max_train_count: int | None = None,
        max_steps: int | None = None,
        max_episodes: int | None = None,
        timeout: float | None = None,
        *,
        num_envs: int = 8,
        eval_episodes: int = 5,
        eval_interval_s: float = 2.0,
        checkpoint_save_dir: str | Path | None = None,
        checkpoint_interval_s: float = 30.0,
        history_save_dir: str | Path | None = None,
        work_dir: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        """Train in this process; two runs with one seed give the same result, bit for bit.

        Limits count from this call: updates, env steps, episodes, seconds; the first that is reached ends it.
        Calling again goes on with what was learned, also in another process after `load_checkpoint`: exactly, where
        the env is deterministic and checkpoints are where they were. Disks that refuse checkpoints or history do
        not end it; what the last attempt failed with is raised at the end.

        Args:
            num_envs: env lanes stepped together.
            eval_episodes: greedy episodes of an evaluation beside training, on envs of its own; 0 for none.
            checkpoint_save_dir, history_save_dir: where to keep them.
            work_dir: where the replay memory keeps its files; by default in `<checkpoint_save_dir>/memory`, and
                without that in plain memory.
        """
        from srl.runner.local_run import LocalRun
        from srl.runner.progress import Progress
        from srl.runner.run_memory import memory_directory, open_memory
        from srl.runner.shutdown import stop_on_signals
        from srl.runner.trainer import Trainer

        run_config = make_run_config(
            max_train_count=max_train_count,
            max_steps=max_steps,
            max_episodes=max_episodes,
            timeout=timeout,
            seed=self.seed,
            num_envs=num_envs,
            eval_episodes=eval_episodes,
            eval_interval_s=eval_interval_s,
            checkpoint_interval_s=checkpoint_interval_s,
        )
        self._refresh(checkpoint_save_dir)
        made_from = (self.config.to_dict(), _path(work_dir))
        if self._trainer is not None and made_from != self._made_from:
            # Other settings: go on from what was learned, with a learner and a memory made from them.
            self.restore(self.learner.get_state(), {"env_steps": self.env_steps})
        if self._trainer is None:
            directory = memory_directory(_path(work_dir), _path(checkpoint_save_dir))
            logger.info("%s", self.config.preflight(self.spaces, directory))
            mark = self._run_state.get("memory")
            memory = open_memory(self.config, self.spaces, self.seed, directory, mark, shared=work_dir is not None)
            self._trainer = Trainer(self.config, self.spaces, self.learner, memory, distributed=False)
            self._made_from = made_from
            if self._trainer_state is not None:
                self._trainer.set_state(self._trainer_state)
        run = LocalRun(
            self.env_config,
            self.config,
            run_config,
            self._trainer,
            env_steps=self.env_steps,
            actor_state=self._run_state.get("actor"),
            checkpoint_dir=_path(checkpoint_save_dir),
            history_dir=_path(history_save_dir),
        )
        try:
            with stop_on_signals() as stop, Progress(enabled=progress) as shown:
                run.run(stop, shown)
        finally:
            self.env_steps = run.env_steps
            self._run_state = {} if run.actor_state is None else {"actor": run.actor_state}
        stop.raise_if_signalled()

    def train_mp(
        self,
        actor_num: int = 1,
        max_train_count: int | None = None,
        timeout: float | None = None,
        *,
        max_steps: int | None = None,
        max_episodes: int | None = None,
        checkpoint_save_dir: str | Path | None = None,
        history_save_dir: str | Path | None = None,
        progress: bool = True,
        allow: Sequence[str] = (),
        **run_arguments: Any,
    ) -> RunStatus:
        """Train with one trainer and `actor_num` actor processes on this machine, over an embedded broker.

        It is `train_distribution` with broker and workers started and stopped for it.

        Args:
            allow: modules that workers may import; those of this runner's env are added.
            run_arguments: `num_envs`, `eval_episodes`, `eval_interval_s`, `checkpoint_interval_s`,
                `parameter_send_interval_s` (see `srl.runner.run_config.RunConfig`).
        """
        from srl.runner.distribution.embedded import EmbeddedBroker
        from srl.runner.distribution.local_workers import LocalWorkers

        run_config = self._run_config(
            checkpoint_save_dir,
            actor_num=actor_num,
            max_train_count=max_train_count,
            max_steps=max_steps,
            max_episodes=max_episodes,
            timeout=timeout,
            **run_arguments,
        )
        modules = sorted({*allow, *needed_modules(self.env_config, self.config)})
        logger.info("%s", self.config.preflight(self.spaces, Path(tempfile.gettempdir())))
        with tempfile.TemporaryDirectory(prefix="srl-") as directory, EmbeddedBroker() as broker:
            logs, work_dir = Path(directory, "logs"), Path(directory, "work")
            manager = self._create_task(broker.parameters, run_config)
            workers = LocalWorkers(broker.parameters, actor_num, logs, modules, work_dir)

            def check() -> None:
                broker.check()
                workers.check()

            try:
                with workers:
                    status: RunStatus = manager.train_wait(
                        checkpoint_save_dir=checkpoint_save_dir,
                        history_save_dir=history_save_dir,
                        progress=progress,
                        check=check,
                    )
            except (KeyboardInterrupt, SystemExit):
                # The trainer has left a checkpoint by now; its broker is about to go.
                manager.load_into(self)
                if checkpoint_save_dir is not None:
                    self.save_checkpoint(checkpoint_save_dir)
                raise
            manager.load_into(self)
            manager.close()
        return status

    def train_distribution(
        self,
        redis_params: RedisParameters,
        actor_num: int = 1,
        max_train_count: int | None = None,
        timeout: float | None = None,
        *,
        max_steps: int | None = None,
        max_episodes: int | None = None,
        checkpoint_save_dir: str | Path | None = None,
        history_save_dir: str | Path | None = None,
        progress: bool = True,
        **run_arguments: Any,
    ) -> RunStatus:
        """Create a task at the broker, wait for it with progress, and read what was learned back.

        Workers are started elsewhere, before or after: `srl trainer` and `srl actor`. If this client is
        stopped, the task goes on; `TaskManager(redis_params).train_wait()` comes back to it.

        Raises:
            BrokerError: the broker is unreachable or unsafe. WorkerError: the task failed.
        """
        self._refresh(checkpoint_save_dir)
        manager = self.train_distribution_start(
            redis_params,
            actor_num,
            max_train_count=max_train_count,
            max_steps=max_steps,
            max_episodes=max_episodes,
            timeout=timeout,
            **run_arguments,
        )
        status: RunStatus = manager.train_wait(
            checkpoint_save_dir=checkpoint_save_dir, history_save_dir=history_save_dir, progress=progress
        )
        manager.load_into(self)
        manager.close()
        return status

    def train_distribution_start(
        self,
        redis_params: RedisParameters,
        actor_num: int = 1,
        max_train_count: int | None = None,
        timeout: float | None = None,
        *,
        max_steps: int | None = None,
        max_episodes: int | None = None,
        **run_arguments: Any,
    ) -> Any:
        """Create a task at the broker and return its `TaskManager` at once."""
        run_config = self._run_config(
            None,
            actor_num=actor_num,
            max_train_count=max_train_count,
            max_steps=max_steps,
            max_episodes=max_episodes,
            timeout=timeout,
            **run_arguments,
        )
        return self._create_task(redis_params, run_config)

    def _run_config(self, checkpoint_save_dir: str | Path | None, **arguments: Any) -> RunConfig:
        self._refresh(checkpoint_save_dir)
        if "seed" in arguments:
            raise ConfigError("the seed belongs to the runner: srl.Runner(env, config, seed=...)")
        return make_run_config(seed=self.seed, **arguments)

    def _create_task(self, redis_params: RedisParameters, run_config: RunConfig) -> Any:
        from srl.runner.distribution.task_manager import create_task

        learned = None
        if self._learner is not None:
            state = {**self._current_trainer_state(), "env_steps": self.env_steps}
            learned = (self._learner.train_count, self._learner.parameters, self._learner.get_state(), state)
        return create_task(redis_params, self.env_config, self.config, run_config, self.spaces, learned)

    # --- what was learned ----------------------------------------------------------------------------

    def _refresh(self, checkpoint_save_dir: str | Path | None = None) -> None:
        """Take note of what the user changed in the config; refuse what could not work."""
        self.config.validate()
        spaces = self.spaces if self.config.to_dict() == self._probed else self._probe()
        if spaces != self.spaces and self._learner is not None:
            raise ConfigError(
                "the config now makes other observations or actions than those learned from; make a new Runner"
            )
        self.spaces, self._probed = spaces, self.config.to_dict()
        newest = None if checkpoint_save_dir is None else checkpoint.newest_above(checkpoint_save_dir, self.train_count)
        if newest is not None:
            raise ConfigError(
                f"{checkpoint_save_dir} holds another run's checkpoint of {newest:,} updates, which would hide this "
                "run's; go on from it with runner.load_checkpoint, or name another directory"
            )

    def _probe(self) -> Spaces:
        """Make the env once to see the spaces that the config gives it."""
        env = make_agent_env(self.env_config, self.config)
        env.close()
        self.config.check_spaces(env.spaces)
        return env.spaces

    @property
    def learner(self) -> Learner:
        """The learner; made with its first parameters when first asked for."""
        if self._learner is None:
            self._learner = self.config.make_learner(self.spaces, self.seed)
        return self._learner

    @property
    def train_count(self) -> int:
        """Updates done so far."""
        return 0 if self._learner is None else self._learner.train_count

    @property
    def parameters(self) -> Tree:
        """The learned parameters, as a tree of arrays."""
        return self.learner.parameters

    def set_parameters(self, parameters: Tree) -> None:
        """Act with other parameters; the optimiser starts anew."""
        self.learner.set_parameters(parameters)

    def restore(self, learner_state: Tree, trainer_state: dict[str, Any], run_state: Tree | None = None) -> None:
        """Go on from a checkpoint's states; `CheckpointError` where they are of another kind or shape."""
        learner = self.config.make_learner(self.spaces, self.seed)
        learner.set_state(learner_state)
        self._learner = learner
        self.env_steps = int(trainer_state.get("env_steps", 0))
        self._trainer_state = trainer_state if "limiter" in trainer_state else None
        self._trainer, self._run_state = None, run_state or {}

    def save_checkpoint(self, directory: str | Path) -> Path:
        """Write parameters, optimiser and counters to `<directory>/<train count>/`; returns that path."""
        state = {**self._current_trainer_state(), "env_steps": self.env_steps}
        mark = None if self._trainer is None else self._trainer.memory.mark()
        return checkpoint.save_checkpoint(
            Path(directory),
            train_count=self.train_count,
            parameters=self.parameters,
            learner_state=self.learner.get_state(),
            state=state,
            config={"env": self.env_config.to_dict(), "rl": self.config.to_dict()},
            run_state={**self._run_state, **({} if mark is None else {"memory": mark})},
        )

    def load_checkpoint(self, directory: str | Path) -> None:
        """Go on from the newest valid checkpoint in a directory.

        Raises `CheckpointError` where it is missing or damaged, or of another algorithm or shape.
        """
        loaded = checkpoint.load_checkpoint(Path(directory))
        self._check_algorithm(str(loaded.config.get("rl", {}).get("algorithm", "")), loaded.path)
        with checkpoint.naming(loaded.path):
            self.restore(loaded.learner_state, loaded.state, loaded.run_state)

    def save_parameter(self, path: str | Path) -> None:
        """Write the parameters to one safetensors file."""
        checkpoint.save_parameter(Path(path), self.parameters, {"algorithm": self.config.algorithm})

    def load_parameter(self, path: str | Path) -> None:
        """Act with the parameters of `save_parameter`'s file; `CheckpointError` where they do not fit."""
        parameters, metadata = checkpoint.load_parameter(Path(path))
        self._check_algorithm(str(metadata.get("algorithm", "")), Path(path))
        with checkpoint.naming(Path(path)):
            self.set_parameters(parameters)

    @staticmethod
    def load_history(directory: str | Path) -> History:
        """Return the history that a run left in a directory, to look at and plot."""
        return History.load(directory)

    def _current_trainer_state(self) -> dict[str, Any]:
        if self._trainer is not None:
            return dict(self._trainer.get_state())
        return self._trainer_state or {}

    def _check_algorithm(self, algorithm: str, path: Path) -> None:
        if algorithm != self.config.algorithm:
            raise CheckpointError(
                f"{path} is of the algorithm {algorithm!r}, this runner's is {self.config.algorithm!r}"
            )

    # --- showing -------------------------------------------------------------------------------------

    def evaluate(self, max_episodes: int = 10, *, num_envs: int = 8) -> list[float]:
        """Play greedy episodes on envs of their own and return each one's reward.

        Rewards are as the env gave them: undiscounted, unclipped, unnormalised.
        """
        from srl.runner.evaluate import Evaluator

        self._refresh()
        for name, value in (("max_episodes", max_episodes), ("num_envs", num_envs)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        policy = self.config.make_policy(self.spaces)
        evaluator = Evaluator(
            self.env_config, self.config, policy, episodes=max_episodes, seed=self.seed, lanes=num_envs
        )
        evaluator.begin(self.parameters)
        rewards = None
        while rewards is None:
            rewards = evaluator.step()
        evaluator.close()
        return rewards

    def animation_save_gif(self, path: str | Path, *, max_steps: int = 10_000, fps: float = 30) -> float:
        """Save one greedy episode as `.gif` or `.mp4`, with step, action and reward drawn; returns its reward."""
        from srl.runner import render

        steps = render.Total(self._episode("rgb_array", max_steps))
        render.save_animation(Path(path), steps, fps)
        return steps.reward

    def render_terminal(self, *, max_steps: int = 10_000, fps: float = 30) -> float:
        """Play one greedy episode in the terminal; returns its reward."""
        from srl.runner import render

        mode = "ansi" if "ansi" in self._render_modes() else "rgb_array"
        steps = render.Total(self._episode(mode, max_steps))
        render.play_in_terminal(steps, fps)
        return steps.reward

    def render_window(self, *, max_steps: int = 10_000) -> float:
        """Play one greedy episode in the env's own window; returns its reward."""
        from srl.runner import render

        steps = render.Total(self._episode("human", max_steps))
        for _ in steps:
            pass
        return steps.reward

    def _render_modes(self) -> list[str]:
        env = make_agent_env(self.env_config, self.config)
        modes = list(env.metadata.get("render_modes", []))
        env.close()
        return modes

    def _episode(self, render_mode: str, max_steps: int) -> Iterator[Any]:
        """Play one greedy episode and yield a `RenderedStep` for the start and each step."""
        from srl.base.env import EPISODE_STATS
        from srl.runner.render import RenderedStep

        modes = self._render_modes()
        if render_mode not in modes:
            raise ConfigError(
                f"env {self.env_config.name!r} cannot render {render_mode!r}; it knows {', '.join(modes) or 'no mode'}"
            )
        policy = self.config.make_policy(self.spaces)
        parameters = policy.load(self.parameters)
        env = make_agent_env(self.env_config, self.config, training=False, render_mode=render_mode)
        frame, _ = env.reset(seed=self.seed)
        stack = np.repeat(frame[None, None], self.config.window_length, axis=1)
        state, rng = policy.initial_state(1), np.random.default_rng(self.seed)
        total, ended = 0.0, False
        try:
            yield RenderedStep(env.render(), 0, None, 0.0, 0.0)
            for number in range(1, max_steps + 1):
                chosen = policy.act(parameters, stack, state, rng, None)
                # An env that is stepped alone is not reset behind our back: its last frame can be drawn.
                frame, reward, terminated, truncated, info = env.step(chosen.action[0])
                stack = np.concatenate([stack[:, 1:], frame[None, None]], axis=1)
                state = chosen.state
                total += reward
                ended = EPISODE_STATS in info
                if ended:
                    total = float(info[EPISODE_STATS]["r"])  # as the env gave it, below all processors
                yield RenderedStep(env.render(), number, chosen.action[0], reward, total)
                if ended:
                    break
                if terminated or truncated:  # only for a processor: the env's own episode goes on
                    frame, _ = env.reset()
                    stack = np.repeat(frame[None, None], self.config.window_length, axis=1)
                    state = policy.initial_state(1)
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingExtraError(
                f"rendering needs a package: pip install 'srl[classic-control]' ({error})"
            ) from error
        finally:
            env.close()


def _path(directory: str | Path | None) -> Path | None:
    return None if directory is None else Path(directory)
