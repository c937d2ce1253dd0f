"""Envs: what the user names, made and adapted for an agent.

`EnvConfig` says which Gymnasium env; `make_env` makes it raw (for rendering and look-ups) and
`make_agent_env` with everything an agent needs around it: raw episode statistics, processors, and frames
and actions as arrays.
"""

import dataclasses
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from srl.base.algorithm import RLConfig
from srl.base.errors import ConfigError, EnvError, MissingExtraError
from srl.base.processor import Processor
from srl.base.settings import Settings, setting
from srl.base.spaces import DiscreteActions, Spaces, adapt_action, adapt_observation

EPISODE_STATS = "srl_episode"
"""Key of Gymnasium's info under which the raw statistics of a finished episode stand."""

ALLOWED_MODULES: set[str] = set()
"""Modules that configs from elsewhere (a task, a checkpoint) may name; `srl.runner.plugins` fills it."""


@dataclass
class EnvConfig(Settings):
    """Which env to make.

    `EnvConfig("Pendulum-v1", kwargs={"g": 9.8})`. Any id that Gymnasium knows works, also
    `"my_package:MyEnv-v0"`, which imports `my_package` first.
    """

    name: str = setting(doc="Gymnasium id, or 'module:id' to import the module that registers it first")
    kwargs: dict[str, Any] = setting(factory=dict, doc="keyword arguments for gymnasium.make; JSON values")
    max_episode_steps: int | None = setting(
        None, low=1, doc="time limit in env steps, in place of the env's own; the episode is truncated there"
    )
    frameskip: int = setting(
        1, low=1, doc="env steps an action is repeated for, rewards summed; high values act more coarsely"
    )
    render_observation: bool = setting(
        False,
        doc="whether to observe the picture that the env renders (render_mode 'rgb_array') instead of what it returns",
    )
    env_timeout_s: float = setting(
        60.0,
        above=0,
        doc="seconds a step or reset may take in an actor or, with env_processes, anywhere; then the env hangs and is "
        "replaced. Low values replace slow envs, high ones make the other lanes wait",
    )
    env_processes: bool = setting(
        False,
        doc="whether each lane has a process of its own: a hang or a native crash then costs that lane alone, and slow "
        "envs use several cores; quick envs become slower",
    )
    gym_make_func: Callable[..., Any] | None = setting(
        None, doc="called instead of gymnasium.make, with the same arguments; workers import it by its name"
    )
    gym_wrappers: list[Callable[..., Any]] = setting(
        factory=list, doc="called with the env in order, each returns a wrapped env; workers import them by name"
    )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data; functions become `module:name`."""
        without_functions = dataclasses.replace(self, gym_make_func=None, gym_wrappers=[])
        data = super(EnvConfig, without_functions).to_dict()
        data["gym_make_func"] = None if self.gym_make_func is None else _reference(self.gym_make_func)
        data["gym_wrappers"] = [_reference(wrapper) for wrapper in self.gym_wrappers]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "EnvConfig":
        """Rebuild a config from `to_dict`'s data.

        What it may import is said by the process (`ALLOWED_MODULES`), never by the data; `ConfigError`
        names a module that is not allowed.
        """
        fields = dict(data)
        module, _, _ = str(fields.get("name", "")).rpartition(":")
        if module:
            _check_allowed(module)
        if fields.get("gym_make_func") is not None:
            fields["gym_make_func"] = _resolve(fields["gym_make_func"])
        fields["gym_wrappers"] = [_resolve(reference) for reference in fields.get("gym_wrappers", [])]
        return super().from_dict(fields)

    def modules(self) -> list[str]:
        """Return the modules that a worker must be allowed to import for this env."""
        functions = [*self.gym_wrappers, *([self.gym_make_func] if self.gym_make_func else [])]
        names = [_reference(function).partition(":")[0] for function in functions]
        if ":" in self.name:
            names.append(self.name.partition(":")[0])
        else:
            names.append(_registering_module(self.name))
        return sorted({name for name in names if name and name.partition(".")[0] not in ("gymnasium", "ale_py")})


def make_env(config: EnvConfig, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """Make the env as the user described it.

    Raises:
        EnvError: the id does not exist or the constructor raised; the message says which.
        MissingExtraError: the env needs a package that is not installed.
    """
    module, _, env_id = config.name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)  # noqa: TID251
        except ImportError as error:
            raise EnvError(f"env {config.name!r} needs the module {module!r}: {error}") from error
    make = config.gym_make_func or gymnasium.make
    is_unknown = config.gym_make_func is None and env_id not in gymnasium.registry
    # What is unknown may be one of ALE's older ids, or near one.
    if env_id.startswith("ALE/") or (is_unknown and importlib.util.find_spec("ale_py")):
        _register_ale(env_id)
    if is_unknown:
        _check_registered(env_id)
    arguments: dict[str, Any] = {**config.kwargs}
    if config.max_episode_steps is not None:
        arguments["max_episode_steps"] = config.max_episode_steps
    if config.render_observation:
        if render_mode not in (None, "rgb_array"):
            raise EnvError(f"env {config.name!r} is observed by its pictures, so it cannot render {render_mode!r}")
        render_mode = "rgb_array"
    if render_mode is not None:
        arguments["render_mode"] = render_mode
    try:
        env = make(env_id, **arguments)
        if config.frameskip > 1:
            env = _FrameSkip(env, config.frameskip)
        if config.render_observation:  # above the frameskip: only what is observed is drawn
            env = gymnasium.wrappers.AddRenderObservation(env)
        for wrapper in config.gym_wrappers:
            env = wrapper(env)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"env {config.name!r} needs a package that is not installed: {error}") from error
    except Exception as error:
        raise EnvError(f"env {config.name!r} could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(env, gymnasium.Env):
        raise EnvError(f"env {config.name!r} is {type(env).__name__}, not a gymnasium.Env")
    return env


def make_agent_env(
    env_config: EnvConfig,
    rl_config: RLConfig,
    *,
    lane: int = 0,
    training: bool = True,
    render_mode: str | None = None,
) -> "AgentEnv":
    """Make the env as an agent steps it: statistics below, processors above, arrays outside.

    Args:
        training: whether to learn from it; processors may treat evaluations otherwise.
    """
    raw = make_env(env_config, render_mode)
    env: gymnasium.Env[Any, Any] = gymnasium.wrappers.RecordEpisodeStatistics(
        raw, buffer_length=1, stats_key=EPISODE_STATS
    )
    processors: list[Processor] = []

    def wrap(env: gymnasium.Env[Any, Any], added: Sequence[Processor]) -> gymnasium.Env[Any, Any]:
        for processor in added:
            used = processor if training else processor.for_evaluation()
            processors.append(used)
            env = used.wrap(env)
        return env

    env = wrap(env, rl_config.processors)
    if rl_config.use_rl_processor:
        # What the algorithm adds depends on what the user's processors have made of the observations.
        env = wrap(env, rl_config.default_processors(env.observation_space))
    return AgentEnv(env, rl_config, processors, label=f"{env_config.name} lane {lane}")


class AgentEnv(gymnasium.Wrapper[np.ndarray, Any, Any, Any]):
    """An env whose observations and actions are arrays; anything not finite is an `EnvError`.

    Attributes:
        spaces: what the algorithm is told.
        processors: those that were put around the env, in order.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], rl_config: RLConfig, processors: Sequence[Processor], label: str
    ) -> None:
        super().__init__(env)
        self.processors = list(processors)
        observation, self._to_frame = adapt_observation(env.observation_space)
        for scale in (processor.frame_scale for processor in processors):
            if scale is not None:
                observation = dataclasses.replace(observation, scale=scale)
        action, self._to_env_action = adapt_action(
            env.action_space, rl_config.action_type, rl_config.action_division_num
        )
        self.spaces = Spaces(observation, action, rl_config.window_length)
        self._label = label
        self._may_be_infinite = np.issubdtype(np.dtype(observation.dtype), np.floating)
        self._episode, self._step = -1, 0
        # Bounds are not kept: what vector envs need of these spaces is shape and dtype alone.
        dtype = np.dtype(observation.dtype)
        low, high = (-np.inf, np.inf) if self._may_be_infinite else _limits(dtype)
        self.observation_space = gymnasium.spaces.Box(low, high, observation.shape, dtype.type)
        if isinstance(action, DiscreteActions):
            self.action_space = gymnasium.spaces.Discrete(action.count)
        else:
            low_array, high_array = np.array(action.low, np.float32), np.array(action.high, np.float32)
            self.action_space = gymnasium.spaces.Box(low_array, high_array)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; returns the frame and Gymnasium's info."""
        observation, info = self.env.reset(**kwargs)
        self._episode, self._step = self._episode + 1, 0
        return self._frame(observation), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Step with the algorithm's action; returns frame, reward, terminated, truncated, info."""
        observation, reward, terminated, truncated, info = self.env.step(self._to_env_action(action))
        self._step += 1
        value = float(reward)
        if not np.isfinite(value):
            raise EnvError(self._not_finite(f"reward {value}"))
        return self._frame(observation), value, bool(terminated), bool(truncated), info

    def _frame(self, observation: Any) -> np.ndarray:
        frame = self._to_frame(observation)
        if frame.shape != self.spaces.observation.shape:
            raise EnvError(
                f"{self._label} returned an observation of shape {frame.shape} at step {self._step} of its episode "
                f"{self._episode}; its observation space has {self.spaces.observation.shape}"
            )
        if self._may_be_infinite and not np.isfinite(frame).all():
            raise EnvError(self._not_finite(f"observation {np.array2string(frame, threshold=8)}"))
        return frame

    def _not_finite(self, what: str) -> str:
        return (
            f"{self._label} returned a {what} at step {self._step} of its episode {self._episode}; "
            "nothing can be learned from it, mend the env or wrap it"
        )


