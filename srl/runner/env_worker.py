"""The process of one lane's env, started by `ProcessLanes`: makes the env, then does what it is told.

What it is told and what it answers are plain bytes: a kind, msgpack where there are settings, else raw arrays.
"""

import ctypes
import faulthandler
import os
import signal
import struct
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from srl.base.env import EPISODE_STATS, AgentEnv, EnvConfig, make_agent_env
from srl.base.errors import SrlError
from srl.base.spaces import DiscreteActions
from srl.runner.plugins import config_from_dict, load_plugins

MAKE, RESET, STEP = b"M", b"R", b"S"
"""What a lane is told: msgpack settings; a msgpack seed or nil; an action's bytes."""

MADE, FIRST, STEPPED, FAULT, REFUSED = b"m", b"f", b"s", b"x", b"e"
"""What it answers: msgpack spaces; a first frame (also after a step that ended an episode); a step; the traceback of
what the env raised; the kind and text of an error that no other env would mend."""

STEP_HEADER = struct.Struct("<???ddq")
"""Terminated, truncated, whether a true episode ended, reward, that episode's reward and length."""


def main() -> None:
    """Serve the connection that the arguments name until its other end closes."""
    descriptor, trace, parent = map(int, sys.argv[1:])
    for inherited in (descriptor, trace):
        os.set_inheritable(inherited, False)  # what an env starts must not keep them open
    connection = Connection(descriptor)
    if sys.platform == "linux":
        # An env that hangs would not notice that nobody waits for it any more.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the parent process is gone")
    # What a native crash, or whoever kills a hanging env, has to say of where it was.
    faulthandler.enable(trace, all_threads=True)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
    lane = _Lane()
    try:
        while True:
            request = connection.recv_bytes()
            try:
                for reply in lane.replies(request[:1], request[1:]):
                    connection.send_bytes(reply)
            except SrlError as error:
                connection.send_bytes(REFUSED + msgspec.msgpack.encode((type(error).__name__, str(error))))
            except Exception:
                connection.send_bytes(FAULT + traceback.format_exc().encode(errors="replace"))
    except (EOFError, ConnectionError):
        lane.close()


class _Lane:
    def __init__(self) -> None:
        self._env: AgentEnv | None = None
        self._is_discrete = True

    def replies(self, kind: bytes, data: bytes) -> Iterator[bytes]:
        if kind == MAKE:
            yield MADE + msgspec.msgpack.encode(self._make(msgspec.msgpack.decode(data)))
            return
        assert self._env is not None
        if kind == RESET:
            frame, _ = self._env.reset(seed=msgspec.msgpack.decode(data))
            yield FIRST + frame.tobytes()
            return
        action = np.frombuffer(data, np.int32 if self._is_discrete else np.float32)
        frame, reward, terminated, truncated, info = self._env.step(action[0] if self._is_discrete else action)
        episode = info.get(EPISODE_STATS)
        total, length = (0.0, 0) if episode is None else (float(episode["r"]), int(episode["l"]))
        header = STEP_HEADER.pack(terminated, truncated, episode is not None, reward, total, length)
        yield STEPPED + header + frame.tobytes()
        if terminated or truncated:
            frame, _ = self._env.reset()
            yield FIRST + frame.tobytes()

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _make(self, job: dict[str, Any]) -> dict[str, Any]:
        old, self._env = self._env, None
        if old is not None:
            try:
                old.close()
            except Exception:
                traceback.print_exc()  # it failed before, so its replacement must not depend on this
        load_plugins()
        env_config, config = EnvConfig.from_dict(job["env"]), config_from_dict(job["rl"])
        self._env = make_agent_env(env_config, config, lane=job["lane"], training=job["training"])
        self._is_discrete = isinstance(self._env.spaces.action, DiscreteActions)
        return self._env.spaces.to_dict()


if __name__ == "__main__":
    main()
