import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import ACTION_SPACES, OBSERVATION_SPACES
from gymnasium import spaces

from srl.base.errors import SpaceError
from srl.base.spaces import (
    ContinuousActions,
    DiscreteActions,
    ObservationSpec,
    Spaces,
    adapt_action,
    adapt_observation,
)

SPECS = {
    "discrete": ObservationSpec((), "int64", "discrete", (4,), (0,)),
    "discrete from 1": ObservationSpec((), "int64", "discrete", (4,), (1,)),
    "multi discrete": ObservationSpec((2,), "int64", "discrete", (3, 2), (0, 0)),
    "multi binary": ObservationSpec((3,), "int8", "binary"),
    "float32": ObservationSpec((2, 3), "float32"),
    "float64": ObservationSpec((2,), "float32"),
    "uint8": ObservationSpec((4, 4), "uint8", scale=1 / 255),
    "int8": ObservationSpec((2,), "int8"),
    "int64": ObservationSpec((2,), "int64"),
    "bool": ObservationSpec((2,), "bool"),
    "scalar": ObservationSpec((), "float32"),
    "tuple": ObservationSpec((5,), "float32"),
    "nested dict": ObservationSpec((4,), "int64"),
    "int tuple": ObservationSpec((5,), "int64"),
}


@pytest.mark.parametrize("name", OBSERVATION_SPACES)
def test_observations_become_frames_of_their_spec(name: str) -> None:
    space = OBSERVATION_SPACES[name]
    spec, to_frame = adapt_observation(space)
    assert spec == SPECS[name]
    space.seed(0)
    for _ in range(20):
        value = space.sample()
        frame = to_frame(value)
        assert (frame.shape, frame.dtype.name) == (spec.shape, spec.dtype)
        flat = spaces.flatten(space, value) if isinstance(space, (spaces.Tuple, spaces.Dict)) else value
        np.testing.assert_array_equal(frame, np.asarray(flat).astype(spec.dtype))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Graph(spaces.Box(-1, 1, (2,)), None),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.Dict({"fine": spaces.Discrete(2), "list": spaces.Tuple((spaces.Sequence(spaces.Discrete(3)),))}),
        spaces.Tuple((spaces.Text(5),)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_other_observations_are_refused_by_name(space: gymnasium.Space[Any]) -> None:
    with pytest.raises(SpaceError) as caught:
        adapt_observation(space)
    leaf = "Sequence(Discrete(3)" if "Sequence" in str(space) else str(space).removeprefix("Tuple(").rstrip(")")
    assert leaf in str(caught.value)


def test_a_refused_part_of_a_nested_space_is_named_with_its_path() -> None:
    space = spaces.Dict({"fine": spaces.Discrete(2), "list": spaces.Tuple((spaces.Text(5),))})
    with pytest.raises(SpaceError, match=r"observation\['list'\]\[0\] is Text"):
        adapt_observation(space)
    with pytest.raises(SpaceError, match=r"action\['list'\]\[0\] space Text"):
        adapt_action(space, "discrete", 5)


COUNTS = {
    "discrete": 4,
    "discrete from 1": 4,
    "multi discrete": 6,
    "multi binary": 16,
    "float32": 25,
    "float64": 25,
    "int64": 9,
    "tuple": 10,
    "nested dict": 8,
}


def plain(value: Any) -> str:
    """Return text that is the same for equal actions."""
    if isinstance(value, dict):
        return str({key: plain(item) for key, item in value.items()})
    if isinstance(value, tuple):
        return str([plain(item) for item in value])
    return str(np.asarray(value).tolist())


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_discrete_actions_are_all_different_and_within_the_space(name: str) -> None:
    space = ACTION_SPACES[name]
    actions, to_env = adapt_action(space, "discrete", 5)
    assert actions == DiscreteActions(COUNTS[name])
    chosen = [to_env(np.int32(index)) for index in range(actions.count)]
    assert all(space.contains(action) for action in chosen)
    assert len({plain(action) for action in chosen}) == actions.count


def test_levels_are_evenly_spaced_and_reach_both_bounds() -> None:
    _, to_env = adapt_action(spaces.Box(-2, 2, (1,), np.float32), "discrete", 3)
    np.testing.assert_array_equal([to_env(index) for index in range(3)], [[-2], [0], [2]])
    _, to_env = adapt_action(spaces.Box(0, 10, (1,), np.int64), "discrete", 3)
    np.testing.assert_array_equal([to_env(index) for index in range(3)], [[0], [5], [10]])
    _, to_env = adapt_action(spaces.Box(-1, 1, (2,), np.float32), "discrete", 2)
    np.testing.assert_array_equal([to_env(index) for index in range(4)], [[-1, -1], [-1, 1], [1, -1], [1, 1]])


def test_the_first_action_of_a_shifted_space_is_its_start() -> None:
    _, to_env = adapt_action(spaces.Discrete(3, start=5), "discrete", 5)
    assert [int(to_env(index)) for index in range(3)] == [5, 6, 7]


def test_an_unbounded_box_cannot_be_divided() -> None:
    space = spaces.Box(np.array([0.0, -np.inf]), np.array([1.0, np.inf]), dtype=np.float32)
    with pytest.raises(SpaceError, match=r"action space Box\(.*inf.* has no finite bounds"):
        adapt_action(space, "discrete", 5)
    with pytest.raises(SpaceError, match=r"action space Box\(.*inf.* is not a bounded Box"):
        adapt_action(space, "continuous", 5)


def test_too_many_combinations_are_refused_with_their_number() -> None:
    space = spaces.Box(-1, 1, (6,), np.float32)
    with pytest.raises(SpaceError, match=r"Box\(.* has 15625 combinations.*action_division_num \(now 5\)"):
        adapt_action(space, "discrete", 5)
    assert adapt_action(space, "discrete", 4)[0] == DiscreteActions(4096)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Sequence(spaces.Discrete(2))], ids=str)
