"""`Runner.train`: a run in one process."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import envs
import numpy as np
import pytest
import toy
from envs import PLAYED

import srl
from srl.base.errors import ConfigError, EnvError
from srl.base.segment import End
from srl.runner.checkpoint import load_checkpoint
from srl.runner.run_config import STOP_CONDITIONS, RunConfig, make_run_config


@pytest.fixture(autouse=True)
def nothing_played() -> Iterator[None]:
    PLAYED.clear()
    yield
    PLAYED.clear()


def make_runner(*, seed: int = 0, config: toy.Config | None = None, **kwargs: Any) -> srl.Runner:
    return srl.Runner(srl.EnvConfig("test/Script-v0", kwargs), config or toy.Config(), seed=seed)


def train(runner: srl.Runner, **arguments: Any) -> srl.Runner:
    runner.train(**{"num_envs": 2, "eval_episodes": 0, "progress": False, **arguments})
    return runner


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name != "memory")


def steps_played() -> int:
    return sum(len(episode.rewards) for episode in PLAYED.values())


def everything(runner: srl.Runner, directory: Path) -> dict[str, Any]:
    """Return all that a checkpoint holds of a runner: parameters, learner, memory's draws and counters."""
    loaded = load_checkpoint(runner.save_checkpoint(directory))
    arrays = {"parameters": loaded.parameters, "learner": loaded.learner_state}
    return {"arrays": json.dumps(arrays, default=lambda array: array.tolist()), "state": loaded.state}


# --- repeatability ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["nothing", "evaluation", "seed", "lanes"])
def test_a_run_is_bit_equal_twice_for_a_seed(other: str, tmp_path: Path) -> None:
    results, played = [], []
    for run in range(2):
        PLAYED.clear()
        change = other if run else ""
        runner = make_runner(seed=1 if change == "seed" else 0)
        train(
            runner,
            max_train_count=301,
            eval_episodes=3 if change == "evaluation" else 0,
            eval_interval_s=0.0,
            num_envs=3 if change == "lanes" else 2,
        )
        results.append(everything(runner, tmp_path / str(run)))
        played.append(dict(PLAYED))
    if other in ("seed", "lanes"):
        assert results[0] != results[1]
        return
    assert results[0] == results[1]
    if other == "evaluation":
        assert len(played[1]) > len(played[0])
    # Evaluation has envs of its own: training plays the very same episodes with and without it.
    assert {key: played[1][key] for key in played[0]} == played[0]


# --- when a run ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 37])
def test_max_train_count_is_exact(count: int) -> None:
    assert train(make_runner(), max_train_count=count).train_count == count


@pytest.mark.parametrize("lanes", [1, 3])
def test_max_steps_is_exact_to_one_step_of_all_lanes(lanes: int) -> None:
    runner = train(make_runner(), max_steps=100, num_envs=lanes)
    assert runner.env_steps == steps_played() == -(-100 // lanes) * lanes


def test_max_episodes_is_exact() -> None:
    train(make_runner(), max_episodes=7, num_envs=1)
    assert sum(episode.end is not End.CUT for episode in PLAYED.values()) == 7
    assert [len(episode.rewards) for episode in PLAYED.values()][7:] == [0]


def test_timeout_ends_a_run() -> None:
    started = time.monotonic()
    train(make_runner(), timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 5


def test_the_first_condition_that_is_reached_ends_a_run() -> None:
    runner = train(make_runner(), max_steps=60, max_train_count=10_000, timeout=1000.0)
    assert runner.env_steps == 60
    runner = train(make_runner(), max_steps=10_000, max_train_count=5)
    assert runner.train_count == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "say when to stop with at least one of max_train_count, max_steps, max_episodes, timeout"),
        ({"max_train_count": -1}, "max_train_count must be positive, not -1"),
        ({"max_steps": 0}, "max_steps must be positive, not 0"),
        ({"max_train_count": 5, "max_episodes": -3}, "max_episodes must be positive"),
        ({"timeout": float("nan")}, "timeout must be a number"),
        ({"max_train_count": 1.5}, "max_train_count takes int"),
        ({"max_steps": 5, "num_envs": 0}, "num_envs must be at least 1"),
        ({"max_steps": 5, "eval_episodes": -1}, "eval_episodes must be at least 0"),
        ({"max_steps": 5, "checkpoint_interval_s": 0}, "checkpoint_interval_s must be above 0"),
    ],
)
def test_a_missing_or_wrong_limit_is_refused_before_anything_starts(arguments: dict[str, Any], message: str) -> None:
    runner = make_runner()
    made = envs.Script.made
    with pytest.raises(ConfigError, match=message):
        runner.train(**arguments)
    assert envs.Script.made == made


