import json
import subprocess
import sys
from typing import Any

import envs
import gymnasium
import numpy as np
import pytest
import toy
from envs import ACTION_SPACES, OBSERVATION_SPACES, ShortLives, SignReward

from srl.base.env import (
    EPISODE_STATS,
    EnvConfig,
    as_seeds,
    env_config,
    make_agent_env,
    make_env,
)
from srl.base.errors import ConfigError, EnvError, MissingExtraError, SpaceError, UnknownFieldError
from srl.base.processor import Processor


def agent_env(config: EnvConfig | str, rl_config: toy.Config | None = None, **kwargs: Any) -> Any:
    return make_agent_env(env_config(config), rl_config or toy.Config(), **kwargs)


# --- making envs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Pendulum-v2", "no env is registered as 'Pendulum-v2'; did you mean Pendulum-v1"),
        ("CartPole-v", "did you mean CartPole-v"),
        ("qqqqqqqq", "own envs: register them, or name 'module:id'"),
        ("", "no env is registered as ''"),
    ],
)
def test_an_unknown_id_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_env(EnvConfig(name))


def test_a_constructor_that_raises_is_an_env_error_with_its_reason() -> None:
    with pytest.raises(EnvError, match="'test/Broken-v0' could not be made: OSError: the licence server is down"):
        make_env(EnvConfig("test/Broken-v0", {"what": "constructor"}))
    with pytest.raises(EnvError, match=r"could not be made: TypeError: .*nonsense"):
        make_env(EnvConfig("test/Identity-v0", {"nonsense": 1}))


def test_a_missing_package_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"test/Missing-v0.*box2d"):
        make_env(EnvConfig("test/Missing-v0", gym_make_func=needs_a_package))


def test_atari_without_ale_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(MissingExtraError, match=r"'ALE/Pong-v5' needs Atari: pip install 'srl\[atari\]'"):
        make_env(EnvConfig("ALE/Pong-v5"))


def needs_a_package(name: str) -> Any:
    raise gymnasium.error.DependencyNotInstalled("box2d is not installed")


def test_an_own_env_is_named_with_its_module() -> None:
    env = make_env(EnvConfig("envs:test/Script-v0", {"lengths": [2]}))
    assert isinstance(env.unwrapped, envs.Script)
    assert EnvConfig("envs:test/Script-v0").modules() == ["envs"]


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(EnvError, match="'no_such_module:Env-v0' needs the module 'no_such_module'"):
        make_env(EnvConfig("no_such_module:Env-v0"))


def test_kwargs_reach_the_env() -> None:
    assert make_env(EnvConfig("Pendulum-v1", kwargs={"g": 3.5})).unwrapped.g == 3.5
    assert make_env(EnvConfig("Pendulum-v1")).unwrapped.g == 10.0
    assert make_env(EnvConfig("Pendulum-v1"), "rgb_array").render_mode == "rgb_array"


def steps_until_end(env: gymnasium.Env[Any, Any]) -> tuple[int, float, bool, bool]:
    env.reset(seed=0)
    total, steps = 0.0, 0
    while True:
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        steps, total = steps + 1, total + float(reward)
        if terminated or truncated:
            return steps, total, terminated, truncated


def test_max_episode_steps_truncates() -> None:
    config = EnvConfig("test/Script-v0", {"lengths": [9], "ends": [0], "reward": 1.0})
    assert steps_until_end(make_env(config)) == (9, 9.0, True, False)
    config.max_episode_steps = 4
    assert steps_until_end(make_env(config)) == (4, 4.0, False, True)
    assert steps_until_end(make_env(EnvConfig("Pendulum-v1", max_episode_steps=7)))[0] == 7


def test_frameskip_repeats_the_action_and_sums_rewards_until_the_end() -> None:
    config = EnvConfig("test/Script-v0", {"lengths": [8], "ends": [0], "reward": 1.0}, frameskip=3)
    env = make_env(config)
    observation, _ = env.reset(seed=0)
    observation, reward, terminated, _, _ = env.step(1)
    assert (observation[2], reward, terminated) == (3, 3.0, False)
    env.step(1)
    observation, reward, terminated, _, _ = env.step(1)
    assert (observation[2], reward, terminated) == (8, 2.0, True)


