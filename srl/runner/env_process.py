"""Lanes whose envs have a process of their own each, so that a hang or a native crash costs one lane alone.

`make_lanes` takes them where `EnvConfig.env_processes` says so. The processes are new interpreters, never forks, and
end when the one that started them does. Envs are stepped at the same time, each by its process.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from srl.base.algorithm import RLConfig
from srl.base.env import ALLOWED_MODULES, EPISODE_STATS, EnvConfig
from srl.base.errors import ConfigError, EnvError, MissingExtraError, SpaceError, SrlError
from srl.base.spaces import DiscreteActions, Spaces
from srl.runner.env_faults import REPLACED, EnvWatch, LaneRecord, check_same
from srl.runner.env_worker import FAULT, MAKE, REFUSED, RESET, STEP, STEP_HEADER
from srl.runner.plugins import PLUGINS_VARIABLE, needed_modules

ONE_THREAD = {
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OPENCV_FOR_THREADS_NUM": "1",
}
"""Environment variables that keep numeric libraries to one thread, for processes of which there are many."""

START_S = 60.0
"""How much longer than a step the making of an env may take: a new interpreter, its modules, a simulator."""
CLOSE_S = 5.0
"""How long envs may take to close before their processes are killed."""
STACK_S = 1.0
"""How long a hanging process may take to begin to say where it is."""
PAUSE_S = 0.1
"""How long it is silent when it has said all."""

_REFUSALS = {kind.__name__: kind for kind in (ConfigError, EnvError, MissingExtraError, SpaceError)}


class ProcessLanes(VectorEnv[Any, Any, Any]):
    """Agent envs in processes; resets in the step that ends an episode.

    Args:
        lanes: their numbers. training: as for `make_agent_env`.
        watch: takes the faults of envs, which are replaced then; without one a fault is an `EnvError`.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        config: RLConfig,
        lanes: Sequence[int],
        *,
        training: bool,
        watch: EnvWatch | None,
    ) -> None:
        self.num_envs = len(lanes)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self._timeout_s = env_config.env_timeout_s
        kind = "lane" if training else "evaluation lane"
        self._records = [LaneRecord(f"{env_config.name} {kind} {lane}", lane, watch) for lane in lanes]
        settings = {"env": env_config.to_dict(), "rl": config.to_dict(), "training": training}
        self._jobs = [MAKE + msgspec.msgpack.encode({**settings, "lane": lane}) for lane in lanes]
        self._environment = {
            **os.environ,
            **ONE_THREAD,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            PLUGINS_VARIABLE: ",".join(sorted({*ALLOWED_MODULES, *needed_modules(env_config, config)})),
        }
        self._processes: list[_EnvProcess] = []
        try:
            for job in self._jobs:
                self._processes.append(_EnvProcess(self._environment, job))
            made = [self._made(lane, self._make_deadline_s()) for lane in range(self.num_envs)]
        except _FaultError as fault:
            self.close_extras()
            raise EnvError(f"env {env_config.name!r} could not be made: {fault.what}:\n{fault.details}") from fault
        except BaseException:
            self.close_extras()
            raise
        self.spaces = made[0]
        frame = self.spaces.observation
        self._action_type = np.int32 if isinstance(self.spaces.action, DiscreteActions) else np.float32
        self._frames = np.zeros((self.num_envs, *frame.shape), frame.dtype)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode in every lane, `seed` is one for each; a faulty env is replaced."""
        seeds = [None] * self.num_envs if seed is None else list(seed)
        for lane, value in enumerate(seeds):
            self._records[lane].resets(value)
            self._processes[lane].send(RESET + msgspec.msgpack.encode(value))
        self._replace(self._first_frames(range(self.num_envs), "a reset"))
        return self._frames.copy(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all envs with `actions[B, ...]`."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: np.ndarray) -> None:
        """Let all envs step with `actions[B, ...]`."""
        for process, action in zip(self._processes, np.asarray(actions, self._action_type), strict=True):
            process.send(STEP + action.tobytes())
        self._deadline_s = time.monotonic() + self._timeout_s

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Wait for all envs and return what `step` returns; replaced ones are marked in the info."""
        count = self.num_envs
        rewards, totals, lengths = np.zeros(count), np.zeros(count), np.zeros(count, np.int64)
        terminated, truncated, finished, replaced = np.zeros((4, count), np.bool_)
        faults: dict[int, _FaultError] = {}
        for lane in range(count):
            try:
                data = self._answer(lane, self._deadline_s, "a step")
            except _FaultError as fault:
                faults[lane], replaced[lane] = fault, True
                continue
            terminated[lane], truncated[lane], finished[lane], rewards[lane], totals[lane], lengths[lane] = (
                STEP_HEADER.unpack_from(data)
            )
            self._take_frame(lane, data[STEP_HEADER.size :])
            self._records[lane].stepped(bool(terminated[lane] or truncated[lane]))
        ended = terminated | truncated
        info: dict[str, Any] = {EPISODE_STATS: {"r": totals, "l": lengths}, f"_{EPISODE_STATS}": finished}
        if ended.any():
            info |= {"final_obs": self._frames.copy(), "final_info": dict(info)}
            faults |= self._first_frames(np.flatnonzero(ended).tolist(), "a reset")
        if faults:
            self._replace(faults)
            info[REPLACED] = replaced
        return self._frames.copy(), rewards, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        """Let all envs close, and kill the processes that take too long for it."""
        for process in self._processes:
            process.hang_up()
        deadline_s = time.monotonic() + CLOSE_S
        for process in self._processes:
            process.end(max(0.0, deadline_s - time.monotonic()))

    def _replace(self, faults: Mapping[int, "_FaultError"]) -> None:
        """Put new envs in the place of faulty ones, all at the same time, until each has a first frame."""
        while faults:
            seeds = {lane: self._records[lane].failed(fault.what, fault.details) for lane, fault in faults.items()}
            for lane in faults:
                if self._processes[lane].is_lost:
                    self._processes[lane] = _EnvProcess(self._environment, self._jobs[lane])
                else:
                    self._processes[lane].send(self._jobs[lane])
            again: dict[int, _FaultError] = {}
            deadline_s = self._make_deadline_s()
            for lane, seed in seeds.items():
                try:
                    spaces = self._made(lane, deadline_s)
                except _FaultError as fault:
                    again[lane] = fault
                except SrlError as error:
                    again[lane] = _FaultError("a new env could not be made", str(error))
                else:
                    check_same(self._records[lane], self.spaces, spaces)
                    self._processes[lane].send(RESET + msgspec.msgpack.encode(seed))
            again |= self._first_frames([lane for lane in faults if lane not in again], "the first reset of a new env")
            faults = again

    def _made(self, lane: int, deadline_s: float) -> Spaces:
        data = self._answer(lane, deadline_s, "the making of an env")
        return Spaces.from_dict(msgspec.msgpack.decode(data))

    def _first_frames(self, lanes: Sequence[int], what: str) -> dict[int, "_FaultError"]:
        """Take first frames of lanes; returns what went wrong in those that have none."""
        faults: dict[int, _FaultError] = {}
        deadline_s = time.monotonic() + self._timeout_s
        for lane in lanes:
            try:
                self._take_frame(lane, self._answer(lane, deadline_s, what))
            except _FaultError as fault:
                faults[lane] = fault
            else:
                self._records[lane].began()
        return faults

    def _take_frame(self, lane: int, data: bytes) -> None:
        self._frames[lane] = np.frombuffer(data, self._frames.dtype).reshape(self._frames.shape[1:])

    def _answer(self, lane: int, deadline_s: float, what: str) -> bytes:
        """Return an answer's bytes; raises `_FaultError` for a fault, and what the lane's process refused."""
        data = self._processes[lane].receive(deadline_s, what)
        kind, data = data[:1], data[1:]
        if kind == FAULT:
            raise _FaultError(f"{what} raised", data.decode())
        if kind == REFUSED:
            name, text = msgspec.msgpack.decode(data)
            raise _REFUSALS.get(name, SrlError)(text)
        return data

    def _make_deadline_s(self) -> float:
        return time.monotonic() + START_S + self._timeout_s