def test_other_actions_are_refused_by_name(space: gymnasium.Space[Any]) -> None:
    with pytest.raises(SpaceError, match=type(space).__name__):
        adapt_action(space, "discrete", 5)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_continuous_actions_stay_within_the_space_at_their_bounds(name: str) -> None:
    space = ACTION_SPACES[name]
    actions, to_env = adapt_action(space, "continuous", 5)
    assert isinstance(actions, ContinuousActions)
    for values in (actions.low, actions.high, np.mean([actions.low, actions.high], axis=0)):
        action = np.array(values, np.float32)
        assert space.contains(to_env(action))
        np.testing.assert_allclose(to_env(action), action, rtol=1e-6)


def test_continuous_actions_get_the_shape_of_the_space() -> None:
    space = spaces.Box(-1, 1, (2, 3), np.float32)
    actions, to_env = adapt_action(space, "continuous", 5)
    assert actions == ContinuousActions((-1.0,) * 6, (1.0,) * 6)
    np.testing.assert_array_equal(
        to_env(np.arange(6, dtype=np.float32) / 6), np.arange(6, dtype=np.float32).reshape(2, 3) / 6
    )


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(0, 3, (1,), np.int32)], ids=str)
def test_a_continuous_algorithm_refuses_discrete_actions(space: gymnasium.Space[Any]) -> None:
    with pytest.raises(SpaceError, match="is not a bounded Box of floats"):
        adapt_action(space, "continuous", 5)


@pytest.mark.parametrize("action", [DiscreteActions(3), ContinuousActions((-1.0, 0.0), (1.0, 2.0))])
@pytest.mark.parametrize("name", SPECS)
def test_spaces_survive_json(name: str, action: DiscreteActions | ContinuousActions) -> None:
    original = Spaces(SPECS[name], action, window_length=4)
    assert Spaces.from_dict(json.loads(json.dumps(original.to_dict()))) == original


def test_the_number_of_continuous_actions_is_refused() -> None:
    with pytest.raises(SpaceError, match="discrete actions"):
        _ = Spaces(SPECS["float32"], ContinuousActions((0.0,), (1.0,))).action_count
    assert Spaces(SPECS["float32"], DiscreteActions(7)).action_count == 7
