"""The trainer beside its learner and memory; runs of it are tested with the runs."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import toy

from srl.algorithms import dqn
from srl.base.algorithm import UpdateInfo
from srl.base.segment import End, Segment
from srl.base.spaces import DiscreteActions, ObservationSpec, Spaces
from srl.runner.trainer import Trainer

SPACES = Spaces(ObservationSpec((2,), "float32"), DiscreteActions(2), window_length=1)


def segments(count: int) -> list[Segment]:
    rng = np.random.default_rng(0)
    return [
        Segment(
            frames=rng.normal(size=(9, 2)).astype(np.float32),
            actions=np.zeros(8, np.int32),
            rewards=np.ones(8, np.float32),
            end=End.TRUNCATED,
            context=0,
            lane=0,
            sequence=sequence,
            version=1,
        )
        for sequence in range(count)
    ]


class OnDevice(toy.Learner):
    """Counts what is brought to it, and lets the next batches be brought before an update ends."""

    def __init__(self) -> None:
        super().__init__(SPACES, 0)
        self.placed: list[Mapping[str, Any]] = []
        self.used: list[Mapping[str, Any]] = []
        self.is_ahead = threading.Event()

    def place(self, batches: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        self.placed.append(batches)
        if len(self.placed) > len(self.used) + 1:
            self.is_ahead.set()
        return batches

    def update(self, batches: Mapping[str, np.ndarray]) -> UpdateInfo:
        assert self.is_ahead.wait(10), "nothing was fetched while the device computes"
        self.is_ahead.clear()
        self.used.append(batches)
        return super().update(batches)


def test_the_next_batches_are_fetched_while_an_accelerator_computes() -> None:
    config = toy.Config()
    learner = OnDevice()
    trainer = Trainer(config, SPACES, learner, config.make_memory(SPACES, 0, None), distributed=True, prefetch=True)
    trainer.insert(segments(20))
    for _ in range(5):
        trainer.learn(trainer.dispatch)
    assert trainer.train_count == 5 * trainer.dispatch
    assert len(learner.placed) == 6 and all(
        one is other for one, other in zip(learner.used, learner.placed, strict=False)
    )


@pytest.mark.parametrize("kind", ["uniform", "proportional"])
def test_fetching_ahead_learns_from_the_same_memory(kind: str) -> None:
    config = dqn.Config(updates_per_dispatch=4, batch_size=8)
    config.hidden_block.set_mlp((8,))
    config.memory.kind, config.memory.warmup_size = kind, 50
    learner = config.make_learner(SPACES, 0)
    assert not learner.has_accelerator, "tests run on CPUs"
    trainer = Trainer(config, SPACES, learner, config.make_memory(SPACES, 0, None), distributed=True, prefetch=True)
    trainer.insert(segments(20))
    for updates in (4, 4, 3, 4):  # an odd rest is sampled at once
        trainer.learn(updates)
    assert trainer.train_count == 15
    assert np.isfinite(trainer.take_metrics()["loss"])