def test_a_config_that_was_spoiled_later_is_refused() -> None:
    runner = make_runner()
    runner.config.memory.warmup_size = 5000  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"memory\.warmup_size \(5000\) is above memory\.capacity"):
        train(runner, max_steps=10)


# --- training again ---------------------------------------------------------------------------------------


def test_training_again_goes_on() -> None:
    runner = train(make_runner(), max_train_count=100)
    before, steps = runner.parameters, runner.env_steps
    train(runner, max_train_count=20)
    assert runner.train_count == 120
    assert not np.array_equal(runner.parameters["bias"], before["bias"])
    # The memory is warm already, so an update comes with every step.
    assert 20 <= runner.env_steps - steps <= 28


@pytest.mark.parametrize("limit", ["max_train_count", "max_steps"])
def test_training_in_parts_is_training_at_once(limit: str, tmp_path: Path) -> None:
    config = toy.Config(samples_per_insert=20.0)  # so that more is due than one dispatch when a part ends
    parts, whole = make_runner(config=config), make_runner(config=config)
    for count in (4, 80, 36):
        train(parts, **{limit: count})
    played = dict(PLAYED)
    PLAYED.clear()
    train(whole, **{limit: 120})
    assert parts.env_steps == whole.env_steps
    assert everything(parts, tmp_path / "parts") == everything(whole, tmp_path / "whole")
    assert {key: played[key] for key in PLAYED} == PLAYED


def test_a_run_that_broke_plays_other_episodes_the_next_time() -> None:
    runner = make_runner(lengths=[1000])
    runner.env_config.kwargs["fail_at"] = 60
    with pytest.raises(RuntimeError, match="broke"):
        train(runner, max_steps=1000)
    del runner.env_config.kwargs["fail_at"]
    identities = {identity for identity, _ in PLAYED}
    train(runner, max_steps=10)
    assert len({identity for identity, _ in PLAYED} - identities) == 2


def test_unfinished_episodes_go_on_and_nothing_of_them_is_lost(tmp_path: Path) -> None:
    runner = train(make_runner(lengths=[1000]), max_steps=100, num_envs=1)
    train(runner, max_steps=100, num_envs=1)
    assert sum(bool(episode.actions) for episode in PLAYED.values()) == 1
    # What is in no segment yet is stored when other lanes take over.
    history = tmp_path / "history"
    train(runner, max_steps=10, num_envs=2, history_save_dir=history)
    assert srl.Runner.load_history(history).rows[-1]["memory"] == 200


# --- the ratio of updates and steps -----------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "per_step"), [(None, 1.0), (2.0, 2.0 / 8), (32.0, 4.0)])
def test_samples_per_insert_is_held(ratio: float | None, per_step: float, tmp_path: Path) -> None:
    runner = train(make_runner(config=toy.Config(samples_per_insert=ratio)), max_steps=400)
    limiter = everything(runner, tmp_path)["state"]["limiter"]
    assert limiter["inserted"] == 400
    assert limiter["updated"] == runner.train_count
    assert 50 <= limiter["warm_at"] <= 50 + 8 * 2
    due = (400 - limiter["warm_at"]) * per_step
    # What is due after the last step, and what is less than a dispatch, is left to the next call.
    assert due - 2 * per_step - 4 <= runner.train_count <= due


# --- what it leaves ---------------------------------------------------------------------------------------


