"""SRL: simple distributed reinforcement learning.

`srl.Runner(env, config)` trains in one process, on this machine's processes, or on a cluster. Names are
resolved on first use, so that `import srl` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srl.base.env import EnvConfig
    from srl.runner.runner import Runner

__version__ = "0.1.0"

__all__ = ["EnvConfig", "Runner"]

_HOMES = {"EnvConfig": "srl.base.env", "Runner": "srl.runner.runner"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)  # noqa: TID251
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