def test_any_env_that_draws_can_be_observed_by_its_pictures() -> None:
    env = make_env(EnvConfig("test/Clock-v0", render_observation=True))
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    assert [env.reset(seed=0)[0], *(env.step(0)[0] for _ in range(4))] == [
        pytest.approx(np.full((8, 8, 3), step)) for step in range(5)
    ]


def test_only_observed_pictures_are_drawn() -> None:
    env = make_env(EnvConfig("test/Clock-v0", render_observation=True, frameskip=2))
    env.reset(seed=0)
    clock: Any = env.unwrapped
    before = clock.drawn
    assert env.step(0)[0][0, 0, 0] == 2 and clock.drawn == before + 1


def test_pictures_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(EnvError, match="observed by its pictures, so it cannot render 'human'"):
        make_env(EnvConfig("test/Clock-v0", render_observation=True), "human")
    with pytest.raises(EnvError, match="'unseen' could not be made"):
        make_env(EnvConfig("unseen", gym_make_func=make_unseen, render_observation=True))


def make_unseen(name: str, **kwargs: Any) -> Any:
    return gymnasium.make("test/Clock-v0")


def test_gym_make_func_takes_the_place_of_gymnasium_make() -> None:
    config = EnvConfig("anything", {"reward": 1.0}, gym_make_func=envs.make_script)
    env = make_env(config)
    assert isinstance(env.unwrapped, envs.Script)
    assert steps_until_end(env)[0] <= 3
    assert config.modules() == ["envs"]


def test_gym_wrappers_are_applied_in_order() -> None:
    config = EnvConfig("test/Script-v0", {"lengths": [1], "reward": 4.0})
    config.gym_wrappers = [envs.halve_reward, envs.add_one]
    assert steps_until_end(make_env(config))[1] == 3.0
    config.gym_wrappers = [envs.add_one, envs.halve_reward]
    assert steps_until_end(make_env(config))[1] == 2.5


def test_a_function_that_makes_no_env_is_refused() -> None:
    with pytest.raises(EnvError, match=r"is dict, not a gymnasium\.Env"):
        make_env(EnvConfig("x", gym_make_func=make_nothing))


def make_nothing(name: str) -> dict[str, Any]:
    return {}


# --- config -----------------------------------------------------------------------------------------------


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srl.base.env.ALLOWED_MODULES", {"envs"})


@pytest.mark.usefixtures("allowed")
def test_json_round_trip() -> None:
    config = EnvConfig(
        "test/Script-v0",
        {"longest": 4},
        max_episode_steps=5,
        frameskip=2,
        render_observation=True,
        gym_make_func=envs.make_script,
        gym_wrappers=[envs.halve_reward, gymnasium.wrappers.NormalizeReward],
    )
    data = json.loads(json.dumps(config.to_dict()))
    assert data["gym_make_func"] == "envs:make_script"
    assert EnvConfig.from_dict(data) == config
    assert EnvConfig.from_dict(json.loads(json.dumps(EnvConfig("x").to_dict()))) == EnvConfig("x")


def test_functions_without_an_importable_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no name that a worker could import"):
        EnvConfig("x", gym_wrappers=[lambda env: env]).to_dict()


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("reference", ["antigravity:fly", "os:system", "gymnasium.utils.play:play"])
def test_data_may_name_allowed_modules_only(reference: str) -> None:
    module = reference.partition(":")[0]
    for fields in [{"gym_make_func": reference}, {"gym_wrappers": [reference]}, {"name": f"{module}:Env-v0"}]:
        with pytest.raises(ConfigError, match=f"'{module}', which is not allowed .*--allow {module}"):
            EnvConfig.from_dict({"name": "x", **fields})
    assert "antigravity" not in sys.modules


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    "reference", ["envs:nonsense.deeper", "envs:PLAYED", "envs:np.load", "gymnasium.wrappers.rendering:os.system"]
)
def test_data_may_name_only_what_an_allowed_module_defines(reference: str) -> None:
    with pytest.raises(ConfigError, match="has no such function"):
        EnvConfig.from_dict({"name": "x", "gym_make_func": reference})


def test_an_env_is_an_id_or_a_config() -> None:
    config = EnvConfig("x", {"a": 1})
    copy = env_config(config)
    assert copy == config
    copy.kwargs["a"] = 2
    assert config.kwargs == {"a": 1}
    with pytest.raises(ConfigError, match=r"an env is an id like 'Pendulum-v1' or a srl\.EnvConfig, not 3"):
        env_config(3)  # type: ignore[arg-type]
    with pytest.raises(UnknownFieldError, match="did you mean 'frameskip'"):
        EnvConfig("x").frame_skip = 4