def test_history_rows(tmp_path: Path) -> None:
    train(
        make_runner(lengths=[4], reward=2.0),
        max_train_count=400,
        eval_episodes=2,
        eval_interval_s=0.0,
        history_save_dir=tmp_path,
    )
    rows = srl.Runner.load_history(tmp_path).rows
    evaluations = [row for row in rows if row["role"] == "eval"]
    assert len(evaluations) > 5
    assert {row["eval_reward0"] for row in evaluations} == {8.0}
    assert evaluations[0]["train"] == 0
    trainer_rows = [row for row in rows if row["role"] == "trainer"]
    last = trainer_rows[-1]
    assert last["train"] == 400
    # What was measured since the row before; just after one there may be nothing.
    assert all(row["loss"] > 0 for row in trainer_rows if "loss" in row)
    assert {row["reward0"] for row in trainer_rows if "reward0" in row} == {8.0}
    assert {"loss", "reward0"} <= {key for row in trainer_rows for key in row}
    assert last["step"] - last["memory"] in (0, 2, 4, 6)  # an episode of 4 steps is open in two lanes
    counts = [row["train"] for row in trainer_rows]
    assert counts == sorted(counts)


def test_history_is_appended_when_training_goes_on(tmp_path: Path) -> None:
    runner = train(make_runner(), max_train_count=20, history_save_dir=tmp_path)
    first = srl.Runner.load_history(tmp_path).rows
    train(runner, max_train_count=20, history_save_dir=tmp_path)
    rows = srl.Runner.load_history(tmp_path).rows
    assert rows[: len(first)] == first
    assert rows[-1]["train"] == 40


def test_checkpoints_are_kept_while_it_trains_and_at_the_end(tmp_path: Path) -> None:
    runner = train(make_runner(), max_train_count=18, checkpoint_save_dir=tmp_path, checkpoint_interval_s=1e-9)
    names = checkpoints(tmp_path)
    assert names == [4, 8, 12, 16, 18]
    assert load_checkpoint(tmp_path).state["env_steps"] == runner.env_steps
    train(make_runner(), max_train_count=9, checkpoint_save_dir=tmp_path / "one")
    assert checkpoints(tmp_path / "one") == [9]


def test_functions_without_a_name_are_fine_where_nothing_is_saved(tmp_path: Path) -> None:
    env = srl.EnvConfig("test/Script-v0", gym_wrappers=[lambda env: env])
    runner = srl.Runner(env, toy.Config(), seed=0)
    train(runner, max_steps=10)
    made = envs.Script.made
    with pytest.raises(ConfigError, match="has no name that a worker could import"):
        train(runner, max_steps=10, checkpoint_save_dir=tmp_path)
    assert (envs.Script.made, runner.env_steps) == (made, 10)


# --- when something breaks --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_what_is_not_finite_is_raised_with_lane_and_step(what: str) -> None:
    env = srl.EnvConfig("test/Broken-v0", {"what": what, "value": np.inf, "at": 100})
    runner = srl.Runner(env, toy.Config(), seed=0)
    with pytest.raises(EnvError, match=rf"test/Broken-v0 lane 0 returned a {what}.* at step 100 of its episode 0"):
        train(runner, max_steps=1000)
    assert runner.train_count > 0
    assert all(np.isfinite(array).all() for array in runner.parameters.values())


def test_an_error_of_the_env_is_raised_as_it_is_and_everything_is_closed(tmp_path: Path) -> None:
    runner = make_runner(fail_at=120)
    made, closed = envs.Script.made, envs.Script.closed
    with pytest.raises(RuntimeError, match="the script broke"):
        train(runner, max_steps=1000, eval_episodes=3, eval_interval_s=1e6, history_save_dir=tmp_path)
    assert envs.Script.made == made + 5
    assert envs.Script.closed == closed + 5
    assert srl.Runner.load_history(tmp_path).rows


PROGRAM = """
import sys
import toy, envs, srl
update = toy.Learner.update
def announce(self, batches):
    toy.Learner.update = update
    print("learning", flush=True)
    return update(self, batches)
toy.Learner.update = announce
runner = srl.Runner("test/Script-v0", toy.Config(), seed=0)
runner.train(max_steps=10**12, eval_episodes=0, checkpoint_save_dir=sys.argv[1], checkpoint_interval_s=1e9)
"""


