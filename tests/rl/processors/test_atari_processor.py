"""Atari games: the usual script, lives, no-op starts and clipping for learners, raw whole games for evaluation."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import srl
from srl.algorithms import dqn
from srl.base.define import EnvObservationTypes
from srl.base.env import EPISODE_STATS, AgentEnv, EnvConfig, make_agent_env
from srl.base.errors import EnvError, SpaceError
from srl.rl.processors.atari_processor import AtariProcessor
from srl.rl.processors.image_processor import ImageProcessor
from srl.runner.actor import Actor
from srl.runner.distribution.wire import Experience, decode_experience, encode_experience
from srl.runner.lanes import make_lanes

pytest.importorskip("ale_py")

BREAKOUT = EnvConfig("ALE/Breakout-v5", kwargs={"frameskip": 4, "repeat_action_probability": 0})
PONG = EnvConfig("ALE/Pong-v5", kwargs={"frameskip": 7, "repeat_action_probability": 0, "full_action_space": False})


def agent_env(processor: AtariProcessor, env: EnvConfig = BREAKOUT, *, training: bool = True) -> AgentEnv:
    config = dqn.Config(processors=[processor, ImageProcessor(resize=(42, 42))])
    return make_agent_env(env, config, training=training)


def play(env: AgentEnv, games: int = 1, seed: int = 0) -> tuple[list[float], list[float], int]:
    """Return the rewards seen, the scores reported, and how many episodes the learner saw end."""
    rng = np.random.default_rng(seed)
    rewards, scores, ends = [], [], 0
    env.reset(seed=seed)
    while len(scores) < games:
        _, reward, terminated, truncated, info = env.step(rng.integers(env.spaces.action_count))
        rewards.append(reward)
        if EPISODE_STATS in info:
            scores.append(float(info[EPISODE_STATS]["r"]))
        if terminated or truncated:
            ends += 1
            env.reset()
    return rewards, scores, ends


def test_the_usual_pong_script_is_accepted() -> None:
    config = dqn.Config(
        batch_size=32, target_model_update_interval=10_000, discount=0.99, lr=0.00025, enable_reward_clip=False,
        enable_double_dqn=True, enable_rescale=False,
    )  # fmt: skip
    config.memory.warmup_size, config.memory.capacity = 1_000, 10_000
    config.memory.set_proportional_memory(beta_steps=1_000_000)
    config.epsilon.set_linear(200_000, 1.0, 0.1)
    config.image_block.set_r2d3_image()
    config.hidden_block.set_mlp((512,))
    config.window_length = 4
    config.processors = [
        ImageProcessor(
            image_type=EnvObservationTypes.GRAY_2ch, trimming=(30, 0, 210, 160), resize=(84, 84), enable_norm=True
        )
    ]
    config.use_rl_processor = False
    runner = srl.Runner(PONG, config, seed=0)
    assert runner.spaces.observation.shape == (84, 84) and runner.spaces.action_count == 6
    assert runner.spaces.window_length == 4


def test_a_lost_life_ends_the_learner_s_episode_and_the_score_is_of_the_whole_game() -> None:
    rewards, scores, ends = play(agent_env(AtariProcessor()), games=2)
    assert ends == 2 * 5
    assert set(rewards) <= {0.0, 1.0} and sum(scores) == sum(rewards)


def test_clipping_shows_signs_to_the_learner_while_scores_stay_raw() -> None:
    seaquest = EnvConfig("ALE/Seaquest-v5", kwargs={"frameskip": 4, "repeat_action_probability": 0})
    clipped, scores, _ = play(agent_env(AtariProcessor(episodic_life=False), seaquest))
    raw, same_scores, _ = play(agent_env(AtariProcessor(episodic_life=False, clip_reward=False), seaquest))
    assert set(clipped) <= {-1.0, 0.0, 1.0} and max(raw) > 1
    assert clipped == np.sign(raw).tolist()
    assert scores == same_scores == [sum(raw)]


def test_evaluation_plays_whole_games_with_raw_rewards_and_the_same_starts() -> None:
    env = agent_env(AtariProcessor(noop_max=7), training=False)
    assert env.processors[0] == AtariProcessor(episodic_life=False, clip_reward=False, noop_max=7)
    rewards, scores, ends = play(env)
    assert ends == 1 and scores == [sum(rewards)]


def test_the_runner_evaluates_with_the_game_s_own_score() -> None:
    config = dqn.Config(processors=[AtariProcessor(noop_max=0), ImageProcessor(resize=(36, 36))], window_length=1)
    config.hidden_block.set_mlp((4,))
    runner = srl.Runner(
        EnvConfig("ALE/Pong-v5", kwargs={**PONG.kwargs, "max_num_frames_per_episode": 700}), config, seed=0
    )
    rewards = runner.evaluate(2, num_envs=2)
    assert all(reward < -1 for reward in rewards), "several lost points, not one sign"


def first_frames(processor: AtariProcessor, starts: int = 8) -> list[bytes]:
    env = agent_env(processor, PONG)
    frames = [env.reset(seed=seed)[0].tobytes() for seed in range(starts)]
    assert frames == [env.reset(seed=seed)[0].tobytes() for seed in range(starts)], "a seed repeats its start"
    return frames


def test_no_op_starts_differ_and_repeat_for_a_seed() -> None:
    assert len(set(first_frames(AtariProcessor(noop_max=0)))) == 1
    assert len(set(first_frames(AtariProcessor(noop_max=30)))) > 4


def test_fire_starts_games_and_lives_that_wait_for_it() -> None:
    def ram_ball(processor: AtariProcessor) -> list[bool]:
        """Whether Breakout's ball is in play, after a start and after a lost life."""
        env = agent_env(processor)
        env.reset(seed=0)
        ale: Any = env.unwrapped
        in_play = [ale.ale.getRAM()[101] != 0]
        terminated = False
        for _ in range(300):
            _, _, terminated, _, _ = env.step(0)
            if terminated:
                env.reset()
                in_play.append(ale.ale.getRAM()[101] != 0)
                break
        return in_play

    assert ram_ball(AtariProcessor()) == [True, True]
    assert ram_ball(AtariProcessor(fire_reset=False)) == [False]


