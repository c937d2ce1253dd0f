from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from envs import PLAYED, Drawn, ShortLives, SignReward, undrawn
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from srl.algorithms import dqn
from srl.base.algorithm import RLConfig, Step
from srl.base.env import EnvConfig, make_agent_env
from srl.base.segment import End, Segment
from srl.rl.memories.replay import ReplayMemory
from srl.runner import episodes
from srl.runner.actor import Actor
from srl.runner.checkpoint import load_parameter, save_parameter
from srl.runner.lanes import Lanes, make_lanes

DISCOUNT = 0.9


@pytest.fixture(autouse=True)
def nothing_played() -> Iterator[None]:
    PLAYED.clear()
    yield
    PLAYED.clear()


def make_actor(
    config: RLConfig, numbers: Sequence[int] = (0,), *, seed: int = 0, distributed: bool = False, **kwargs: Any
) -> tuple[Actor, Any]:
    lanes = make_lanes(EnvConfig("test/Script-v0", kwargs), config, numbers)
    policy: Any = config.make_policy(lanes.spaces)
    actor = Actor(
        lanes, policy, config, seed=seed, lane_numbers=numbers, total_lanes=len(numbers), distributed=distributed
    )
    actor.set_parameters(config.make_learner(lanes.spaces, 0).parameters, 0)
    return actor, policy


def play(actor: Actor, steps: int) -> list[Segment]:
    segments = [segment for _ in range(steps) for segment in actor.step().segments]
    return segments + actor.flush()


Key = tuple[int, ...]


def expected_transitions(window: int, n_step: int) -> dict[Key, dict[str, Any]]:
    """Return by newest frame what must be learned from all that was played, computed step by step."""
    found = {}
    for episode in PLAYED.values():
        length = len(episode.rewards)
        for start in range(length):
            reached = min(start + n_step, length)
            terminal = reached == length and episode.end is End.TERMINATED
            found[tuple(episode.frames[start])] = {
                "observation_tm1": [episode.frames[max(start - back, 0)] for back in reversed(range(window))],
                "observation_t": [episode.frames[max(reached - back, 0)] for back in reversed(range(window))],
                "action_tm1": episode.actions[start],
                "reward_t": sum(DISCOUNT**i * episode.rewards[start + i] for i in range(reached - start)),
                "discount_t": 0.0 if terminal else DISCOUNT ** (reached - start),
            }
    return found


