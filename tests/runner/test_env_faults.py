"""Envs that raise, hang, exit and crash, in this process and in processes of their own."""

import dataclasses
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from envs import ShortLives, SignReward

import srl
from srl.base.env import EnvConfig, as_seeds
from srl.base.errors import ConfigError, EnvError
from srl.base.processor import Processor
from srl.runner.env_faults import EnvWatch
from srl.runner.evaluate import Evaluator
from srl.runner.lanes import Lanes, LaneStep, make_lane_groups, make_lanes

LANES = range(3)
SEEDS = as_seeds(0, LANES, 0)


def config_of(processes: bool = True, timeout_s: float = 30.0, **kwargs: Any) -> EnvConfig:
    return EnvConfig("test/Faulty-v0", kwargs, env_processes=processes, env_timeout_s=timeout_s)


def play(lanes: Lanes, steps: int) -> tuple[np.ndarray, list[LaneStep]]:
    first = lanes.reset(SEEDS[: len(lanes)])
    return first, [lanes.step(np.full(len(lanes), number % 3, np.int32)) for number in range(steps)]


def processes_in(directory: Path) -> Iterator[int]:
    for path in directory.iterdir():
        yield int(path.name.partition("-")[2])


def assert_same(steps: Sequence[LaneStep], others: Sequence[LaneStep], lanes: Sequence[int]) -> None:
    for step, other in zip(steps, others, strict=True):
        for name in ("active", "frames", "rewards", "terminated", "truncated", "started", "replaced"):
            np.testing.assert_array_equal(getattr(step, name)[lanes], getattr(other, name)[lanes], name)
        began = np.array(lanes)[step.started[lanes]]
        np.testing.assert_array_equal(step.first_frames[began], other.first_frames[began])


def assert_replaced(kwargs: dict[str, Any], steps: int, processes: bool, timeout_s: float = 30.0) -> tuple[int, str]:
    """Play with a fault in lane 1 and without; return the step of the fault and what is told of it."""
    watch = EnvWatch(timeout_s)
    sound = make_lanes(EnvConfig("test/Script-v0", {"lengths": [4]}), toy.Config(), LANES)
    faulty = make_lanes(
        config_of(processes, timeout_s, victims=[SEEDS[1]], lengths=[4], **kwargs), toy.Config(), LANES, watch=watch
    )
    (first, expected), (faulty_first, played) = play(sound, steps), play(faulty, steps)
    faulty.close()
    np.testing.assert_array_equal(first, faulty_first)
    assert_same(played, expected, [0, 2])
    at = next(n for n, (a, b) in enumerate(zip(played, expected, strict=True)) if not equal(a, b))
    assert_same(played[:at], expected[:at], [1])
    assert played[at].started.tolist()[1]
    np.testing.assert_array_equal(played[at].first_frames[1][1:], [0, 0])
    assert played[at].first_frames[1][0] != first[1][0], "a replacement plays other episodes"
    assert played[-1].frames[1][0] == played[at].first_frames[1][0]
    [told] = watch.faults
    assert told.startswith("test/Faulty-v0 lane 1: ")
    return at, told


def equal(step: LaneStep, other: LaneStep) -> bool:
    same = np.array_equal(step.frames[1], other.frames[1])
    return same and (not step.started[1] or np.array_equal(step.first_frames[1], other.first_frames[1]))


@pytest.mark.parametrize("processors", [[], [ShortLives(2), SignReward()]], ids=["plain", "processed"])
def test_processes_give_exactly_what_lanes_of_one_process_give(processors: list[Processor]) -> None:
    config = toy.Config(processors=processors)
    env = EnvConfig("test/Script-v0", {"longest": 6})
    here = make_lanes(env, config, LANES)
    there = make_lanes(dataclasses.replace(env, env_processes=True), config, LANES)
    assert (here.spaces, here.is_overlapping, there.is_overlapping) == (there.spaces, False, True)
    (first, expected), (other_first, played) = play(here, 60), play(there, 60)
    there.close()
    np.testing.assert_array_equal(first, other_first)
    assert_same(played, expected, LANES)
    for step, other in zip(played, expected, strict=True):
        for name in ("episode_rewards", "episode_lengths", "episode_lanes"):
            assert getattr(step, name) == getattr(other, name)
    assert any(step.terminated.any() for step in played) and any(step.truncated.any() for step in played)