def test_modules_of_builtin_envs_need_no_permission() -> None:
    assert EnvConfig("Pendulum-v1").modules() == []
    assert EnvConfig("test/Script-v0", gym_wrappers=[envs.add_one, halve]).modules() == ["envs", __name__]


def halve(env: Any) -> Any:
    return env


def test_a_config_is_made_without_jax() -> None:
    program = "import sys, srl.base.env as e; e.EnvConfig('Pendulum-v1').to_dict(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- what an agent steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBSERVATION_SPACES)
def test_frames_have_the_shape_and_dtype_of_the_spec(name: str) -> None:
    env = agent_env(EnvConfig("test/Sampled-v0", {"observation": name}))
    spec = env.spaces.observation
    frames = [env.reset(seed=0)[0], env.step(0)[0]]
    for frame in frames:
        assert (frame.shape, frame.dtype.name) == (spec.shape, spec.dtype)
    assert (env.observation_space.shape, env.observation_space.dtype.name) == (spec.shape, spec.dtype)


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_every_action_of_an_agent_is_one_of_the_env(name: str) -> None:
    env = agent_env(EnvConfig("test/Sampled-v0", {"observation": "float32", "action": name}))
    env.reset(seed=0)
    for action in range(env.spaces.action_count):
        env.step(np.int32(action))


def test_spaces_are_refused_before_anything_starts() -> None:
    config = toy.Config(action_division_num=100)
    with pytest.raises(SpaceError, match="10000 combinations"):
        agent_env(EnvConfig("test/Sampled-v0", {"observation": "float32", "action": "float64"}), config)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("what", ["observation", "reward"])
def test_what_is_not_finite_is_an_error_that_names_lane_and_step(what: str, value: float) -> None:
    env = agent_env(EnvConfig("test/Broken-v0", {"what": what, "value": value, "at": 100}), lane=7)
    env.reset(seed=0)
    env.reset()
    for _ in range(99):
        env.step(0)
    with pytest.raises(
        EnvError, match=rf"test/Broken-v0 lane 7 returned a {what} .*(nan|inf).* at step 100 .*episode 1"
    ):
        env.step(0)


def test_an_observation_of_another_shape_is_an_error() -> None:
    env = agent_env(EnvConfig("test/Broken-v0", {"what": "shape", "at": 2}))
    env.reset(seed=0)
    env.step(0)
    with pytest.raises(EnvError, match=r"an observation of shape \(3,\) at step 2 .* has \(2,\)"):
        env.step(0)


def test_processors_change_what_is_learned_and_not_what_is_reported() -> None:
    config = toy.Config(processors=[ShortLives(2), SignReward()])
    env = agent_env(EnvConfig("test/Script-v0", {"lengths": [5], "ends": [0], "reward": 10.0}), config)
    env.reset(seed=0)
    seen = []
    while True:
        _, reward, terminated, _, info = env.step(0)
        seen.append((reward, terminated))
        if EPISODE_STATS in info:
            break
        if terminated:
            env.reset()
    assert seen == [(1, False), (1, True), (1, False), (1, True), (1, True)]
    assert (info[EPISODE_STATS]["r"], info[EPISODE_STATS]["l"]) == (50.0, 5)


class Defaults(toy.Config, algorithm=""):
    """A config whose algorithm adds a processor."""

    def default_processors(self, observation_space: gymnasium.Space[Any]) -> list[Processor]:
        return [ShortLives(observation_space.shape[0])]  # type: ignore[index]


def test_default_processors_come_last_and_can_be_turned_off() -> None:
    config = Defaults(processors=[SignReward()])
    env = EnvConfig("test/Script-v0")
    assert make_agent_env(env, config).processors == [SignReward(), ShortLives(3)]
    config.use_rl_processor = False
    assert make_agent_env(env, config).processors == [SignReward()]


def test_seeds_differ_between_lanes_streams_and_runs_and_are_repeatable() -> None:
    seeds = [seed for run in range(5) for stream in range(3) for seed in as_seeds(run, range(50), stream)]
    assert len(set(seeds)) == len(seeds)
    assert as_seeds(3, [4, 2], 1) == [as_seeds(3, [4], 1)[0], as_seeds(3, [2], 1)[0]]
    assert all(0 <= seed < 1 << 31 for seed in seeds)
