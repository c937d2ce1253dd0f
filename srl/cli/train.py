"""`srl train`: one run from the command line, in this process, on this machine's processes, or at a broker."""

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from srl.base.errors import CheckpointError, ConfigError, UnknownFieldError
from srl.cli.options import (
    DIRECTORY,
    allow_option,
    broker_options,
    broker_parameters,
    import_modules,
    show_log,
    writable,
)
from srl.cli.results import reward_text
from srl.runner.run_config import STOP_CONDITIONS

if TYPE_CHECKING:
    from srl.runner.distribution.parameters import RedisParameters
    from srl.runner.runner import Runner
    from srl.runner.status import RunStatus

logger = logging.getLogger("srl")

PATIENCE_S = 30.0


@click.command()
@click.argument("env", metavar="ENV")
@click.option("--algorithm", default="dqn", show_default=True, help="srl settings lists them all.")
@click.option(
    "--actors",
    type=click.IntRange(0, 10_000),
    default=2,
    show_default=True,
    help="Actor processes beside the trainer's; 0 trains in this process, repeatably for a seed. At a broker: how "
    "many actors share the task.",
)
@click.option("--max-train-count", type=click.IntRange(min=1), metavar="N", help="Stop after this many updates.")
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N", help="Stop after this many env steps.")
@click.option("--max-episodes", type=click.IntRange(min=1), metavar="N", help="Stop after this many episodes.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop after this time.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Everything random follows from it.")
@click.option(
    "--num-envs",
    type=click.IntRange(1, 4096),
    default=8,
    show_default=True,
    metavar="N",
    help="Envs that each actor steps together.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the algorithm, or values separated by commas; may be given several times. See srl settings.",
)
@click.option(
    "--env-kwargs",
    multiple=True,
    metavar="KEY=JSON",
    help="An argument for the env's constructor; may be given several times.",
)
@click.option(
    "--env-processes", is_flag=True, help="Give each env a process of its own, so that a native crash costs it alone."
)
@click.option(
    "--env-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="An env whose step or reset takes longer hangs and is replaced.",
)
@click.option("--checkpoint-dir", type=DIRECTORY, help="Keep checkpoints here, one every 30 s and one at the end.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the newest checkpoint in --checkpoint-dir, where there is one. --max-train-count and "
    "--max-steps then count from that run's beginning, so the same command may just be run again.",
)
@click.option("--history-dir", type=DIRECTORY, help="Append the run's history here, for srl plot.")
@click.option(
    "--eval-episodes",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Greedy episodes played at the end; 0 for none.",
)
@broker_options
@click.option("--task-name", default="", metavar="NAME", help="Name of the task at the broker.")
@click.option("--detach", is_flag=True, help="Leave the task at the broker and return.")
@allow_option
def train(
    env: str,
    algorithm: str,
    actors: int,
    seed: int | None,
    settings: tuple[str, ...],
    env_kwargs: tuple[str, ...],
    env_processes: bool,
    env_timeout: float,
    checkpoint_dir: Path | None,
    resume: bool,
    history_dir: Path | None,
    eval_episodes: int,
    redis_url: str | None,
    password_file: Path | None,
    connect_timeout: float | None,
    task_name: str,
    detach: bool,
    allow: tuple[str, ...],
    **run_arguments: Any,
) -> None:
    """Train an agent for ENV, a Gymnasium id or MODULE:ID for an own one, then evaluate it.

    Without a broker, trainer and actors are processes of this machine. With --redis-url, or SRL_REDIS_URL set, the
    run is a task for the workers there (srl trainer, srl actor); it goes on when this command is stopped.

    At least one of --max-train-count, --max-steps, --max-episodes and --timeout must be given; the first that is
    reached ends the run.

    \b
    Examples:
      srl train CartPole-v1 --max-train-count 20000 --checkpoint-dir run --history-dir run
      srl train CartPole-v1 --max-train-count 5000 --actors 0 --seed 1
      srl train Pendulum-v1 --timeout 60 --env-kwargs g=9.8 --set hidden_block.mlp=64,64 --set lr=0.0005
      srl train my_envs:Maze-v0 --max-steps 100000     # my_envs.py in this directory registers Maze-v0
      srl train CartPole-v1 --max-train-count 200000 --actors 8 --redis-url redis://broker:6379 --detach
    """  # noqa: D301
    show_log()
    at_broker = actors > 0 and bool(redis_url or os.environ.get("SRL_REDIS_URL"))
    _check(run_arguments, actors, redis_url, at_broker, detach, task_name, checkpoint_dir, resume)
    at: RedisParameters | None = None
    if at_broker:
        at = broker_parameters(redis_url, password_file, connect_timeout, patience_s=PATIENCE_S, task_name=task_name)
    import_modules(allow)
    runner = _make_runner(env, algorithm, seed, settings, env_kwargs)
    runner.env_config.env_processes, runner.env_config.env_timeout_s = env_processes, env_timeout
    if resume and not _resume(runner, checkpoint_dir, run_arguments):
        click.echo(f"nothing left to do: {checkpoint_dir} is at {runner.train_count:,} updates")
        return
    if at is not None and detach:
        manager = runner.train_distribution_start(at, actors, **run_arguments)
        click.echo(f"{manager.task}\nwatch it with: srl watch --redis-url {at.address} --task {manager.task}")
        manager.close()
        return
    workers = f"with {actors} actor{'s' * (actors != 1)}" if actors else "in this process"
    place = f"{workers} at {at.address}" if at is not None else workers
    logger.info("%s learns %s %s, seed %d", algorithm, env, place, runner.seed)
    saved: dict[str, Any] = {
        "checkpoint_save_dir": writable(checkpoint_dir),
        "history_save_dir": writable(history_dir),
    }
    status: RunStatus | None = None
    if at is not None:
        status = runner.train_distribution(at, actors, **saved, **run_arguments)
    elif actors:
        status = runner.train_mp(actors, allow=allow, **saved, **run_arguments)
    else:
        runner.train(**saved, **run_arguments)
    click.echo(f"{runner.env_config.name}: {runner.train_count:,} updates, {runner.env_steps:,} env steps")
    if eval_episodes:
        click.echo(reward_text(runner.evaluate(eval_episodes)))
    _say_where(checkpoint_dir, history_dir)
    if status is not None and status.state == "cancelled":
        raise click.ClickException(f"task {status.task} was cancelled")


