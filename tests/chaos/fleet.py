"""A whole run in real processes, on a server of its own, with whatever happens to them.

`Fleet` starts workers and clients, kills and pauses them, and accounts for every step at the end.
"""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numbered_env import steps_taken
from waiting import until

from srl.runner.distribution import RedisParameters, embedded
from srl.runner.distribution.broker import Broker
from srl.runner.distribution.embedded import _unused_port
from srl.runner.distribution.outages import once

CLIENT = """
import sys
from srl.runner.distribution import RedisParameters, TaskManager
from srl.utils.common import logger_print
logger_print()
status = TaskManager(RedisParameters()).train_wait(checkpoint_save_dir=sys.argv[1], history_save_dir=sys.argv[2])
print("the client saw:", status.state, status.train_count)
"""


class Server:
    """A Valkey server on a loopback port; with `append_only` it keeps its data on disk."""

    def __init__(self, directory: Path, *, append_only: bool) -> None:
        directory.mkdir()
        self._directory, self._append_only = directory, append_only
        self._password = secrets.token_hex(8)
        self.port = _unused_port("127.0.0.1")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def parameters(self) -> RedisParameters:
        """How to reach it."""
        return RedisParameters(host="127.0.0.1", port=self.port, password=self._password)

    def start(self) -> None:
        """Start it; without an append-only file it is empty."""
        persistence = "appendonly yes\nappendfsync everysec" if self._append_only else 'appendonly no\nsave ""'
        configuration = (
            f"bind 127.0.0.1\nport {self.port}\nrequirepass {self._password}\ndir {self._directory}\n"
            f"maxmemory-policy noeviction\nauto-aof-rewrite-min-size 8mb\n{persistence}\n"
        )
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(embedded.find_server()), "-"], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert self.process.stdin is not None
        self.process.stdin.write(configuration.encode())
        self.process.stdin.close()
        self.parameters.wait_until_reachable(None)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self, seconds: float) -> None:
        """Let it hang for a while."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)  # the fault itself takes this long
        self.process.send_signal(signal.SIGCONT)


class Process:
    """A worker or a client that is started again as Kubernetes would."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._command, self._environment, self.log = command, environment, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it (again); its output is appended to its log."""
        with self.log.open("ab") as log:
            self._started_at = log.tell()
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment
            )

    @property
    def is_running(self) -> bool:
        """Whether it has neither ended nor been killed."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: int, timeout_s: float = 30.0) -> int:
        """Send a signal and return the exit code."""
        self.signal(number)
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """Stop it in order, as Kubernetes does; it must end well within the 30 s it is given there."""
        code = self.end(signal.SIGTERM, 10.0)
        # One that was only just started has not said anything yet, and no handler to stop it by.
        was_up = self.log.stat().st_size > self._started_at
        assert code == 0 or (code == -signal.SIGTERM and not was_up), self.output[-2000:]

    @property
    def output(self) -> str:
        """All it has said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Fleet:
    """Server, trainer, actors and client of one run; a context manager that leaves nothing behind.

    Args:
        volume: whether the trainer's memory has files that outlive it.
        address: of the broker as workers see it, where something is in between.
    """

    def __init__(
        self,
        directory: Path,
        *,
        actors: int,
        append_only: bool = False,
        volume: bool = True,
        address: RedisParameters | None = None,
        server: Server | None = None,
    ) -> None:
        self.directory = directory
        for name in ("steps", "logs"):
            (directory / name).mkdir()
        self.server = server or Server(directory / "server", append_only=append_only)
        if server is None:
            self.server.start()
        self._address = address or self.server.parameters
        self._volume = directory / "volume"
        trainer = ["-m", "srl.runner.distribution.worker", "trainer", *([str(self._volume)] if volume else [])]
        self.trainer = self._process("trainer", trainer)
        self.actors = [
            self._process(f"actor-{i}", ["-m", "srl.runner.distribution.worker", "actor"]) for i in range(actors)
        ]
        self.client = self._process(
            "client", ["-c", CLIENT, str(directory / "checkpoints"), str(directory / "history")]
        )
        self.broker = Broker(self.server.parameters)
        self.kills = 0

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if process.is_running:
                process.signal(signal.SIGCONT)
                process.end(signal.SIGKILL)
        self.broker.close()
        self.server.kill()

    @property
    def processes(self) -> list[Process]:
        """All but the server."""
        return [self.client, *self.actors, self.trainer]

    def start(self) -> None:
        """Start every process that does not run."""
        for process in self.processes:
            if not process.is_running:
                process.start()

    def kill(self, process: Process) -> None:
        """Kill with SIGKILL."""
        if process.is_running:
            process.end(signal.SIGKILL)
            self.kills += 1

    @property
    def progress(self) -> dict[str, Any]:
        """The counters at the broker: env steps and what else was committed; empty while it has none."""
        tasks = once(self.broker.tasks, self.broker)
        fields = once(lambda: self.broker.task_fields(tasks[-1]), self.broker) if tasks else {}
        return {"train_count": int(fields["train_count"]), **json.loads(fields["progress"])} if fields else {}

    def wait_for_steps(self, steps: int, timeout_s: float = 60.0) -> None:
        """Wait until so many more env steps were inserted."""
        seen = until(lambda: self.progress.get("env_steps"), timeout_s, "the first step")
        until(lambda: self.progress.get("env_steps", 0) >= seen + steps, timeout_s, f"{steps} more steps")

    def settle(self) -> None:
        """Stop actors and then the trainer in order, so that all that was played is inserted."""
        for actor in self.actors:
            if actor.is_running:
                actor.stop()
        if not self.trainer.is_running:
            self.trainer.start()
        task = self.broker.tasks()[-1]
        until(lambda: self.broker.redis.xlen(f"srl:{task}:experience") == 0, what="an empty backlog")
        self.trainer.stop()

    def inserted(self) -> dict[int, np.ndarray]:
        """Return by env number the steps whose transition is in the memory's files, in the order they lie there."""
        [folder] = [path for path in self._volume.iterdir() if path.is_dir()]
        layout = json.loads((folder / "layout.json").read_text())

        def array(name: str) -> np.ndarray:
            shape, dtype = layout[name]
            return np.fromfile(folder / f"{name}.bin", dtype).reshape(shape)

        starts, (oldest, newest, *_) = array("segment_starts"), array("counters")
        assert oldest == 0, "the memory is too small for this test"
        end = starts[newest % len(starts)]
        frames = array("frames")[:end].astype(np.int64)
        frames = frames[array("priorities")[:end] >= 0]
        return {int(number): frames[frames[:, 0] == number, 1] for number in np.unique(frames[:, 0])}

    def check_every_step(self, *, killed_actors: int, losses: bool = False) -> tuple[int, int]:
        """Check that no step was inserted twice and none is missing but the last ones of killed actors.

        Args:
            losses: whether messages may have been lost with the server's data; then they must have been counted.

        Returns steps taken and steps inserted.
        """
        taken, inserted = steps_taken(self.directory / "steps"), self.inserted()
        assert inserted.keys() <= taken.keys()
        short = holes = 0
        for number, steps in taken.items():
            found = inserted.get(number, np.zeros(0, np.int64))
            assert len(np.unique(found)) == len(found), f"env {number}: steps were inserted twice"
            assert len(found) == 0 or found.max() < steps
            holes += (found.max(initial=-1) + 1) - len(found)
            short += len(found) < steps
        total, kept = sum(taken.values()), sum(len(found) for found in inserted.values())
        lost = self.progress["messages_lost"]
        assert losses or lost == 0
        assert holes <= lost * MOST_STEPS_IN_A_MESSAGE, "steps are missing that were not counted as lost"
        if not killed_actors:
            assert total - kept <= lost * MOST_STEPS_IN_A_MESSAGE, "steps are missing that were not counted as lost"
        if not losses:
            # Each kill takes what an actor had not sent yet: the last steps of each of its lanes.
            assert short <= killed_actors * LANES
        return total, kept

    def _process(self, name: str, arguments: list[str]) -> Process:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]))
        environment = {
            **os.environ,
            **self._address.to_env(),
            "PYTHONPATH": path,
            "SRL_ALLOW_PLUGINS": "toy,numbered_env",
        }
        return Process([sys.executable, *arguments], environment, self.directory / "logs" / f"{name}.log")


LANES = 4
MOST_STEPS_IN_A_MESSAGE = 128 + LANES * 16


def seeded() -> random.Random:
    """Return the suite's randomness; its seed is printed, and set by `SRL_CHAOS_SEED`."""
    seed = int(os.environ.get("SRL_CHAOS_SEED") or secrets.randbelow(10**6))
    print(f"SRL_CHAOS_SEED={seed}")
    return random.Random(seed)
