"""How long and how a run runs: the settings that are neither the env's nor the algorithm's.

The facade's keyword arguments make one; it goes into the task, so every worker reads the same.
"""

from dataclasses import dataclass
from typing import Any

from srl.base.errors import ConfigError
from srl.base.settings import Settings, setting


@dataclass
class RunConfig(Settings):
    """One run. At least one stop condition must be given; the first that is reached ends the run."""

    max_train_count: int | None = setting(None, doc="updates to do in this run")
    max_steps: int | None = setting(
        None, doc="env steps to take in this run; all lanes step together, so it may be a few more"
    )
    max_episodes: int | None = setting(None, doc="training episodes to finish in this run")
    timeout: float | None = setting(None, doc="seconds after which the run ends")
    seed: int = setting(0, low=0, doc="everything random follows from it")
    actor_num: int = setting(1, low=1, high=10_000, doc="actors that share the run")
    num_envs: int = setting(8, low=1, high=4096, doc="env lanes of an actor, stepped together")
    eval_episodes: int = setting(5, low=0, doc="greedy episodes of one evaluation beside training; 0 turns it off")
    eval_interval_s: float = setting(2.0, low=0, doc="seconds from the end of one evaluation to the next")
    checkpoint_interval_s: float = setting(30.0, above=0, doc="seconds between checkpoints")
    checkpoint_interval_updates: int = setting(
        5_000, low=1, doc="updates between checkpoints of a distributed run, where these come sooner"
    )
    lockstep: bool = setting(
        False,
        doc="whether actors and trainer of a distributed run take fixed turns, so that it gives the same result twice; "
        "actors play one round with the parameters of the round before the last",
    )
    parameter_send_interval_s: float = setting(
        0.02,
        low=0,
        doc="seconds between parameters sent to actors, and more for large networks; low is fresher and costs traffic",
    )

    def validate(self) -> None:
        """Raise `ConfigError` for a stop condition that is missing or not positive."""
        super().validate()
        conditions = {name: getattr(self, name) for name in STOP_CONDITIONS}
        given = {name: value for name, value in conditions.items() if value is not None}
        if not given:
            raise ConfigError(
                f"say when to stop with at least one of {', '.join(STOP_CONDITIONS)}, such as max_train_count=20_000"
            )
        for name, value in given.items():
            if value <= 0:
                raise ConfigError(f"{name} must be positive, not {value!r}")


STOP_CONDITIONS = ("max_train_count", "max_steps", "max_episodes", "timeout")


def make_run_config(**arguments: Any) -> RunConfig:
    """Return validated settings of a run from the facade's keyword arguments."""
    config = RunConfig(**arguments)
    config.validate()
    return config