@pytest.mark.parametrize(("number", "codes"), [(signal.SIGTERM, {143}), (signal.SIGINT, {130, -signal.SIGINT})])
def test_a_signal_saves_a_checkpoint_and_ends_the_program_as_it_would_have(
    number: signal.Signals, codes: set[int], tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(
        arguments,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "learning\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in codes, errors
    (count,) = checkpoints(tmp_path)
    runner = make_runner()
    runner.load_checkpoint(tmp_path)
    assert runner.train_count == count > 0
    train(runner, max_train_count=5)
    assert runner.train_count == count + 5


# --- every setting of a run -------------------------------------------------------------------------------


def _finished_by(name: str, value: Any) -> tuple[int, int]:
    runner = train(make_runner(), **{"max_steps": 2000, name: value})
    return runner.env_steps, runner.train_count


def _evaluations(tmp_path: Path, **arguments: Any) -> list[float]:
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    runner = make_runner(longest=20)
    train(
        runner,
        **{"max_steps": 400, "eval_episodes": 2, "eval_interval_s": 0.0, "history_save_dir": directory, **arguments},
    )
    rows = srl.Runner.load_history(directory).rows
    return [row["eval_reward0"] for row in rows if row["role"] == "eval"]


def _lanes(count: int) -> int:
    train(make_runner(), max_steps=20, num_envs=count)
    return len({identity for identity, _ in PLAYED})


def _checkpoints(tmp_path: Path, interval_s: float) -> int:
    directory = tmp_path / str(interval_s)
    train(make_runner(), max_train_count=12, checkpoint_save_dir=directory, checkpoint_interval_s=interval_s)
    return len(checkpoints(directory))


def _parameters(seed: int) -> list[float]:
    bias: np.ndarray = train(make_runner(seed=seed), max_train_count=3).parameters["bias"]
    return bias.tolist()


EFFECTS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "max_train_count": lambda _: (_finished_by("max_train_count", 3), _finished_by("max_train_count", 4)),
    "max_steps": lambda _: (_finished_by("max_steps", 30), _finished_by("max_steps", 40)),
    "max_episodes": lambda _: (_finished_by("max_episodes", 3), _finished_by("max_episodes", 30)),
    "timeout": lambda _: (_finished_by("timeout", 1e-9), _finished_by("timeout", 1000.0)),
    "seed": lambda _: (_parameters(0), _parameters(1)),
    "num_envs": lambda _: (_lanes(1), _lanes(3)),
    "eval_episodes": lambda path: (_evaluations(path)[0], _evaluations(path, eval_episodes=5)[0]),
    "eval_interval_s": lambda path: (
        len(_evaluations(path)) > 1,
        len(_evaluations(path, eval_interval_s=1e6)) > 1,
    ),
    "checkpoint_interval_s": lambda path: (_checkpoints(path, 1e-9), _checkpoints(path, 1e6)),
}
DISTRIBUTED = {
    "actor_num",
    "parameter_send_interval_s",
    "checkpoint_interval_updates",
    "lockstep",
}  # no use in one process


@pytest.mark.parametrize("name", EFFECTS)
def test_every_setting_of_a_run_changes_something(name: str, tmp_path: Path) -> None:
    first, second = EFFECTS[name](tmp_path)
    assert first != second


def test_no_setting_of_a_run_is_forgotten() -> None:
    assert set(RunConfig.documentation()) == set(EFFECTS) | DISTRIBUTED
    assert all(RunConfig.documentation().values())


def test_run_settings_survive_json() -> None:
    config = make_run_config(
        max_train_count=1,
        max_steps=2,
        max_episodes=3,
        timeout=4.5,
        seed=5,
        actor_num=6,
        num_envs=7,
        eval_episodes=9,
        eval_interval_s=0.5,
        checkpoint_interval_s=0.25,
        checkpoint_interval_updates=10,
        lockstep=True,
        parameter_send_interval_s=0.125,
    )
    default = RunConfig()
    assert all(getattr(config, field.name) != getattr(default, field.name) for field in dataclasses.fields(config))
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", STOP_CONDITIONS)
def test_each_stop_condition_is_enough(name: str) -> None:
    assert getattr(make_run_config(**{name: 1}), name) == 1
