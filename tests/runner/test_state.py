"""Everything that has a state: it comes back equal, and what is no such state is refused and changes nothing."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import envs  # noqa: F401  # registers them
import numpy as np
import pytest
import toy

from srl.algorithms import dqn
from srl.base.env import EnvConfig
from srl.base.errors import CheckpointError
from srl.base.segment import End, Segment
from srl.base.spaces import DiscreteActions, ObservationSpec, Spaces
from srl.rl.memories.config import MemoryConfig
from srl.rl.memories.replay import ReplayMemory
from srl.runner.actor import Actor, SegmentBuilder
from srl.runner.checkpoint import load_parameter, save_parameter
from srl.runner.episodes import Episodes
from srl.runner.lanes import make_lanes
from srl.runner.rate_limiter import RateLimiter
from srl.runner.trainer import Trainer

SPACES = Spaces(ObservationSpec((3,), "float32"), DiscreteActions(2))


@dataclass
class Stateful:
    """Something with a state.

    Attributes:
        make: makes one from a seed; in files under a directory where it has any.
        use: does what changes the state, different each turn; returns what can be seen of it, as plain data.
        as_json: whether its state is JSON data rather than a tree of arrays.
    """

    make: Callable[[int, Path], Any]
    use: Callable[[Any, int], Any]
    as_json: bool = False


def segments(turn: int, count: int = 3) -> list[Segment]:
    rng = np.random.default_rng(turn)
    return [
        Segment(
            rng.normal(size=(9, 3)).astype(np.float32),
            rng.integers(2, size=8).astype(np.int32),
            rng.normal(size=8).astype(np.float32),
            End(int(rng.integers(3))),
            0,
            lane,
            turn,
            0,
        )
        for lane in range(count)
    ]


def make_memory(kind: str, seed: int, directory: Path) -> ReplayMemory:
    config = MemoryConfig(capacity=60, warmup_size=8, kind=kind, rank_interval=3)
    return ReplayMemory(
        SPACES,
        config,
        batch_size=4,
        n_step=2,
        discount=0.9,
        updates_per_dispatch=2,
        segment_length=8,
        seed=seed,
        directory=directory,
    )


def use_memory(memory: ReplayMemory, turn: int) -> Any:
    memory.insert(segments(turn))
    sample = memory.sample(2, turn)
    memory.update_priorities(sample, np.random.default_rng(turn).normal(size=(2, 4)))
    return sample.slots.tolist(), {name: values.tolist() for name, values in sample.batches.items()}


class Marked:
    """A memory's mark, as the state of what is stored."""

    def __init__(self, memory: ReplayMemory) -> None:
        self.memory = memory

    def get_state(self) -> Any:
        return {"mark": self.memory.mark(), "draws": self.memory.get_state()}

    def check_valid(self, state: Any) -> None:
        if set(state) != {"mark", "draws"}:
            raise CheckpointError("no mark")
        self.memory.check_valid(state["draws"])

    def set_state(self, state: Any) -> None:
        self.check_valid(state)
        self.memory.go_back(state["mark"])
        self.memory.set_state(state["draws"])


def use_learner(learner: Any, turn: int) -> Any:
    memory = make_memory("uniform", turn, None)  # type: ignore[arg-type]
    memory.insert(segments(turn))
    info = learner.update(memory.sample(2, turn).batches)
    return info.metrics, np.asarray(info.priorities).tolist(), learner.train_count


def use_limiter(limiter: RateLimiter, turn: int) -> Any:
    limiter.inserted(5 + turn, 100)
    limiter.updated(1)
    return limiter.updates_due(100), limiter.may_insert()


def make_trainer(seed: int, directory: Path) -> Trainer:
    config = toy.Config(samples_per_insert=2.0)
    learner = config.make_learner(SPACES, 0)
    return Trainer(config, SPACES, learner, make_memory("proportional", seed, directory), distributed=False)


def use_trainer(trainer: Trainer, turn: int) -> Any:
    trainer.insert(segments(turn))
    return trainer.due(100), trainer.memory.sample(1, 0).slots.tolist()


ACTOR_CONFIG = toy.Config(window_length=2, n_step=2, segment_length=6)


def make_actor(seed: int, directory: Path) -> Actor:
    lanes = make_lanes(EnvConfig("test/Script-v0", {"longest": 15}), ACTOR_CONFIG, range(3))
    policy = ACTOR_CONFIG.make_policy(lanes.spaces)
    actor = Actor(lanes, policy, ACTOR_CONFIG, seed=seed, lane_numbers=range(3), total_lanes=3, distributed=False)
    actor.set_parameters(ACTOR_CONFIG.make_learner(lanes.spaces, 0).parameters, 0)
    return actor


def plain(made: list[Segment]) -> Any:
    return [
        (each.frames.tolist(), each.actions.tolist(), each.rewards.tolist(), each.end, each.lane, each.sequence)
        for each in made
    ]


def use_actor(actor: Actor, turn: int) -> Any:
    produced = [actor.step() for _ in range(7)]
    return [(plain(each.segments), each.episode_rewards, each.episode_lengths) for each in produced]


