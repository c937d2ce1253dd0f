"""The contract of an algorithm: a `Config` that makes a `Policy`, a `Learner` and a `Memory`.

Everything crosses these interfaces as numpy arrays and dict trees of them, so an algorithm may compute
with any framework. A `Config` subclass registers itself by its name; nothing else is edited.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import gymnasium
import numpy as np

from srl.base.errors import ConfigError
from srl.base.processor import Processor
from srl.base.segment import End, Segment
from srl.base.settings import Settings, setting
from srl.base.spaces import Spaces

Tree: TypeAlias = Mapping[str, Any]
"""A dict of arrays and such dicts; what goes over the wire and into checkpoints."""

SEGMENT_LENGTH, LARGE_FRAME_SEGMENT_LENGTH = 16, 64
LARGE_FRAME_BYTES = 1024
"""From this size on, frames that segments repeat cost more than parameters and data that are less fresh."""

ALGORITHMS: dict[str, type["RLConfig"]] = {}


@dataclass(kw_only=True)
class RLConfig(Settings):
    """Settings that all algorithms share. An algorithm subclasses it with `algorithm="its name"`."""

    algorithm: ClassVar[str] = ""
    version: ClassVar[int] = 1
    """Goes up with every change that makes settings, parameters or segments of an older one mean something else."""
    action_type: ClassVar[Literal["discrete", "continuous"]] = "discrete"

    window_length: int = setting(
        1, low=1, high=64, doc="frames stacked for the network; more show motion, and cost computing"
    )
    processors: list[Processor] = setting(factory=list, doc="applied to the env in order; see srl.rl.processors")
    use_rl_processor: bool = setting(True, doc="whether the algorithm's default processors are applied too")
    action_division_num: int = setting(
        5, low=2, doc="levels a continuous action dimension gets where discrete ones are needed; low is coarse"
    )
    samples_per_insert: float | None = setting(
        None,
        above=0,
        doc="times a transition is replayed on average, held from both sides. None: one update per env step, "
        "exactly, in one process; at most one per two env steps where actors run apart",
    )
    segment_length: int | None = setting(
        None,
        low=2,
        high=4096,
        doc="steps after which an actor sends an unfinished episode's segment; low is fresher, high repeats less. "
        f"None: {SEGMENT_LENGTH}, for frames of {LARGE_FRAME_BYTES} bytes and more {LARGE_FRAME_SEGMENT_LENGTH}",
    )

    def __init_subclass__(cls, algorithm: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if algorithm:
            cls.algorithm = algorithm
            ALGORITHMS[algorithm] = cls

    def default_processors(self, observation_space: gymnasium.Space[Any]) -> list[Processor]:
        """Return the processors this algorithm adds for such observations when nothing else is said."""
        return []

    def check_spaces(self, spaces: Spaces) -> None:
        """Raise `SpaceError` where this algorithm cannot learn with such observations or actions."""
        return

    def preflight(self, spaces: Spaces, directory: Path | None) -> str:
        """Return a line that says what a run needs of this machine.

        Args:
            directory: where the memory's files will be, `None` for plain memory.

        Raises:
            ConfigError: this machine does not have it.
        """
        return f"{self.algorithm} does not say what it needs"

    def make_policy(self, spaces: Spaces) -> "Policy":
        """Return what an actor or an evaluator runs."""
        raise ConfigError(f"{type(self).__name__} does not define make_policy")

    def make_learner(self, spaces: Spaces, seed: int) -> "Learner":
        """Return what a trainer runs; its first parameters follow from `seed`."""
        raise ConfigError(f"{type(self).__name__} does not define make_learner")

    def make_memory(self, spaces: Spaces, seed: int, directory: Path | None) -> "Memory":
        """Return the memory, in files under `directory` or in plain memory where that is `None`."""
        raise ConfigError(f"{type(self).__name__} does not define make_memory")

    @property
    def n_step_frames(self) -> int:
        """How many frames after its first one a transition reaches (the `n` of n-step returns)."""
        return 1

    def steps_per_segment(self, spaces: Spaces) -> int:
        """Return the segment length, never so short that the overlap of cut segments would outweigh it."""
        length = self.segment_length
        if length is None:
            is_large = spaces.observation.nbytes >= LARGE_FRAME_BYTES
            length = LARGE_FRAME_SEGMENT_LENGTH if is_large else SEGMENT_LENGTH
        return max(length, 2 * (self.window_length + self.n_step_frames))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and, as `algorithm` and `version`, what they are of."""
        return {"algorithm": self.algorithm, "version": self.version, **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild settings from `to_dict`'s data, without its `algorithm`.

        Raises `ConfigError` where this process has another version of the algorithm, or does not know a setting.
        """
        fields = dict(data)
        version = fields.pop("version", cls.version)
        if version != cls.version:
            raise ConfigError(
                f"these settings are of {cls.algorithm} version {version}, this process has version {cls.version}; run "
                "the same version of SRL, or of the module that defines it, everywhere"
            )
        return super().from_dict(fields)


@dataclass(frozen=True)
class Exploration:
    """Who explores and when; a policy finds each lane's behaviour from it.

    Attributes:
        train_count: the run's clock.
        lanes: `[B]` number of each lane in the whole run.
        total_lanes: how many lanes the whole run has.
        distributed: whether lanes belong to actors apart from the trainer.
    """

    train_count: int
    lanes: np.ndarray
    total_lanes: int
    distributed: bool


@dataclass(frozen=True)
class Step:
    """What a policy answers for `B` lanes.

    Attributes:
        action: `[B, ...]`.
        state: recurrent state after the step, `None` for policies without one.
        extras: `[B, ...]` arrays that go into segments, as the algorithm's memory needs them.
        scores: `[B]` arrays that stay in the actor until `Policy.priorities` has used them.
    """

    action: np.ndarray
    state: Tree | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)


class Policy(Protocol):
    """What an actor or evaluator needs of an algorithm; no optimiser and no memory."""

    def load(self, parameters: Tree) -> Any:
        """Return a published tree in the form that `act` wants (on its device)."""
        ...

    def initial_state(self, lanes: int) -> Tree | None:
        """Return the recurrent state at an episode's start."""
        ...

    def act(
        self,
        parameters: Any,
        observation: np.ndarray,
        state: Tree | None,
        rng: np.random.Generator,
        explore: Exploration | None,
    ) -> Step:
        """Choose actions for observations `[B, window_length, *frame]`; greedily where `explore` is `None`."""
        ...

    def priorities(
        self, rewards: np.ndarray, end: End, transitions: range, scores: Mapping[str, np.ndarray]
    ) -> np.ndarray | None:
        """Return initial priorities `[T]` of a segment's transitions, NaN where one cannot be known.

        Args:
            rewards: `[F - 1]`. transitions: the steps that start one.
            scores: `[F]` arrays that `act` gave for each frame, NaN for a last frame that was not acted on.
        """
        ...


@dataclass(frozen=True)
class UpdateInfo:
    """What a learner reports: new priorities `[K, B]` (or `None`) and named metrics."""

    priorities: np.ndarray | None
    metrics: Mapping[str, float]


class Learner(Protocol):
    """What a trainer needs of an algorithm."""

    def update(self, batches: Mapping[str, Any]) -> UpdateInfo:
        """Do `K` updates, one after the other, on batches `[K, B, ...]`, arrays or what `place` made of them."""
        ...

    @property
    def has_accelerator(self) -> bool:
        """Whether updates are computed elsewhere than on the CPU, so that batches should be there ahead of them."""
        ...

    def place(self, batches: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Bring batches to the accelerator, for a later `update`."""
        ...

    def prepare(self, batches: Mapping[str, np.ndarray]) -> None:
        """Compile for batches of these shapes and dtypes; changes nothing."""
        ...

    @property
    def parameters(self) -> Tree:
        """The tree that is published to policies; it does not change when updates go on."""
        ...

    @property
    def train_count(self) -> int:
        """Updates done since the parameters were first made."""
        ...

    def set_parameters(self, parameters: Tree) -> None:
        """Start anew from a published tree: counters stay, the optimiser is fresh."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Return everything that updates depend on, as a tree of arrays."""
        ...

    def set_state(self, state: Tree) -> None:
        """Go on from `get_state`'s tree."""
        ...

    def check_valid(self, state: Tree) -> None:
        """Raise `CheckpointError` where a state does not fit this learner."""
        ...


@dataclass(frozen=True)
class Sample:
    """Batches `[K, B, ...]` by name, and what `Memory.update_priorities` needs to find them again."""

    batches: Mapping[str, np.ndarray]
    slots: np.ndarray
    generations: np.ndarray


@dataclass(frozen=True)
class MemoryPosition:
    """How far a memory was filled; two positions compare only where they are of one memory.

    Attributes:
        identity: random, drawn when the memory (or its files) was made. Whole and below 2^53, so that any JSON
            reader keeps it.
        segments: how many segments were ever stored, without those that held no transition.
    """

    identity: int
    segments: int


class Memory(Protocol):
    """What a trainer needs of a memory."""

    def insert(self, segments: Sequence[Segment]) -> int:
        """Store segments and return how many transitions they added."""
        ...

    def check(self, segments: Sequence[Segment]) -> None:
        """Raise `SpaceError` where a segment is none that `insert` would take."""
        ...

    def sample(self, updates: int, train_count: int) -> Sample:
        """Draw batches for `updates` updates; `train_count` is the clock of the memory's schedules."""
        ...

    def example(self) -> Mapping[str, np.ndarray]:
        """Return zero batches of the shapes and dtypes that a full dispatch samples."""
        ...

    def update_priorities(self, sample: Sample, priorities: np.ndarray) -> None:
        """Set the priorities `[K, B]` of sampled transitions that are still there."""
        ...

    def __len__(self) -> int:
        """Return how many transitions can be sampled."""
        ...

    @property
    def position(self) -> MemoryPosition:
        """Which memory this is, and how many segments it has stored."""
        ...

    @property
    def capacity(self) -> int:
        """Transitions it can hold."""
        ...

    @property
    def batch_size(self) -> int:
        """Transitions an update uses."""
        ...

    @property
    def warmup_size(self) -> int:
        """Transitions that must be there before the first update."""
        ...

    @property
    def updates_per_dispatch(self) -> int:
        """Updates that are sampled for and done at once."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Return what sampling depends on beyond the stored transitions (its random generator)."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `get_state`'s data; raises `CheckpointError`, and changes nothing, where it is no such data."""
        ...

    def check_valid(self, state: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` where `set_state` would."""
        ...

    def mark(self) -> Tree | None:
        """Return arrays that say what is stored now; `None` where that ends with the process."""
        ...

    def room(self, mark: Tree) -> int:
        """Return how many more frames can be stored before it is too late to go back to `mark`."""
        ...

    def go_back(self, mark: Tree) -> None:
        """Hold again just what was stored at `mark`, which its files may have gone beyond since.

        Raises `CheckpointError`, and changes nothing, where these are not the files or it is too late.
        """
        ...
