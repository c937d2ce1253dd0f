"""Trainer and actor processes on this machine, for `train_mp` and the command line.

Workers are new interpreters (`python -m srl.runner.distribution.worker`), so a script needs no
`__main__` guard. They get the broker's address and password by environment, never as arguments, and stop
when their standard input closes, which also happens when this process is killed.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from srl.base.errors import WorkerError
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.distribution.restarts import Restarts
from srl.runner.distribution.servers import actor_environment
from srl.runner.plugins import PLUGINS_VARIABLE

logger = logging.getLogger("srl")

STOP_S = 10.0


class LocalWorkers:
    """One trainer and `actor_num` actors; a context manager that stops them in order at its end.

    Args:
        log_dir: where each worker's output goes, `trainer.log` and `actor-0.log`.
        allow: modules that workers may import for own envs, algorithms and processors.
        work_dir: where the trainer's memory has its files, so that one that is killed does not take it along.
    """

    def __init__(
        self,
        redis_params: RedisParameters,
        actor_num: int,
        log_dir: Path,
        allow: Sequence[str] = (),
        work_dir: Path | None = None,
    ) -> None:
        self._parameters = redis_params
        self._names = ["trainer", *(f"actor-{slot}" for slot in range(actor_num))]
        self._log_dir = log_dir
        self._allow = allow
        self._work_dir = work_dir
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.restarts = Restarts()

    def __enter__(self) -> "LocalWorkers":
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for name in self._names:
                self._start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        # Actors first: what they flush still reaches the trainer.
        for process in reversed(self._processes.values()):
            assert process.stdin is not None
            process.stdin.close()
        deadline_s = time.monotonic() + STOP_S
        for process in self._processes.values():
            try:
                process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker name."""
        return {name: process.pid for name, process in self._processes.items()}

    def check(self) -> None:
        """Start workers again that have ended by themselves.

        Raises `WorkerError` with the end of its log where one does so again and again.
        """
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            path = self._log_dir / f"{name}.log"
            tail = "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            if not self.restarts.allows(name):
                raise WorkerError(f"{name} ended with exit code {code}, again; the end of {path}:\n{tail}")
            logger.error("%s ended with exit code %d and is started again; the end of %s:\n%s", name, code, path, tail)
            assert process.stdin is not None
            process.stdin.close()
            self._start(name)

    def _start(self, name: str) -> None:
        role = name.partition("-")[0]
        environment = {
            **os.environ,
            **self._parameters.to_env(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            PLUGINS_VARIABLE: ",".join(self._allow),
        }
        command = [sys.executable, "-m", "srl.runner.distribution.worker", role]
        if role == "actor":
            environment |= actor_environment()
        elif self._work_dir is not None:
            command.append(str(self._work_dir))
        with (self._log_dir / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                # A signal to the terminal's group reaches us alone; we stop the workers in order.
                start_new_session=True,
            )
