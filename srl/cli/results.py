"""`srl evaluate` and `srl plot`: what a run left on disk."""

import statistics
from pathlib import Path

import click

from srl.base.errors import ConfigError
from srl.cli.options import DIRECTORY, allow_option, import_modules, show_log

PICTURES = (".png", ".svg", ".pdf")


@click.command()
@click.argument("checkpoint_dir", type=DIRECTORY)
@click.option("--episodes", type=click.IntRange(min=1), default=10, show_default=True, help="Greedy episodes.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the envs.")
@click.option(
    "--gif",
    "animation",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also save one episode, with step, action and reward beside the frame, as a .gif or .mp4 file.",
)
@allow_option
def evaluate(checkpoint_dir: Path, episodes: int, seed: int, animation: Path | None, allow: tuple[str, ...]) -> None:
    """Play greedily with the newest checkpoint of a directory.

    Env and algorithm are those that the checkpoint says. Rewards are as the env gave them.

    \b
    Examples:
      srl evaluate run
      srl evaluate run/20000 --episodes 100    # one checkpoint of several
      srl evaluate run --gif cartpole.gif
      srl evaluate run --allow my_envs         # an env that my_envs.py defines
    """  # noqa: D301
    from srl.base.env import EnvConfig
    from srl.runner import checkpoint
    from srl.runner.plugins import config_from_dict
    from srl.runner.runner import Runner

    show_log()
    if animation is not None and animation.suffix.lower() not in (".gif", ".mp4"):
        raise ConfigError(f"--gif saves .gif or .mp4 files, not {animation.name!r}")
    loaded = checkpoint.load_checkpoint(checkpoint_dir)
    import_modules(allow)
    runner = Runner(EnvConfig.from_dict(loaded.config["env"]), config_from_dict(loaded.config["rl"]), seed=seed)
    runner.load_checkpoint(loaded.path)
    click.echo(f"{loaded.path}: {runner.env_config.name}, {runner.config.algorithm}, {runner.train_count:,} updates")
    click.echo(reward_text(runner.evaluate(episodes)))
    if animation is not None:
        reward = runner.animation_save_gif(animation)
        click.echo(f"animation: {animation} (reward {reward:,.5g})")


@click.command()
@click.argument("history_dir", type=DIRECTORY)
@click.option("--left", multiple=True, metavar="COLUMN", help="Column for the left axis.  [default: eval_reward0]")
@click.option("--right", multiple=True, metavar="COLUMN", help="Column for the right axis.")
@click.option("--x", "x_column", default="time", show_default=True, metavar="COLUMN", help="Column along the bottom.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A .png, .svg or .pdf file.  [default: history.png in HISTORY_DIR]",
)
def plot(history_dir: Path, left: tuple[str, ...], right: tuple[str, ...], x_column: str, output: Path | None) -> None:
    """Draw a run's history; --left and --right may be given several times.

    A column that does not exist is answered with the names of all that do.

    \b
    Examples:
      srl plot run
      srl plot run --left eval_reward0 --left reward0 --right loss --x train --output curves.svg
    """  # noqa: D301
    from srl.runner.history import History

    target = output if output is not None else history_dir / "history.png"
    if target.suffix.lower() not in PICTURES:
        raise ConfigError(f"--output saves {', '.join(PICTURES)} files, not {target.name!r}")
    history = History.load(history_dir)
    history.plot(left or ("eval_reward0",), right, x_column, save_path=target)
    click.echo(str(target))


def reward_text(rewards: list[float]) -> str:
    """Say how an evaluation went."""
    episodes = f"{len(rewards)} episode{'s' * (len(rewards) != 1)}"
    return f"mean reward {statistics.fmean(rewards):,.5g} over {episodes} ({min(rewards):,.5g} to {max(rewards):,.5g})"