def test_other_envs_are_refused() -> None:
    with pytest.raises(SpaceError, match="AtariProcessor needs an Atari game"):
        make_agent_env(EnvConfig("CartPole-v1"), dqn.Config(processors=[AtariProcessor()]))


@pytest.mark.parametrize("name", ["ALE/Pomg-v5", "Pong-v5"])
def test_an_unknown_game_is_refused_with_near_names(name: str) -> None:
    with pytest.raises(EnvError, match=r"did you mean .*ALE/Pong-v5"):
        srl.Runner(name, dqn.Config())


def test_games_start_in_silence_and_older_ids_are_known_without_being_registered_first() -> None:
    code = "from srl.base.env import *; [make_env(EnvConfig(name)) for name in ('PongNoFrameskip-v4', 'ALE/Pong-v5')]"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Stella" not in done.stderr


@pytest.mark.parametrize("training", [True, False])
def test_a_reset_in_the_middle_of_a_game_starts_a_new_one(training: bool) -> None:
    env = agent_env(AtariProcessor(noop_max=0), training=training)
    start, _ = env.reset(seed=0)
    for _ in range(20):
        env.step(2)
    again, _ = env.reset()
    np.testing.assert_array_equal(again, start)
    game: Any = env.unwrapped
    assert game.ale.getEpisodeFrameNumber() == 4, "one press of fire"


def test_processors_survive_json() -> None:
    config = dqn.Config(processors=[AtariProcessor(noop_max=3), ImageProcessor(resize=(42, 30), trimming=(1, 2, 3, 4))])
    data = config.to_dict()
    data.pop("algorithm")
    assert dqn.Config.from_dict(data) == config


def test_a_transition_of_pong_takes_little_of_the_wire() -> None:
    config = dqn.Config(window_length=4, processors=[ImageProcessor(trimming=(30, 0, 210, 160), resize=(84, 84))])
    config.memory.set_proportional_memory()
    config.hidden_block.set_mlp((8,))
    lanes = make_lanes(PONG, config, range(4))
    policy = config.make_policy(lanes.spaces)
    actor = Actor(lanes, policy, config, seed=0, lane_numbers=range(4), total_lanes=4, distributed=True)
    actor.set_parameters(config.make_learner(lanes.spaces, 0).parameters, 0)
    segments = [segment for _ in range(140) for segment in actor.step().segments]
    transitions = sum(len(segment.transitions(config.n_step)) for segment in segments)
    assert transitions >= 4 * 100
    message = encode_experience(Experience("actor", 0, segments))
    assert len(message) / transitions < 300
    for sent, received in zip(segments, decode_experience(message).segments, strict=True):
        np.testing.assert_array_equal(sent.frames, received.frames)
