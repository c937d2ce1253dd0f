"""The distributed side: broker address, worker loops, and the task manager.

Names are resolved on first use, so that importing this costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srl.runner.distribution.parameters import RedisParameters
    from srl.runner.distribution.servers import actor_run_forever, trainer_run_forever
    from srl.runner.distribution.task_manager import TaskManager

__all__ = ["RedisParameters", "TaskManager", "actor_run_forever", "trainer_run_forever"]

_HOMES = {
    "RedisParameters": "parameters",
    "TaskManager": "task_manager",
    "actor_run_forever": "servers",
    "trainer_run_forever": "servers",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)  # noqa: TID251
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