@pytest.mark.parametrize("name", ["uint8", "bool", "scalar", "tuple", "float64"])
def test_processes_send_frames_of_any_kind(name: str) -> None:
    env = EnvConfig("test/Sampled-v0", {"observation": name})
    here = make_lanes(env, toy.Config(), range(1))
    there = make_lanes(dataclasses.replace(env, env_processes=True), toy.Config(), range(1))
    (first, expected), (other_first, played) = play(here, 6), play(there, 6)
    there.close()
    assert other_first.dtype == first.dtype
    np.testing.assert_array_equal(first, other_first)
    assert_same(played, expected, [0])


def test_processes_are_stepped_in_two_groups() -> None:
    groups = make_lane_groups(config_of(), toy.Config(), range(1, 8, 3))
    assert [(list(numbers), len(lanes)) for numbers, lanes in groups] == [([1, 7], 2), ([4], 1)]
    for _, lanes in groups:
        assert lanes.is_overlapping
        lanes.close()


@pytest.mark.parametrize("processes", [False, True])
def test_a_lane_that_raises_is_replaced_and_the_others_do_not_notice(processes: bool) -> None:
    at, told = assert_replaced({"at_step": 7}, 12, processes)
    assert at == 6
    assert re.search(r"(?s)a step raised, at step 3 of its episode 1;.*Traceback.*envs\.py.*the faulty env broke", told)


@pytest.mark.parametrize("processes", [False, True])
def test_a_reset_that_raises_costs_no_step(processes: bool) -> None:
    at, told = assert_replaced({"at_reset": 3}, 12, processes)
    assert at == 7
    assert re.search(r"(?s)a reset raised, at step 0 of its episode 2;.*Traceback.*envs\.py", told)


def test_a_reset_that_hangs_is_replaced_in_time_and_says_where_it_was() -> None:
    before_s = time.monotonic()
    at, told = assert_replaced({"how": "hang", "at_reset": 5}, 20, True, timeout_s=1.0)
    assert 1.0 < time.monotonic() - before_s < 30.0
    assert at == 15
    assert re.search(r"(?s)a reset took longer than env_timeout_s, at step 0 of its episode 4;.*envs\.py.*_break", told)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", r"ended with exit code 139.*\(it left no traceback\)"),
        ("crash", r"killed by SIGSEGV.*envs\.py.*_break"),
    ],
)
def test_a_lane_that_dies_natively_is_replaced(how: str, says: str) -> None:
    at, told = assert_replaced({"how": how, "at_step": 6}, 12, True)
    assert at == 5
    assert re.search(rf"(?s)a step: the process of the env .*{says}", told)


@pytest.mark.parametrize("processes", [False, True])
def test_a_fault_on_every_reset_is_an_error_that_says_so(processes: bool) -> None:
    watch = EnvWatch(30)
    lanes = make_lanes(config_of(processes, at_reset=1, victims=None), toy.Config(), [40], watch=watch)
    with pytest.raises(EnvError, match=r"(?s)lane 40: .*fault 3 in a row.*Traceback.*the faulty env broke"):
        lanes.reset([0])
    assert len(watch.faults) == 2
    lanes.close()


@pytest.mark.parametrize("processes", [False, True])
def test_an_env_that_cannot_be_made_again_is_an_error_that_says_so(processes: bool, tmp_path: Path) -> None:
    watch = EnvWatch(30)
    env = config_of(processes, at_step=2, makes=1, directory=str(tmp_path))
    lanes = make_lanes(env, toy.Config(), [0], watch=watch)
    lanes.reset([0])
    lanes.step(np.zeros(1, np.int32))
    with pytest.raises(EnvError, match=r"(?s)a new env could not be made.*fault 3 in a row.*no more licences"):
        lanes.step(np.zeros(1, np.int32))
    assert "the faulty env broke" in watch.faults[0] and "no more licences" in watch.faults[1]
    lanes.close()


def test_an_env_that_cannot_be_made_at_all_is_an_error_at_once(tmp_path: Path) -> None:
    env = config_of(makes=0, directory=str(tmp_path))
    with pytest.raises(EnvError, match=r"test/Faulty-v0.*OSError: no more licences"):
        make_lanes(env, toy.Config(), range(2), watch=EnvWatch(30))
    assert not any(is_running(pid) for pid in processes_in(tmp_path))


