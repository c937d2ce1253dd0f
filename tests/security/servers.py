"""Real servers on loopback, with users or TLS, for the attacks of this folder."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from srl.runner.distribution import RedisParameters, embedded
from srl.runner.distribution.accounts import ROLES, Role, acl_file, new_password
from srl.runner.distribution.embedded import _unused_port

BINARIES = {"valkey": str(embedded.find_server()), "redis": shutil.which("redis-server")}


@contextlib.contextmanager
def server(binary: str, directory: Path, *lines: str, port_option: str = "port") -> Iterator[int]:
    """Run a server with these lines of configuration; gives its port."""
    port = _unused_port("127.0.0.1")
    configuration = ["bind 127.0.0.1", f"{port_option} {port}", 'save ""', "appendonly no", f"dir {directory}", *lines]
    if port_option != "port":
        configuration.append("port 0")
    with (directory / "server.log").open("ab") as log:
        process = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert process.stdin is not None
        process.stdin.write("\n".join(configuration).encode())
        process.stdin.close()
        try:
            yield port
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def server_with_users(binary: str, directory: Path, *lines: str) -> Iterator[dict[str, RedisParameters]]:
    """Run a server with the users of `srl broker-acl`, and `admin` for the tests; gives how each reaches it.

    Commands that a server refuses to everybody by default are left to the users' rights here.
    """
    passwords: dict[Role, str] = {role: new_password() for role in ROLES}
    admin = f"user admin on >{(everything := new_password())} ~* &* +@all\n"
    (directory / "users.acl").write_text(acl_file(passwords) + admin)
    commands = ("enable-debug-command yes", "enable-module-command yes")
    with server(binary, directory, f"aclfile {directory / 'users.acl'}", *commands, *lines) as port:
        users = {
            name: RedisParameters(host="127.0.0.1", port=port, username=name, password=password)
            for name, password in {**passwords, "admin": everything}.items()
        }
        users["client"].wait_until_reachable(timeout_s=30)
        yield users


@contextlib.contextmanager
def worker(role: str, parameters: RedisParameters, log: Path, **environment: str) -> Iterator["subprocess.Popen[Any]"]:
    """Run a worker process as one of the users; its output goes to a file."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), *sys.path]))
    variables = {**os.environ, **parameters.to_env(), "PYTHONPATH": path, **environment}
    with log.open("ab") as output:
        command = [sys.executable, "-m", "srl.runner.distribution.worker", role]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=variables)
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it stops in order
            try:
                process.wait(20)
            finally:
                process.kill()