def assert_learned(
    memory: ReplayMemory,
    segments: list[Segment],
    expected: dict[Key, dict[str, Any]],
    read: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> None:
    assert memory.insert(segments) == len(memory) == len(expected)
    sample = memory.sample(20 * len(memory) // memory.batch_size + 1, 0)
    batches = {name: values.reshape(-1, *values.shape[2:]) for name, values in sample.batches.items()}
    batches |= {name: read(batches[name]) for name in ("observation_tm1", "observation_t")}
    keys = [tuple(frame) for frame in batches["observation_tm1"][:, -1].tolist()]
    assert set(keys) == set(expected)
    for name in ("observation_tm1", "observation_t", "action_tm1"):
        np.testing.assert_array_equal(batches[name], np.array([expected[key][name] for key in keys]), name)
    for name in ("reward_t", "discount_t"):
        np.testing.assert_allclose(batches[name], [expected[key][name] for key in keys], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("longest", [2, 40])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_every_transition_is_learned_from_exactly_once(n_step: int, window: int, longest: int) -> None:
    config = toy.Config(n_step=n_step, window_length=window, segment_length=4)
    actor, policy = make_actor(config, range(3), longest=longest)
    segments = play(actor, 150)
    ends = {segment.end for segment in segments}
    assert ends == (set(End) if longest > 20 else {End.TERMINATED, End.TRUNCATED})
    for lane in range(3):
        own = [segment.sequence for segment in segments if segment.lane == lane]
        assert own == list(range(len(own)))
    expected = expected_transitions(window, n_step)
    assert len(expected) == 3 * 150
    memory = config.make_memory(make_lanes(EnvConfig("test/Script-v0"), config, [0]).spaces, 0, None)
    assert isinstance(memory, ReplayMemory)
    assert_learned(memory, segments, expected)
    assert all(explore is not None for explore in policy.explored)


@pytest.mark.parametrize("longest", [2, 40])
@pytest.mark.parametrize("n_step", [1, 3])
def test_every_picture_is_stored_once_as_bytes_and_learned_from_exactly_once(n_step: int, longest: int) -> None:
    config = toy.Config(n_step=n_step, window_length=4, segment_length=20, processors=[Drawn()])
    actor, _ = make_actor(config, range(3), longest=longest)
    segments = play(actor, 150)
    for segment in segments:
        steps = undrawn(segment.frames)[:, 2]
        np.testing.assert_array_equal(np.diff(steps), 1)
    expected = expected_transitions(4, n_step)
    assert len(expected) == 3 * 150
    memory = config.make_memory(make_lanes(EnvConfig("test/Script-v0"), config, [0]).spaces, 0, None)
    assert isinstance(memory, ReplayMemory)
    assert_learned(memory, segments, expected, undrawn)
    assert memory.sample(1, 0).batches["observation_t"].dtype == np.uint8


def test_a_segment_is_as_long_as_asked_and_cut_segments_overlap() -> None:
    config = toy.Config(n_step=2, window_length=2, segment_length=10)
    actor, _ = make_actor(config, lengths=[24], ends=[1])
    segments = play(actor, 24)
    assert [(len(segment.rewards), segment.end, segment.context) for segment in segments] == [
        (10, End.CUT, 0),
        (10, End.CUT, 1),
        (8, End.TRUNCATED, 1),
    ]
    np.testing.assert_array_equal(segments[1].frames[:3], segments[0].frames[-3:])
    np.testing.assert_array_equal(segments[1].actions[:2], segments[0].actions[-2:])


def test_the_last_frame_of_a_truncated_episode_is_its_own() -> None:
    actor, _ = make_actor(toy.Config(), lengths=[3], ends=[0, 1], reward=1.0)
    first, second = [segment for _ in range(6) for segment in actor.step().segments]
    assert (first.end, second.end) == (End.TERMINATED, End.TRUNCATED)
    np.testing.assert_array_equal(second.frames[:, 2], [0, 1, 2, 3])
    assert len(set(second.frames[:, 0].tolist())) == 1
    assert second.frames[0, 0] != first.frames[0, 0]
    assert actor.flush() == []


def test_a_time_limit_at_a_terminal_state_does_not_bootstrap() -> None:
    config = toy.Config()
    env = EnvConfig("test/Script-v0", {"lengths": [3], "ends": [0]}, max_episode_steps=3)
    lanes = make_lanes(env, config, [0])
    policy: Any = config.make_policy(lanes.spaces)
    actor = Actor(lanes, policy, config, seed=0, lane_numbers=[0], total_lanes=1, distributed=False)
    actor.set_parameters(config.make_learner(lanes.spaces, 0).parameters, 0)
    assert [segment.end for segment in play(actor, 3)] == [End.TERMINATED]


def test_the_reward_of_a_one_step_episode_is_stored_with_three_steps_too() -> None:
    config = toy.Config(n_step=3)
    actor, _ = make_actor(config, lengths=[1, 2], ends=[0], reward=1.0)
    segments = play(actor, 5)
    assert [segment.rewards.tolist() for segment in segments] == [[1.0], [1.0, 1.0], [1.0, 1.0]]
    assert [len(segment.transitions(3)) for segment in segments] == [1, 2, 2]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("n_step", [1, 3])
def test_initial_priorities_equal_a_recomputation(n_step: int, window: int) -> None:
    config = dqn.Config(n_step=n_step, window_length=window, segment_length=4, epsilon=0.0, discount=DISCOUNT)
    config.memory.set_proportional_memory()
    config.hidden_block.set_mlp((8,))
    actor, policy = make_actor(config, range(2), longest=20)
    segments = play(actor, 60)
    assert {segment.end for segment in segments} == set(End)
    # Greedy everywhere, so the value of the action that was taken is the highest one.
    spaces = make_lanes(EnvConfig("test/Script-v0"), config, [0]).spaces
    parameters = policy.load(config.make_learner(spaces, 0).parameters)

    def value(stack: Any) -> float:
        return float(
            policy.act(parameters, np.array([stack], np.int32), None, np.random.default_rng(0), None).scores["q_max"][0]
        )

    expected = expected_transitions(window, n_step)
    unknown = 0
    for segment in segments:
        assert segment.priorities is not None
        starts = segment.transitions(n_step)
        assert segment.priorities.shape == (len(starts),)
        for start, priority in zip(starts, segment.priorities, strict=True):
            wanted = expected[tuple(segment.frames[start].tolist())]
            if wanted["discount_t"] and segment.end is End.TRUNCATED and start + n_step >= len(segment.rewards):
                assert np.isnan(priority)  # the last frame was never acted on
                unknown += 1
                continue
            bootstrap = wanted["discount_t"] and wanted["discount_t"] * value(wanted["observation_t"])
            error = abs(wanted["reward_t"] + bootstrap - value(wanted["observation_tm1"]))
            assert priority == pytest.approx(error, rel=1e-3, abs=1e-3)
    assert 0 < unknown < len(expected) / 2


def first_frames(seed: int, numbers: Sequence[int]) -> list[list[int]]:
    actor, _ = make_actor(toy.Config(), numbers, seed=seed, lengths=[1])
    return [segment.frames[0].tolist() for segment in actor.step().segments]


def test_lanes_actors_and_seeds_play_different_episodes_and_a_seed_the_same() -> None:
    frames = [*first_frames(0, range(4)), *first_frames(0, range(4, 8)), *first_frames(1, range(4))]
    assert len({tuple(frame) for frame in frames}) == 12
    assert first_frames(0, range(4)) == frames[:4]


def test_actors_with_other_lanes_explore_differently() -> None:
    actions = []
    for numbers in ([0], [1], [0]):
        actor, _ = make_actor(toy.Config(epsilon=1.0), numbers, lengths=[50], ends=[1])
        actions.append(np.concatenate([segment.actions for segment in play(actor, 50)]).tolist())
    assert actions[0] != actions[1]
    assert actions[0] == actions[2]


def test_policies_are_told_the_clock_and_their_place_in_the_run() -> None:
    actor, policy = make_actor(toy.Config(), [6, 7], distributed=True)
    actor.train_count = 5
    actor.step()
    actor.train_count, actor.total_lanes = 9, 40
    actor.step()
    first, second = policy.explored
    assert (first.train_count, first.total_lanes, first.distributed) == (5, 2, True)
    assert (second.train_count, second.total_lanes) == (9, 40)
    np.testing.assert_array_equal(second.lanes, [6, 7])


def test_each_lane_explores_by_its_own_step_of_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def epsilon_greedy(greedy: np.ndarray, count: int, epsilon: Any, rng: Any) -> np.ndarray:
        asked.append(np.broadcast_to(epsilon, greedy.shape).tolist())
        return greedy.astype(np.int32)

    monkeypatch.setattr(dqn, "epsilon_greedy", epsilon_greedy)
    config = dqn.Config()
    config.hidden_block.set_mlp((4,))
    actor, _ = make_actor(config, [2, 3], distributed=True)
    actor.total_lanes = 5
    actor.step()
    actor.total_lanes = 9
    actor.step()
    for total, epsilons in zip([5, 9], asked, strict=True):
        assert epsilons == pytest.approx([0.4 ** (1 + 7 * lane / (total - 1)) for lane in (2, 3)])


def test_a_segment_says_which_parameters_chose_its_last_action() -> None:
    config = toy.Config(segment_length=4)
    actor, _ = make_actor(config, lengths=[7], ends=[0])
    parameters = config.make_learner(make_lanes(EnvConfig("test/Script-v0"), config, [0]).spaces, 0).parameters
    segments = []
    for version in range(1, 10):
        actor.set_parameters(parameters, version)
        segments += actor.step().segments
    actor.set_parameters(parameters, 10)
    segments += actor.flush()
    # Steps 1 to 4 were cut (noticed at step 5), 5 to 7 ended the episode, 8 and 9 were flushed.
    assert [(segment.end, segment.version) for segment in segments] == [
        (End.CUT, 4),
        (End.TERMINATED, 7),
        (End.TRUNCATED, 9),
    ]


def test_zero_parameters_act_as_the_zero_network() -> None:
    config = toy.Config(epsilon=0.0)
    actor, _ = make_actor(config, range(3))
    zeros = {"weights": np.zeros((3, 3), np.float32), "bias": np.array([0, 0, 1], np.float32)}
    actor.set_parameters(zeros, 5)
    assert {int(action) for segment in play(actor, 20) for action in segment.actions} == {2}


def test_what_a_step_counts() -> None:
    config = toy.Config(processors=[ShortLives(2), SignReward()])
    actor, _ = make_actor(config, range(2), lengths=[5], ends=[0], reward=10.0)
    produced = [actor.step() for _ in range(10)]
    assert [item.env_steps for item in produced] == [2] * 10
    assert [item.episode_rewards for item in produced] == [[50.0, 50.0] if at in (4, 9) else [] for at in range(10)]
    assert [item.episode_lengths for item in produced] == [[5, 5] if at in (4, 9) else [] for at in range(10)]
    learned = [segment.rewards.max() for item in produced for segment in item.segments]
    assert set(learned) == {1.0}


class Recurrent(toy.Policy):
    """Sends its state along, as a sequence memory needs it."""

    def act(self, *arguments: Any) -> Step:
        step = super().act(*arguments)
        assert step.state is not None
        extras = {"step": arguments[2]["steps"], "pair": np.stack([step.action, step.action], 1)}
        return Step(step.action, step.state, extras)


def test_extras_and_state_belong_to_their_steps() -> None:
    config = toy.Config(window_length=2, n_step=2, segment_length=8)
    lanes = make_lanes(EnvConfig("test/Script-v0", {"longest": 20}), config, range(3))
    policy = Recurrent(config, lanes.spaces)
    actor = Actor(lanes, policy, config, seed=0, lane_numbers=range(3), total_lanes=3, distributed=False)
    actor.set_parameters(config.make_learner(lanes.spaces, 0).parameters, 0)
    segments = play(actor, 60)
    assert End.CUT in {segment.end for segment in segments}
    for segment in segments:
        np.testing.assert_array_equal(segment.extras["step"], segment.frames[:-1, 2])
        np.testing.assert_array_equal(segment.extras["pair"], np.stack([segment.actions] * 2, 1))


# --- open episodes are brought back -----------------------------------------------------------------------


def state_of(actor: Actor, path: Path) -> Any:
    save_parameter(path / "state.safetensors", actor.get_state(), {})
    return load_parameter(path / "state.safetensors")[0]


def as_text(segments: list[Segment]) -> list[Any]:
    return [(each.frames.tolist(), each.rewards.tolist(), each.end, each.lane, each.sequence) for each in segments]


def test_lives_of_one_episode_are_brought_back_as_one(tmp_path: Path) -> None:
    config = toy.Config(processors=[ShortLives(3)], segment_length=8)
    first, _ = make_actor(config, range(3), longest=40)
    play(first, 50)
    second, _ = make_actor(config, range(3), seed=1, longest=40)
    assert second.set_state(state_of(first, tmp_path)) == []
    assert as_text(play(second, 60)) == as_text(play(first, 60))


@pytest.mark.parametrize("steps", [3, 300])
def test_an_episode_that_is_too_long_is_not_brought_back(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episodes, "REPLAYED_STEPS", 100)
    first, _ = make_actor(toy.Config(), range(2), lengths=[1000])
    made = play_without_flush(first, steps)
    state = state_of(first, tmp_path)
    assert len(state["episodes"]["actions"]) == (3 if steps == 3 else 0)
    second, _ = make_actor(toy.Config(), range(2), seed=1, lengths=[1000])
    closed = second.set_state(state)
    if steps == 3:
        assert closed == [] and not caplog.records
        return
    assert "2 of 2 lanes start new episodes: episodes of more than 100 steps" in caplog.text
    # What was played is all handed out, each step once, and the number of segments goes on.
    assert sum(len(segment.rewards) for segment in made + closed) == 2 * 300
    assert {segment.end for segment in closed} == {End.TRUNCATED}
    later = [segment.sequence for segment in play(second, 20) if segment.lane == 0]
    assert later[0] == max(segment.sequence for segment in closed if segment.lane == 0) + 1


def play_without_flush(actor: Actor, steps: int) -> list[Segment]:
    return [segment for _ in range(steps) for segment in actor.step().segments]


def test_lanes_that_step_themselves_start_new_episodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Actor:
        config = toy.Config()
        made = [make_agent_env(EnvConfig("test/Script-v0", {"longest": 30}), config, lane=lane) for lane in range(3)]
        lanes = Lanes(
            SyncVectorEnv([lambda env=env: env for env in made], autoreset_mode=AutoresetMode.SAME_STEP),
            made[0].spaces,
        )
        actor = Actor(
            lanes,
            config.make_policy(lanes.spaces),
            config,
            seed=0,
            lane_numbers=range(3),
            total_lanes=3,
            distributed=False,
        )
        actor.set_parameters(config.make_learner(lanes.spaces, 0).parameters, 0)
        return actor

    first, second = make(), make()
    made = play_without_flush(first, 40)
    made += second.set_state(state_of(first, tmp_path))
    assert "3 of 3 lanes start new episodes: single lanes of this env cannot be played again" in caplog.text
    assert sum(len(segment.rewards) for segment in made) == 3 * 40
    assert sum(len(segment.rewards) for segment in play(second, 30)) == 3 * 30
