import dataclasses
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis

from srl.base.errors import BrokerError, ConfigError, MissingExtraError
from srl.runner.distribution import embedded
from srl.runner.distribution.embedded import EmbeddedBroker

PARENT = """
import sys
from srl.runner.distribution.embedded import EmbeddedBroker
broker = EmbeddedBroker()
broker.start()
print(broker.pid, broker.parameters.unix_socket, flush=True)
sys.stdin.readline()
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(params=[None, 0], ids=["unix", "tcp"])
def port(request):
    return request.param


class Process:
    """Watches a process by a descriptor, so that a reused process id cannot deceive."""

    def __init__(self, pid: int):
        self.folder = Path("/proc", str(pid))
        self._descriptor = os.pidfd_open(pid)

    def __del__(self):
        os.close(self._descriptor)

    def has_ended(self, timeout_s: float = 0) -> bool:
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])


def start_parent() -> tuple[subprocess.Popen, Process, Path]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid, path = parent.stdout.readline().split()
    return parent, Process(int(pid)), Path(path)


def test_it_serves_and_cleans_up(port):
    broker = EmbeddedBroker(port=port)
    with broker:
        server = Process(broker.pid)
        assert not server.has_ended()
        with broker.parameters.connect() as client:
            client.set("key", b"value")
            assert client.get("key") == b"value"
            assert client.config_get("save") == {"save": ""}
            folder = Path(client.config_get("dir")["dir"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
    assert server.has_ended()
    assert not folder.exists()
    with pytest.raises(BrokerError, match="not running"):
        _ = broker.pid
    broker.stop()  # again does nothing


def test_a_unix_socket_is_all_that_listens():
    with EmbeddedBroker() as broker:
        with broker.parameters.connect() as client:
            assert client.config_get("port") == {"port": "0"}
        assert Path(broker.parameters.unix_socket).is_socket()
    assert not Path(broker.parameters.unix_socket).exists()


def test_tcp_listens_on_loopback_alone():
    with EmbeddedBroker(port=0) as broker, broker.parameters.connect() as client:
        assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_it_wants_the_password(port):
    with EmbeddedBroker(port=port) as broker, EmbeddedBroker(port=port) as other:
        assert broker.parameters.password != other.parameters.password
        for password in (None, other.parameters.password):
            wrong = dataclasses.replace(broker.parameters, password=password)
            with wrong.connect() as client, pytest.raises(redis.AuthenticationError):
                client.ping()


def test_the_password_is_in_no_arguments_environment_or_file(port, monkeypatch):
    monkeypatch.setenv("SRL_REDIS_PASSWORD", "of the user")
    with EmbeddedBroker(port=port) as broker:
        password = broker.parameters.password
        process = Path("/proc", str(broker.pid))
        shown = [(process / name).read_text() for name in ("cmdline", "environ")]
        assert all(shown)  # the looks above would see something
        with broker.parameters.connect() as client:
            folder = Path(client.config_get("dir")["dir"])
        shown += [path.read_text() for path in folder.iterdir() if path.is_file()]
        assert len(password) >= 32
        assert not [text for text in shown if password in text or "of the user" in text]
        assert password not in repr(broker.parameters)


def test_a_restart_keeps_the_address_and_starts_empty(port):
    with EmbeddedBroker(port=port) as broker:
        before, first = broker.parameters, broker.pid
        with before.connect() as client:
            client.set("key", "value")
            broker.stop()
            with pytest.raises(redis.ConnectionError):
                client.ping()
            broker.start()
            assert broker.parameters == before and broker.pid != first
            assert client.get("key") is None


def test_starting_twice_keeps_the_server():
    with EmbeddedBroker() as broker:
        first = broker.pid
        broker.start()
        assert broker.pid == first


def test_it_outlives_the_thread_that_started_it():
    broker = EmbeddedBroker()
    thread = threading.Thread(target=broker.start)
    thread.start()
    thread.join()
    try:
        with broker.parameters.connect() as client:
            assert not Process(broker.pid).has_ended(0.2)
            assert client.ping()
    finally:
        broker.stop()


def test_a_killed_parent_leaves_no_server():
    parent, server, path = start_parent()
    assert not server.has_ended()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    try:
        assert server.has_ended(10)
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


def test_a_parent_that_forgets_to_stop_leaves_nothing():
    parent, server, path = start_parent()
    assert path.is_socket()
    parent.communicate("\n", timeout=20)
    assert parent.returncode == 0
    assert server.has_ended(10)
    assert not path.parent.exists()


def test_a_server_that_dies_shows_its_log(monkeypatch, tmp_path):
    broken = tmp_path / "server"
    broken.write_text("#!/bin/sh\necho 'cannot do this' >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(embedded, "find_server", lambda: broken)
    broker = EmbeddedBroker()
    with pytest.raises(BrokerError, match=r"(?s)did not start.*cannot do this"):
        broker.start()
    assert not Path(broker.parameters.unix_socket).parent.exists()


def test_a_port_that_is_taken_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BrokerError, match="in use"):
            EmbeddedBroker(port=taken.getsockname()[1]).start()


def test_a_free_port_that_another_took_is_replaced(monkeypatch):
    find = embedded._unused_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1]]
        monkeypatch.setattr(embedded, "_unused_port", lambda host: ports.pop() if ports else find(host))
        with EmbeddedBroker(port=0) as broker:
            assert broker.parameters.port != taken.getsockname()[1]
            assert not ports


def test_other_machines_cannot_be_let_in():
    with pytest.raises(ConfigError, match="this machine only"):
        EmbeddedBroker(port=0, host="0.0.0.0")


def test_no_server_names_the_extra(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingExtraError, match=r"srl\[embedded\]"):
        EmbeddedBroker().start()


def test_a_server_on_the_path_is_used_without_the_wheel(monkeypatch, tmp_path):
    wheel = embedded.find_server()
    (tmp_path / "redis-server").symlink_to(wheel)
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_server() == tmp_path / "redis-server"
    with EmbeddedBroker() as broker, broker.parameters.connect() as client:
        assert client.ping()


def test_a_long_temporary_folder_does_not_matter(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(embedded.tempfile, "tempdir", str(long))
    with EmbeddedBroker() as broker, broker.parameters.connect() as client:
        assert client.ping()


def test_parameters_need_a_start():
    with pytest.raises(BrokerError, match="not been started"):
        _ = EmbeddedBroker().parameters
