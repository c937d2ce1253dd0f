"""Processors: what is done to an env's observations, rewards and episode ends before an agent sees them.

A processor is settings with a name that wrap an env, so any Gymnasium wrapper can be one. Episode
rewards are recorded below all processors: evaluation always reports what the env itself gave.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium

from srl.base.errors import ConfigError
from srl.base.settings import Settings

PROCESSORS: dict[str, type["Processor"]] = {}


class Processor(Settings):
    """Base of all processors: a dataclass that subclasses it registers under its class name."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__name__
        PROCESSORS[cls.name] = cls

    @classmethod
    def coerce(cls, value: Any) -> Any:
        """Find the registered processor that JSON data names; anything else is returned as it is."""
        if not isinstance(value, Mapping) or "processor" not in value:
            return value
        fields = dict(value)
        name = fields.pop("processor")
        if name not in PROCESSORS:
            raise ConfigError(f"no processor is called {name!r}; known here: {', '.join(sorted(PROCESSORS))}")
        return PROCESSORS[name].from_dict(fields)

    @property
    def frame_scale(self) -> float | None:
        """What networks multiply frames by, `None` where this processor leaves that as it is."""
        return None

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Return `env` with this processing around it; raise `SpaceError` where it cannot be done."""
        raise ConfigError(f"{type(self).__name__} must define wrap(env)")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and, under `processor`, the registered name."""
        return {"processor": self.name, **super().to_dict()}
