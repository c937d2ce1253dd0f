"""What `Runner` refuses, saves and loads; training has its own tests."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import envs  # noqa: F401  registers the envs
import numpy as np
import pytest
import toy

import srl
from srl.algorithms import dqn
from srl.base.errors import CheckpointError, ConfigError, EnvError, SpaceError
from srl.runner import render

ENV = srl.EnvConfig("test/Script-v0")


def make_runner(config: Any = None, env: Any = ENV, seed: int = 0) -> srl.Runner:
    return srl.Runner(env, config or toy.Config(), seed=seed)


def trained(updates: int = 60, **arguments: Any) -> srl.Runner:
    runner = make_runner()
    runner.train(max_train_count=updates, num_envs=2, eval_episodes=0, progress=False, **arguments)
    return runner


def same(first: Any, second: Any) -> bool:
    return all(np.array_equal(first[name], second[name]) for name in ("weights", "bias"))


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: make_runner(env="Script-v7"), EnvError, "no env is registered as 'Script-v7'"),
        (lambda: srl.Runner(ENV, "dqn"), ConfigError, r"such as dqn\.Config\(\), not 'dqn'"),  # type: ignore[arg-type]
        (lambda: srl.Runner(3, toy.Config()), ConfigError, "an env is an id like"),  # type: ignore[arg-type]
        (lambda: make_runner(env=srl.EnvConfig("test/Broken-v0", {"what": "constructor"})), EnvError, "licence server"),
        (
            lambda: make_runner(
                toy.Config(action_division_num=99),
                srl.EnvConfig("test/Sampled-v0", {"observation": "float32", "action": "float64"}),
            ),
            SpaceError,
            "9801 combinations",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_once(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_contradiction_is_refused_at_once() -> None:
    config = dqn.Config(batch_size=64)
    config.memory.warmup_size = 32
    with pytest.raises(ConfigError, match=r"memory\.warmup_size"):
        make_runner(config)


def test_refusing_needs_no_jax() -> None:
    program = (
        "import sys, srl\nfrom srl.algorithms import dqn\n"
        "try:\n    srl.Runner('Pendulum-v9', dqn.Config())\n"
        "except Exception as error:\n    assert 'Pendulum-v1' in str(error)\n    sys.exit('jax' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_new_runner_has_a_seed_of_its_own_and_a_config_that_stays_the_users() -> None:
    config = toy.Config()
    first, second = srl.Runner(ENV, config), srl.Runner(ENV, config)
    assert first.seed != second.seed
    assert first.config is config
    assert (first.train_count, first.env_steps) == (0, 0)


# --- checkpoints ------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    runner = trained()
    path = runner.save_checkpoint(tmp_path)
    assert path == tmp_path / "60"
    other = make_runner(seed=5)
    assert not same(other.parameters, runner.parameters)
    other.load_checkpoint(tmp_path)
    assert same(other.parameters, runner.parameters)
    assert (other.train_count, other.env_steps) == (60, runner.env_steps)
    assert other.evaluate(3) == srl_evaluation(runner, seed=5)


def srl_evaluation(runner: srl.Runner, seed: int) -> list[float]:
    other = make_runner(seed=seed)
    other.set_parameters(runner.parameters)
    return other.evaluate(3)


def test_training_goes_on_from_a_checkpoint_with_a_new_memory(tmp_path: Path) -> None:
    runner = trained()
    runner.save_checkpoint(tmp_path)
    other = make_runner()
    other.load_checkpoint(tmp_path)
    other.train(max_train_count=20, num_envs=2, eval_episodes=0, progress=False)
    assert other.train_count == 80
    # The lost memory is warmed up again, then an update comes with every step.
    assert 50 + 20 <= other.env_steps - runner.env_steps <= 50 + 20 + 30


def test_training_goes_on_from_a_checkpoint_with_the_memory_of_its_work_directory(tmp_path: Path) -> None:
    runner = trained(work_dir=tmp_path / "work")
    runner.save_checkpoint(tmp_path / "checkpoints")
    other = make_runner()
    other.load_checkpoint(tmp_path / "checkpoints")
    other.train(max_train_count=20, num_envs=2, eval_episodes=0, progress=False, work_dir=tmp_path / "work")
    assert other.train_count == 80
    assert 20 <= other.env_steps - runner.env_steps <= 30


def test_a_checkpoint_of_an_untrained_runner(tmp_path: Path) -> None:
    runner = make_runner()
    assert runner.save_checkpoint(tmp_path).name == "0"
    other = make_runner(seed=4)
    other.load_checkpoint(tmp_path)
    assert same(other.parameters, runner.parameters)
    other.train(max_train_count=3, eval_episodes=0, progress=False)
    assert other.train_count == 3


def test_resuming_many_times_keeps_names_increasing(tmp_path: Path) -> None:
    runner = make_runner()
    for _ in range(3):
        runner.train(max_train_count=10, eval_episodes=0, progress=False, checkpoint_save_dir=tmp_path)
        runner = make_runner()
        runner.load_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20", "30", "memory"]


def test_a_missing_checkpoint_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path / "nowhere")):
        make_runner().load_checkpoint(tmp_path / "nowhere")


def test_a_damaged_checkpoint_is_refused_with_its_path_and_changes_nothing(tmp_path: Path) -> None:
    path = trained().save_checkpoint(tmp_path)
    file = path / "learner.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    runner = make_runner()
    before = runner.parameters
    with pytest.raises(CheckpointError, match=f"{path}: learner.safetensors was changed"):
        runner.load_checkpoint(tmp_path)
    assert same(runner.parameters, before)
    assert runner.train_count == 0


@pytest.mark.parametrize("what", ["checkpoint", "parameter"])
def test_what_belongs_to_something_else_is_refused_with_its_path(what: str, tmp_path: Path) -> None:
    def load(runner: srl.Runner) -> None:
        if what == "checkpoint":
            runner.load_checkpoint(tmp_path)
        else:
            runner.load_parameter(tmp_path / "p.safetensors")

    runner = trained(5)
    runner.save_checkpoint(tmp_path)
    runner.save_parameter(tmp_path / "p.safetensors")
    with pytest.raises(CheckpointError, match=f"{tmp_path}.* is of the algorithm 'toy', this runner's is 'dqn'"):
        load(make_runner(dqn.Config()))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*weights has shape \(3, 3\) where \(6, 3\) is needed"):
        load(make_runner(toy.Config(window_length=2)))


# --- parameters -------------------------------------------------------------------------------------------


def test_a_parameter_file_holds_what_is_acted_on(tmp_path: Path) -> None:
    runner = trained()
    runner.save_parameter(tmp_path / "p.safetensors")
    other = make_runner(seed=5)
    other.load_parameter(tmp_path / "p.safetensors")
    assert same(other.parameters, runner.parameters)
    assert other.evaluate(3) == srl_evaluation(runner, seed=5)
    other.train(max_train_count=5, eval_episodes=0, progress=False)
    assert not same(other.parameters, runner.parameters)


def test_a_missing_or_damaged_parameter_file_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    with pytest.raises(CheckpointError, match=f"there is no parameter file {path}"):
        make_runner().load_parameter(path)
    make_runner().save_parameter(path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=f"the parameter file {path} is damaged"):
        make_runner().load_parameter(path)


def test_parameters_of_another_shape_are_refused() -> None:
    runner = make_runner()
    with pytest.raises(CheckpointError, match="bias is missing"):
        runner.set_parameters({"weights": np.zeros((3, 3), np.float32)})


def test_a_copied_checkpoint_directory_can_be_named_itself(tmp_path: Path) -> None:
    runner = trained(5)
    shutil.copytree(runner.save_checkpoint(tmp_path / "a"), tmp_path / "best")
    other = make_runner(seed=5)
    other.load_checkpoint(tmp_path / "best")
    assert same(other.parameters, runner.parameters)


# --- what a review found ----------------------------------------------------------------------------------


def test_misspelt_keywords_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        dqn.Config(batchsize=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean 'num_envs'"):
        make_runner().train_mp(max_train_count=1, nm_envs=3)
    with pytest.raises(ConfigError, match="seed belongs to the runner"):
        make_runner().train_mp(max_train_count=1, seed=3)


def test_the_promised_argument_orders() -> None:
    config = dqn.Config(64, 200, 0.9, 0.01, True, False, True)
    assert (config.batch_size, config.target_model_update_interval, config.discount) == (64, 200, 0.9)
    assert config.lr.value(0) == 0.01
    assert (config.enable_reward_clip, config.enable_double_dqn, config.enable_rescale) == (True, False, True)
    runner = make_runner()
    runner.train(20, num_envs=2, eval_episodes=0, progress=False)
    assert runner.train_count == 20


def test_a_shorter_run_is_not_hidden_by_an_older_longer_one(tmp_path: Path) -> None:
    trained(60, checkpoint_save_dir=tmp_path)
    with pytest.raises(ConfigError, match="holds another run's checkpoint of 60 updates"):
        trained(20, checkpoint_save_dir=tmp_path)
    runner = make_runner()
    runner.load_checkpoint(tmp_path)
    runner.train(20, num_envs=2, eval_episodes=0, progress=False, checkpoint_save_dir=tmp_path)
    assert (tmp_path / "80").is_dir()


def test_a_config_changed_before_learning_counts_and_after_it_is_refused() -> None:
    runner = make_runner()
    runner.config.window_length = 2
    runner.train(20, num_envs=2, eval_episodes=0, progress=False)
    runner.config.window_length = 3
    with pytest.raises(ConfigError, match="make a new Runner"):
        runner.evaluate(1)


def test_an_env_of_the_script_itself_is_refused_where_workers_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srl.EnvConfig, "modules", lambda self: ["__main__"])
    with pytest.raises(ConfigError, match="a module of its own"):
        make_runner().train_mp(max_train_count=1)


@pytest.mark.parametrize("observed", [False, True])
def test_the_last_picture_shows_the_end_of_the_episode(monkeypatch: pytest.MonkeyPatch, observed: bool) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(render, "save_animation", lambda path, steps, fps: shown.extend(steps))
    env = srl.EnvConfig("test/Clock-v0", render_observation=observed)
    make_runner(env=env).animation_save_gif("unused.gif")
    assert [int(step.frame[0, 0, 0]) for step in shown] == [0, 1, 2, 3, 4]
    assert [step.total_reward for step in shown] == [0, 1, 2, 3, 4]