def use_episodes(episodes: Episodes, turn: int) -> Any:
    lanes = make_lanes(EnvConfig("test/Script-v0", {"longest": 15}), ACTOR_CONFIG, range(2))
    frames = episodes.begin_anew(lanes, np.array([True, turn % 2 == 0]))
    episodes.record(np.array([turn, 1], np.int32), lanes.step(np.array([0, 1], np.int32))) if turn % 2 == 0 else None
    return frames[0].tolist(), episodes.seeds()


def use_builder(builder: SegmentBuilder, turn: int) -> Any:
    rng = np.random.default_rng(turn)
    chosen = toy.Step(np.array([turn, 1], np.int32), extras={"noise": rng.normal(size=(2, 3))})
    if turn == 0:
        builder.begin(np.ones(2, np.bool_), np.zeros((2, 3), np.float32))
    made = builder.score({"q": np.array([turn, 2], np.float32)})
    both = np.ones(2, np.bool_)
    builder.append(chosen, both, rng.normal(size=2), rng.normal(size=(2, 3)), turn)
    return plain(made), [each.extras["noise"].tolist() for each in made]


def make_dqn(seed: int, directory: Path) -> Any:
    config = dqn.Config(batch_size=4, target_model_update_interval=3, updates_per_dispatch=2)
    config.hidden_block.layer_sizes = (4,)
    config.lr.set_linear(10, 1e-2, 1e-4)
    return config.make_learner(SPACES, seed)


EVERYTHING = {
    "dqn learner": Stateful(make_dqn, use_learner),
    "toy learner": Stateful(lambda seed, directory: toy.Learner(SPACES, seed), use_learner),
    "uniform memory": Stateful(lambda seed, directory: make_memory("uniform", seed, directory), use_memory, True),
    "proportional memory": Stateful(
        lambda seed, directory: make_memory("proportional", seed, directory), use_memory, True
    ),
    "rank memory": Stateful(lambda seed, directory: make_memory("rank", seed, directory), use_memory, True),
    "marked memory": Stateful(
        lambda seed, directory: Marked(make_memory("rank", seed, directory)),
        lambda marked, turn: use_memory(marked.memory, turn),
    ),
    "limiter": Stateful(lambda seed, directory: RateLimiter(10, 4, 2.0, 50), use_limiter, True),
    "free limiter": Stateful(lambda seed, directory: RateLimiter(10, 4, 2.0, None, 20), use_limiter, True),
    "trainer": Stateful(make_trainer, use_trainer, True),
    "actor": Stateful(make_actor, use_actor),
    "episodes": Stateful(lambda seed, directory: Episodes(seed, range(2), 0, SPACES), use_episodes),
    "segment builder": Stateful(
        lambda seed, directory: SegmentBuilder(
            SPACES, toy.Config(segment_length=5), np.arange(2), lambda *arguments: None
        ),
        use_builder,
    ),
}


def stored(state: Any, as_json: bool, path: Path) -> Any:
    """Return the state as a checkpoint gives it back."""
    if as_json:
        return json.loads(json.dumps(state))
    save_parameter(path / "state.safetensors", state, {})
    return load_parameter(path / "state.safetensors")[0]


def text(state: Any) -> str:
    return json.dumps(state, sort_keys=True, default=lambda array: [str(array.dtype), array.tolist()])


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_state_comes_back_equal(name: str, tmp_path: Path) -> None:
    kind = EVERYTHING[name]
    first = kind.make(1, tmp_path / "files")
    for turn in range(5):
        kind.use(first, turn)
    state = stored(first.get_state(), kind.as_json, tmp_path)
    if not name.endswith("memory") and name != "trainer":
        other = kind.make(2, tmp_path / "files")
        assert kind.make(2, tmp_path / "files").get_state().keys() == state.keys()
    else:
        (tmp_path / "files").rename(tmp_path / "same")
        other = kind.make(2, tmp_path / "same")
    other.check_valid(state)
    assert not other.set_state(state)
    assert text(other.get_state()) == text(state)
    if name.endswith("memory") or name == "trainer":
        # Two memories cannot write to the same files at once.
        shutil.copytree(tmp_path / "same", tmp_path / "copy")
        first = kind.make(3, tmp_path / "copy")
        first.set_state(state)
    for turn in range(5, 10):
        assert kind.use(other, turn) == kind.use(first, turn)
    assert text(other.get_state()) == text(first.get_state())


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_is_no_such_state_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    kind = EVERYTHING[name]
    other = kind.make(1, tmp_path / "files")
    for turn in range(3):
        kind.use(other, turn)
    good = stored(other.get_state(), kind.as_json, tmp_path)
    before = text(other.get_state())
    bad: list[Any] = [{}, {"foreign": 1}, *damaged(good)]
    assert len(bad) > 3
    for state in bad:
        with pytest.raises(CheckpointError):
            other.set_state(state)
        assert text(other.get_state()) == before
    other.check_valid(good)


def damaged(good: dict[str, Any]) -> list[Any]:
    """Return states of which one entry is missing, or one array has another shape or dtype."""
    found = []
    for name, value in good.items():
        lacking = copy.deepcopy(good)
        del lacking[name]
        found.append(lacking)
        if isinstance(value, dict) and name not in ("scores", "extras"):
            found += [{**good, name: inner} for inner in damaged(value)] if name != "rng" else [{**good, "rng": {}}]
        elif isinstance(value, np.ndarray) and value.ndim:
            found.append({**good, name: value[..., None]})
            found.append({**good, name: value.astype(np.complex64)})
    return found