class _FaultError(Exception):
    """An env raised, hangs or died."""

    def __init__(self, what: str, details: str) -> None:
        super().__init__(what)
        self.what, self.details = what, details


class _EnvProcess:
    """One process and the connection to it; it begins with `job`."""

    def __init__(self, environment: Mapping[str, str], job: bytes) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._trace, their_trace = multiprocessing.Pipe(duplex=False)
        descriptors = theirs.fileno(), their_trace.fileno()
        with theirs, their_trace:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "srl.runner.env_worker", *map(str, descriptors), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=descriptors,
                # A group of its own: what an env starts can be ended with it, and a terminal's Ctrl-C is ours alone.
                start_new_session=True,
            )
        self.is_lost = False
        """Whether the process has been killed or has ended by itself."""
        self.send(job)

    def send(self, data: bytes) -> None:
        """Tell the process something; whether it has ended is seen when an answer is awaited."""
        try:
            self._connection.send_bytes(data)
        except ConnectionError:
            return

    def receive(self, deadline_s: float, what: str) -> bytes:
        """Return the next answer; raises `_FaultError` where none comes in time, after which no process is left."""
        try:
            if self._connection.poll(max(0.0, deadline_s - time.monotonic())):
                return self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            details = self._read_trace(0.0) or "(it left no traceback)\n"
            code = self.kill()
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise _FaultError(f"{what}: the process of the env {end}", details) from None
        details = self._stack()
        self.kill()
        raise _FaultError(f"{what} took longer than env_timeout_s", details)

    def hang_up(self) -> None:
        """Close the connection, upon which the process closes its env and ends."""
        self._connection.close()

    def end(self, timeout_s: float) -> None:
        """Wait for the end of the process after `hang_up`, and kill it where it takes too long."""
        if not self.is_lost:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
            self.kill()

    def kill(self) -> int:
        """Kill the process and what it has started; returns its exit code, its own where it had ended."""
        self.is_lost = True
        with contextlib.suppress(ProcessLookupError):  # where nothing of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._connection.close()
        self._trace.close()
        return self._process.wait()

    def _stack(self) -> str:
        """Return where a hanging process is, in all its threads; faulthandler needs no help of the interpreter."""
        self._process.send_signal(signal.SIGUSR1)
        return self._read_trace(STACK_S) or "(it did not say where it is)\n"

    def _read_trace(self, timeout_s: float) -> str:
        """Return what faulthandler has written, until it pauses; `timeout_s` is for its first words."""
        data = b""
        while self._trace.poll(timeout_s) and (more := os.read(self._trace.fileno(), 1 << 16)):
            data, timeout_s = data + more, PAUSE_S
        return data.decode(errors="replace")