def _check(
    run_arguments: dict[str, Any],
    actors: int,
    redis_url: str | None,
    at_broker: bool,
    detach: bool,
    task_name: str,
    checkpoint_dir: Path | None,
    resume: bool,
) -> None:
    """Refuse options that are missing or exclude each other, before anything is imported."""
    if not any(run_arguments[name] for name in STOP_CONDITIONS):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in STOP_CONDITIONS)
        raise click.UsageError(f"say when to stop with at least one of {options}")
    if redis_url and not actors:
        raise click.UsageError("--actors 0 trains in this process, without the broker of --redis-url; leave one out")
    if (detach or task_name) and not at_broker:
        option = "--detach" if detach else "--task-name"
        raise click.UsageError(f"{option} is for a task at a broker; give --redis-url, and at least one actor")
    if detach and checkpoint_dir is not None:
        raise click.UsageError("--detach keeps nothing here; give --checkpoint-dir to srl watch")
    if resume and checkpoint_dir is None:
        raise click.UsageError("--resume needs the --checkpoint-dir to go on from")
    if checkpoint_dir is not None and not resume and _has_checkpoints(checkpoint_dir):
        raise click.UsageError(
            f"{checkpoint_dir} has the checkpoints of a run already; go on with that run (--resume), or give another "
            "--checkpoint-dir"
        )


def _make_runner(
    env: str, algorithm: str, seed: int | None, settings: tuple[str, ...], env_kwargs: tuple[str, ...]
) -> "Runner":
    from srl.base.env import EnvConfig
    from srl.base.settings import set_by_path
    from srl.runner.plugins import find_algorithm
    from srl.runner.runner import Runner

    config = find_algorithm(algorithm)()
    for text in settings:
        name, value = _split(text, "--set")
        try:
            set_by_path(config, name, value)
        except UnknownFieldError as error:
            raise UnknownFieldError(f"--set {text}: {error} (srl settings {algorithm} lists all)") from error
        except ConfigError as error:
            raise ConfigError(f"--set {text}: {error}") from error
    kwargs = {}
    for text in env_kwargs:
        name, value = _split(text, "--env-kwargs")
        try:
            kwargs[name] = json.loads(value)
        except ValueError:
            kwargs[name] = value  # a word needs no quotes
    return Runner(EnvConfig(env, kwargs), config, seed=seed)


def _env_identity(env: dict[str, Any]) -> dict[str, Any]:
    """Return what makes an env another one; how it is run may change between runs."""
    return {name: value for name, value in env.items() if name not in ("env_processes", "env_timeout_s")}


def _resume(runner: "Runner", directory: Path | None, run_arguments: dict[str, Any]) -> bool:
    """Go on from a directory's newest checkpoint, where it has one; returns whether anything is left to do."""
    from srl.runner import checkpoint

    if directory is None or not _has_checkpoints(directory):
        return True
    loaded = checkpoint.load_checkpoint(directory)
    if _env_identity(loaded.config["env"]) != _env_identity(runner.env_config.to_dict()):
        raise CheckpointError(
            f"{loaded.path} is of the env {loaded.config['env']}, not {runner.env_config.to_dict()}; give another "
            "--checkpoint-dir"
        )
    runner.load_checkpoint(loaded.path)
    logger.info("going on from %s", loaded.path)
    for name, done in (("max_train_count", runner.train_count), ("max_steps", runner.env_steps)):
        if run_arguments[name] is not None:
            run_arguments[name] -= done
            if run_arguments[name] <= 0:
                return False
    return True


def _has_checkpoints(directory: Path) -> bool:
    return directory.is_dir() and any(path.name.isdigit() for path in directory.iterdir())


def _split(text: str, option: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.UsageError(f"{option} takes NAME=VALUE, not {text!r}")
    return name.strip(), value.strip()


def _say_where(checkpoint_dir: Path | None, history_dir: Path | None) -> None:
    if checkpoint_dir is not None:
        click.echo(f"checkpoints: {checkpoint_dir} (srl evaluate {checkpoint_dir})")
    else:
        click.echo("checkpoints: none; give --checkpoint-dir to keep what is learned")
    if history_dir is not None:
        click.echo(f"history: {history_dir} (srl plot {history_dir})")
