"""Find algorithms and processors by the names a task or a user gives.

What a process may import beyond the built-ins is said where it starts (`allow`), never by a message.
"""

import difflib
import importlib
import os
import pkgutil
from collections.abc import Iterable
from typing import Any

from srl.base.algorithm import ALGORITHMS, RLConfig
from srl.base.env import ALLOWED_MODULES, EnvConfig
from srl.base.errors import ConfigError
from srl.base.settings import Named

PLUGINS_VARIABLE = "SRL_ALLOW_PLUGINS"
"""Environment variable with module names, separated by commas, that a worker imports at its start."""


def load_plugins(allow: Iterable[str] = ()) -> None:
    """Import the built-in algorithms and processors, and the modules allowed by the caller and environment."""
    for package_name in ("srl.algorithms", "srl.rl.processors"):
        package = importlib.import_module(package_name)  # noqa: TID251
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package_name}.{module.name}")  # noqa: TID251
    named = [name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",")]
    for name in [*allow, *named]:
        if name:
            try:
                importlib.import_module(name)  # noqa: TID251
            except ImportError as error:
                raise ConfigError(f"the allowed module {name!r} cannot be imported here: {error}") from error
            ALLOWED_MODULES.add(name)


def find_algorithm(name: str) -> type[RLConfig]:
    """Return the config class of an algorithm; the error names what there is."""
    load_plugins()
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(sorted(ALGORITHMS))}"
        raise ConfigError(f"no algorithm is called {name!r}; {hint}")
    return ALGORITHMS[name]


def config_from_dict(data: dict[str, Any]) -> RLConfig:
    """Rebuild an algorithm's config from `RLConfig.to_dict`'s data."""
    fields = dict(data)
    return find_algorithm(fields.pop("algorithm", "")).from_dict(fields)


def needed_modules(env_config: EnvConfig, config: RLConfig) -> list[str]:
    """Return the modules outside SRL that another process must import for this env and this config.

    Raises `ConfigError` where one of them is the user's script, which no other process can import.
    """
    classes = [type(config), *(type(settings) for settings in config.nested() if isinstance(settings, Named))]
    own = {cls.__module__ for cls in classes if cls.__module__.partition(".")[0] != "srl"}
    modules = sorted({*env_config.modules(), *own})
    if "__main__" in modules:
        raise ConfigError(
            "the env, a processor or the algorithm is defined in the script itself, which worker processes cannot "
            "import; move it to a module of its own, such as my_env.py, and name the env 'my_env:MyEnv-v0'"
        )
    return modules
