"""The `srl` command: its group of commands, and what each error means to a script that calls it.

The entry point is `main`. Command modules import nothing but click at their top, so that help is instant;
what a command needs is imported when it runs.
"""

import os
import sys
import traceback
from typing import Any

import click

import srl
from srl.base.errors import BrokerError, SrlError, WorkerError
from srl.cli.accounts import broker_acl
from srl.cli.budget import budget
from srl.cli.dashboard import dashboard
from srl.cli.deploy import deploy
from srl.cli.gke import gke
from srl.cli.results import evaluate, plot
from srl.cli.settings import settings
from srl.cli.tasks import cancel, status, watch
from srl.cli.train import train
from srl.cli.workers import actor, trainer

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_BROKER, EXIT_INTERRUPTED = 1, 2, 3, 130
"""4, no such task, is `srl.cli.tasks.NoTask`."""


class _Commands(click.Group):
    """The group that turns errors a user can mend into one message; anything else is a bug with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except Exception as error:
            code = _exit_code(error)
            if code is None:
                raise
            if os.environ.get("SRL_DEBUG"):
                traceback.print_exc()
            is_from_redis = not isinstance(error, SrlError | OSError)
            words = f"the broker was lost or refused a command: {error}" if is_from_redis else str(error)
            click.echo(f"Error: {words}", err=True)
            ctx.exit(code)


def _exit_code(error: Exception) -> int | None:
    """Return what an error means to a script, `None` for a bug."""
    if isinstance(error, BrokerError):
        return EXIT_BROKER
    if isinstance(error, SrlError):
        return EXIT_FAILED if isinstance(error, WorkerError) else EXIT_BAD_INPUT
    if isinstance(error, OSError) and error.filename is not None:
        return EXIT_BAD_INPUT  # a path that cannot be read or written
    redis: Any = sys.modules.get("redis")
    return EXIT_BROKER if redis is not None and isinstance(error, redis.RedisError) else None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(srl.__version__, message="srl %(version)s")
def cli() -> None:
    """Simple distributed reinforcement learning.

    \b
    On this machine:
      srl train CartPole-v1 --max-train-count 20000 --checkpoint-dir run --history-dir run
      srl evaluate run --gif cartpole.gif
      srl plot run

    \b
    On many, each with SRL_REDIS_URL (and SRL_REDIS_PASSWORD) set:
      srl trainer                              # one
      srl actor                                # as many as you like
      srl train CartPole-v1 --actors 8 --max-train-count 200000

    \b
    Exit codes:
      0    done; for a trainer or an actor also: stopped in order by a signal
      1    the run failed or was cancelled
      2    bad input: an option, a setting, an env, a path, a checkpoint, a package that is missing
      3    the broker cannot be reached, refused, or was lost
      4    no such task
      130  interrupted (Ctrl-C), 143 terminated (SIGTERM)

    Results go to standard output, log and errors to standard error. SRL_DEBUG=1 shows the traceback of every
    error.
    """  # noqa: D301 - \b is click's mark for "do not wrap"


for command in (
    train,
    trainer,
    actor,
    status,
    watch,
    cancel,
    evaluate,
    plot,
    settings,
    broker_acl,
    deploy,
    gke,
    dashboard,
    budget,
):
    cli.add_command(command)


def main() -> None:
    """Run the command that the arguments name and exit with its code."""
    cli(prog_name="srl")
