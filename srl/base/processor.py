"""Processors: what is done to an env's observations, rewards and episode ends before an agent sees them.

A processor is settings with a name that wrap an env, so any Gymnasium wrapper can be one. Episode
rewards are recorded below all processors: evaluation always reports what the env itself gave.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from srl.base.errors import ConfigError
from srl.base.settings import Named


class Processor(Named, key="processor"):
    """Base of all processors: a dataclass that subclasses it registers under its class name."""

    @property
    def frame_scale(self) -> float | None:
        """What networks multiply frames by, `None` where this processor leaves that as it is."""
        return None

    @property
    def frame_function(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """What `wrap` does to each observation, `None` where it does anything else or more."""
        return None

    def for_evaluation(self) -> "Processor":
        """Return the processor that evaluations use in place of this one."""
        return self

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Return `env` with this processing around it; raise `SpaceError` where it cannot be done."""
        raise ConfigError(f"{type(self).__name__} must define wrap(env)")
