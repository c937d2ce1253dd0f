"""What an algorithm is told of an env's spaces, and the conversions between the two.

Observations keep their space's dtype in segments, on the wire and in the memory; networks encode them
(`srl.rl.networks.encode`). Actions of a continuous or composite space become one index for an algorithm
with discrete actions.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from srl.base.define import EnvObservationTypes
from srl.base.errors import SpaceError

MAX_DISCRETE_ACTIONS = 4096


@dataclass(frozen=True)
class ObservationSpec:
    """One frame as an array.

    Attributes:
        shape: shape of a frame, `()` for a `Discrete` space.
        dtype: name of the numpy dtype that frames are stored with.
        kind: `box` (numbers), `discrete` (`levels` values from `starts`, one-hot in the network) or
            `binary` (each entry 0 or 1).
        levels, starts: of each entry, for `discrete`.
        scale: what networks multiply `box` frames by.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: Literal["box", "discrete", "binary"] = "box"
    levels: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of a frame."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def type(self) -> EnvObservationTypes:
        """What the frames are; only uint8 arrays `[H, W]`, `[H, W, 1]` and `[H, W, 3]` are taken for images."""
        if self.kind != "box":
            return EnvObservationTypes.DISCRETE
        rank = len(self.shape)
        if rank not in (2, 3):
            return EnvObservationTypes.CONTINUOUS
        if self.dtype != "uint8":
            return EnvObservationTypes.SHAPE2 if rank == 2 else EnvObservationTypes.SHAPE3
        if rank == 2:
            return EnvObservationTypes.GRAY_2ch
        channels = {1: EnvObservationTypes.GRAY_3ch, 3: EnvObservationTypes.COLOR}
        return channels.get(self.shape[2], EnvObservationTypes.SHAPE3)

    @property
    def is_image(self) -> bool:
        """Whether frames are images, as `type` takes them."""
        return self.type in (EnvObservationTypes.GRAY_2ch, EnvObservationTypes.GRAY_3ch, EnvObservationTypes.COLOR)


@dataclass(frozen=True)
class DiscreteActions:
    """Actions `0 .. count - 1`, int32."""

    count: int


@dataclass(frozen=True)
class ContinuousActions:
    """Actions `[low, high]`, float32 of shape `(len(low),)`."""

    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Spaces:
    """What a policy and a learner see: frames, how many are stacked, and actions."""

    observation: ObservationSpec
    action: DiscreteActions | ContinuousActions
    window_length: int = 1

    @property
    def action_count(self) -> int:
        """Number of discrete actions; `SpaceError` where actions are continuous."""
        if not isinstance(self.action, DiscreteActions):
            raise SpaceError("this algorithm needs discrete actions")
        return self.action.count

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data that `from_dict` turns back into equal spaces."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Spaces":
        """Rebuild spaces from `to_dict`'s data."""
        kind = DiscreteActions if "count" in data["action"] else ContinuousActions
        return cls(
            ObservationSpec(**_with_tuples(data["observation"])),
            kind(**_with_tuples(data["action"])),
            data["window_length"],
        )


def _with_tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def is_image(space: gymnasium.Space[Any]) -> bool:
    """Return whether observations of a space are images, as `ObservationSpec.type` takes them."""
    return isinstance(space, spaces.Box) and ObservationSpec(space.shape, np.dtype(space.dtype).name).is_image


ObservationAdapter = Callable[[Any], np.ndarray]
ActionAdapter = Callable[[Any], Any]