class _FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], steps: int) -> None:
        super().__init__(env)
        self._steps = steps

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._steps):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype == np.bool_:
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _check_registered(env_id: str) -> None:
    """Raise with the nearest ids, as Gymnasium's own error for a wrong version stays useful."""
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(env_id, list(gymnasium.registry), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "; own envs: register them, or name 'module:id'"
        raise EnvError(f"no env is registered as {env_id!r}{hint}") from error


def _register_ale(env_id: str) -> None:
    try:
        import ale_py
    except ImportError as error:
        raise MissingExtraError(f"env {env_id!r} needs Atari: pip install 'srl[atari]'") from error
    # Its envs say no more than errors anyway, but only after the first of them has printed a banner.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)


def _registering_module(env_id: str) -> str:
    spec = gymnasium.registry.get(env_id)
    if spec is None or spec.entry_point is None:
        return ""
    if isinstance(spec.entry_point, str):
        return spec.entry_point.partition(":")[0]
    return spec.entry_point.__module__


def _reference(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "")
    if not name or "<" in name:
        raise ConfigError(f"{function!r} has no name that a worker could import; define it at the top of a module")
    return f"{module}:{name}"


def _resolve(reference: str) -> Callable[..., Any]:
    """Find a function by `module:name`, in allowed modules only: a message must not choose what is called."""
    module_name, _, name = reference.partition(":")
    _check_allowed(module_name)
    found: Any = importlib.import_module(module_name)  # noqa: TID251
    for part in name.split("."):
        found = getattr(found, part, None)
    # Just what `_reference` would say: a module that an allowed one imports is not allowed for that.
    if not callable(found) or _reference(found) != reference:
        raise ConfigError(f"the task needs {reference!r}, but {module_name!r} has no such function")
    function: Callable[..., Any] = found
    return function


def _check_allowed(module_name: str) -> None:
    # Gymnasium's other modules could import what a message names.
    if module_name not in ALLOWED_MODULES and not module_name.startswith("gymnasium.wrappers"):
        raise ConfigError(
            f"the task needs the module {module_name!r}, which is not allowed in this process; start workers with "
            f"--allow {module_name}, or name it in `allow`"
        )


def env_config(env: "str | EnvConfig") -> EnvConfig:
    """Return the config of an env that was named by its id or is one already."""
    if isinstance(env, str):
        return EnvConfig(env)
    if isinstance(env, EnvConfig):
        return dataclasses.replace(env)
    raise ConfigError(f"an env is an id like 'Pendulum-v1' or a srl.EnvConfig, not {env!r}")


def as_seeds(seed: int, lanes: Sequence[int], stream: int, episode: int = 0) -> list[int]:
    """Return one env seed a lane, independent between lanes, episodes, streams (training, evaluation) and runs."""
    entropies = ([seed, stream, lane, episode] for lane in lanes)
    return [int(np.random.SeedSequence(entropy).generate_state(1, np.uint32)[0] >> 1) for entropy in entropies]