@pytest.mark.parametrize("processes", [False, True])
def test_wrong_data_stays_an_error(processes: bool) -> None:
    env = EnvConfig("test/Broken-v0", {"what": "reward", "value": "inf", "at": 2}, env_processes=processes)
    lanes = make_lanes(env, toy.Config(), [40], watch=EnvWatch(30))
    lanes.reset([0])
    lanes.step(np.zeros(1, np.int32))
    with pytest.raises(EnvError, match="test/Broken-v0 lane 40 returned a reward inf at step 2"):
        lanes.step(np.zeros(1, np.int32))
    lanes.close()


def test_without_a_watch_a_fault_is_raised_at_once() -> None:
    runner = srl.Runner(config_of(processes=False, at_step=30), toy.Config())
    with pytest.raises(RuntimeError, match="the faulty env broke"):
        runner.train(max_train_count=1000, num_envs=2, eval_episodes=0, progress=False)
    runner = srl.Runner(config_of(at_step=30), toy.Config())
    with pytest.raises(EnvError, match=r"(?s)test/Faulty-v0 lane [01]: a step raised.*Traceback.*the faulty env broke"):
        runner.train(max_train_count=1000, num_envs=2, eval_episodes=0, progress=False)


@pytest.mark.parametrize("processes", [False, True])
def test_an_evaluation_plays_an_episode_anew_that_a_fault_ended(processes: bool) -> None:
    watch, config = EnvWatch(30), toy.Config()
    # Each env breaks in its second episode.
    env = config_of(processes, at_step=4, lengths=[3], reward=1.0)
    policy = config.make_policy(make_lanes(EnvConfig("test/Script-v0"), config, [0]).spaces)
    evaluator = Evaluator(env, config, policy, episodes=4, seed=0, lanes=2, watch=watch)
    evaluator.begin(config.make_learner(make_lanes(EnvConfig("test/Script-v0"), config, [0]).spaces, 0).parameters)
    while (rewards := evaluator.step()) is None:
        continue
    evaluator.close()
    assert rewards == [3.0] * 4
    assert len(watch.faults) == 2 and watch.faults[0].startswith("test/Faulty-v0 evaluation lane ")


def test_processes_refuse_an_env_of_the_script_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["envs"].Faulty, "__module__", "__main__")
    with pytest.raises(ConfigError, match=r"move it to a module of its own"):
        make_lanes(config_of(), toy.Config(), [0])


def test_a_call_that_takes_too_long_is_seen_from_another_thread() -> None:
    watch = EnvWatch(0.05)
    lanes = make_lanes(config_of(processes=False, how="hang", at_step=2, lengths=[4]), toy.Config(), [3], watch=watch)
    thread = threading.Thread(target=play, args=(lanes, 2), daemon=True)
    thread.start()
    pause = threading.Event()
    while (told := watch.overdue()) is None:
        assert not pause.wait(0.01)
    assert re.match(r"test/Faulty-v0 lane 3: a step takes longer than env_timeout_s = 0.05 s, at step 2 of its", told)
    assert "in _break" in told


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_close_leaves_no_process_even_of_an_env_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srl.runner.env_process.CLOSE_S", 0.2)
    lanes = make_lanes(config_of(how="hang", at_step=1, directory=str(tmp_path)), toy.Config(), range(2))
    lanes.reset([0, 1])
    lanes.step_async(np.zeros(2, np.int32))
    assert all(is_running(pid) for pid in processes_in(tmp_path))
    lanes.close()
    assert not any(is_running(pid) for pid in processes_in(tmp_path))


PARENT = """
import sys, numpy as np, toy, envs
from srl.base.env import EnvConfig
from srl.runner.lanes import make_lanes
env = EnvConfig("test/Faulty-v0", {"how": "hang", "at_step": 1, "directory": sys.argv[1]}, env_processes=True)
lanes = make_lanes(env, toy.Config(), range(2))
lanes.reset([0, 1])
lanes.step_async(np.zeros(2, np.int32))
print("hangs", flush=True)
lanes.step_wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a hanging process does not notice")
def test_processes_end_with_the_one_that_started_them_even_if_they_hang(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "hangs\n"
        descriptors = [os.pidfd_open(pid) for pid in processes_in(tmp_path)]
        assert len(descriptors) == 2
        parent.send_signal(signal.SIGKILL)
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 20)[0]
        os.close(descriptor)