def adapt_observation(space: gymnasium.Space[Any]) -> tuple[ObservationSpec, ObservationAdapter]:
    """Return the spec of a space's frames and the function that makes an observation one.

    `Box`, `Discrete`, `MultiDiscrete` and `MultiBinary` keep their dtype (float64 becomes float32, which
    networks compute with); `Tuple` and `Dict` are flattened to one vector. Raises `SpaceError` for others.
    """
    if isinstance(space, spaces.Box):
        dtype = np.dtype(np.float32) if space.dtype == np.float64 else np.dtype(space.dtype)
        return _array_spec(space.shape, dtype, "box")
    if isinstance(space, spaces.Discrete):
        return _array_spec((), space.dtype, "discrete", (int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        levels = tuple(int(n) for n in space.nvec.flat)
        starts = tuple(int(start) for start in space.start.flat)
        return _array_spec(space.shape, space.dtype, "discrete", levels, starts)
    if isinstance(space, spaces.MultiBinary):
        return _array_spec(space.shape, space.dtype, "binary")
    if isinstance(space, (spaces.Tuple, spaces.Dict)):
        for path, leaf in _leaves(space, "observation"):
            if not isinstance(leaf, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
                raise SpaceError(f"{path} is {leaf}, which cannot be flattened; wrap the env to leave it out")
        flat = spaces.flatten_space(space)
        dtype = np.dtype(np.float32) if flat.dtype == np.float64 else np.dtype(flat.dtype or np.float32)
        spec = ObservationSpec(tuple(flat.shape or ()), dtype.name)
        return spec, lambda value: np.asarray(spaces.flatten(space, value), dtype)
    raise SpaceError(
        f"observation space {space} is not supported; SRL takes Box, Discrete, MultiDiscrete, MultiBinary, "
        "and Tuple or Dict of these"
    )


def adapt_action(
    space: gymnasium.Space[Any], action_type: Literal["discrete", "continuous"], division_num: int
) -> tuple[DiscreteActions | ContinuousActions, ActionAdapter]:
    """Return the actions that an algorithm chooses from and the function that makes one an env action.

    For discrete algorithms every `Box` dimension gets `division_num` levels, bounds included, and
    composite spaces enumerate all combinations. Raises `SpaceError` where that cannot be done.
    """
    if action_type == "continuous":
        return _continuous(space)
    levels = [_levels(leaf, path, division_num) for path, leaf in _leaves(space, "action")]
    entries = [entry for leaf in levels for entry in leaf]
    count = math.prod(len(entry) for entry in entries)
    if count > MAX_DISCRETE_ACTIONS:
        raise SpaceError(
            f"action space {space} has {count} combinations as discrete actions, at most "
            f"{MAX_DISCRETE_ACTIONS} are supported; lower action_division_num (now {division_num}) "
            "or use an algorithm with continuous actions"
        )
    shape = tuple(len(entry) for entry in entries)
    widths = [len(leaf) for leaf in levels]

    def to_env(index: Any) -> Any:
        digits = np.unravel_index(int(index), shape)
        values = [entry[digit] for entry, digit in zip(entries, digits, strict=True)]
        return _assemble(space, iter(_split(values, widths)))

    return DiscreteActions(count), to_env


def _array_spec(
    shape: tuple[int, ...],
    dtype: Any,
    kind: Literal["box", "discrete", "binary"],
    levels: tuple[int, ...] = (),
    starts: tuple[int, ...] = (),
) -> tuple[ObservationSpec, ObservationAdapter]:
    resolved = np.dtype(dtype)
    scale = 1 / 255 if kind == "box" and resolved == np.uint8 else 1.0
    spec = ObservationSpec(tuple(shape), resolved.name, kind, levels, starts, scale)
    return spec, lambda value: np.asarray(value, resolved)


def _leaves(space: gymnasium.Space[Any], path: str) -> list[tuple[str, gymnasium.Space[Any]]]:
    if isinstance(space, spaces.Tuple):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(space.spaces)]
    elif isinstance(space, spaces.Dict):
        items = [(f"{path}[{key!r}]", item) for key, item in space.spaces.items()]
    else:
        return [(path, space)]
    return [leaf for item_path, item in items for leaf in _leaves(item, item_path)]


def _levels(space: gymnasium.Space[Any], path: str, division_num: int) -> list[np.ndarray]:
    """Return the values that each entry of a leaf space may take."""
    if isinstance(space, spaces.Discrete):
        return [np.arange(space.start, space.start + space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [np.arange(start, start + n) for n, start in zip(space.nvec.flat, space.start.flat, strict=True)]
    if isinstance(space, spaces.MultiBinary):
        return [np.arange(2)] * math.prod(space.shape)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.number):
        if not space.is_bounded():
            raise SpaceError(f"{path} space {space} has no finite bounds, so it cannot be divided into levels")
        bounds = zip(space.low.flat, space.high.flat, strict=True)
        levels = [np.linspace(low, high, division_num) for low, high in bounds]
        if np.issubdtype(space.dtype, np.integer):
            levels = [np.unique(np.rint(values)) for values in levels]  # few integers need fewer levels
        return [values.astype(space.dtype) for values in levels]
    raise SpaceError(f"{path} space {space} cannot be made discrete actions")


def _split(values: list[Any], widths: list[int]) -> list[list[Any]]:
    ends = np.cumsum(widths)
    return [values[end - width : end] for width, end in zip(widths, ends, strict=True)]


def _assemble(space: gymnasium.Space[Any], leaves: Any) -> Any:
    """Put leaf values, in the order of `_leaves`, back into a space's structure."""
    if isinstance(space, spaces.Tuple):
        return tuple(_assemble(item, leaves) for item in space.spaces)
    if isinstance(space, spaces.Dict):
        return {key: _assemble(item, leaves) for key, item in space.spaces.items()}
    values = next(leaves)
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(values[0])
    return np.array(values, space.dtype).reshape(space.shape)


def _continuous(space: gymnasium.Space[Any]) -> tuple[ContinuousActions, ActionAdapter]:
    if not isinstance(space, spaces.Box) or not space.is_bounded() or not np.issubdtype(space.dtype, np.floating):
        raise SpaceError(f"action space {space} is not a bounded Box of floats, which this algorithm needs")
    low, high = (tuple(float(value) for value in bound.flat) for bound in (space.low, space.high))

    def to_env(action: Any) -> np.ndarray:
        # A bound of a float64 space may be rounded outwards in the algorithm's float32.
        clipped: np.ndarray = np.clip(np.asarray(action, space.dtype).reshape(space.shape), space.low, space.high)
        return clipped

    return ContinuousActions(low, high), to_env
