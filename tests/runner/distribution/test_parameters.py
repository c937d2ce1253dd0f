import copy
import dataclasses
import logging
import math
import shutil
import socketserver
import ssl
import subprocess
import sys
import threading
import time

import pytest
import redis

from srl.base.errors import BrokerError, BrokerUnreachableError, ConfigError
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.distribution.parameters import RedisParameters

SECRET = "s3cr3t/p@ss#word"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("SRL_REDIS_URL", raising=False)
    monkeypatch.delenv("SRL_REDIS_PASSWORD", raising=False)


@pytest.fixture(scope="module")
def broker():
    with EmbeddedBroker(port=0) as running:
        yield running


class Fake:
    """A server on a loopback port that answers each request with the next of `answers`, the last one for ever."""

    def __init__(self, *answers: bytes, context: ssl.SSLContext | None = None):
        remaining = list(answers)

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                try:
                    connection = context.wrap_socket(self.request, server_side=True) if context else self.request
                    while connection.recv(4096):
                        connection.sendall(remaining.pop(0) if len(remaining) > 1 else remaining[0])
                except OSError:
                    pass

        socketserver.ThreadingTCPServer.daemon_threads = True
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()


def test_importing_it_imports_neither_redis_nor_jax():
    code = (
        "import sys, srl.runner.distribution.parameters as p; p.RedisParameters('example.org');"
        "print([name for name in ('redis', 'jax', 'msgspec') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_defaults_and_arguments():
    assert RedisParameters().address == "redis://127.0.0.1:6379/0"
    assert RedisParameters("broker", 7000, db=3).address == "redis://broker:7000/3"
    assert RedisParameters(host="broker", ssl=True).address == "rediss://broker:6379/0"
    assert RedisParameters(host="::1").address == "redis://[::1]:6379/0"
    assert RedisParameters(unix_socket="/run/a b.sock", db=2).address == "unix:///run/a b.sock?db=2"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://broker", {"host": "broker", "port": 6379, "db": 0, "ssl": False}),
        ("redis://broker:7000/2", {"host": "broker", "port": 7000, "db": 2}),
        ("redis://me:pa%2Fss%40@broker", {"username": "me", "password": "pa/ss@"}),
        ("redis://:only@broker", {"username": None, "password": "only"}),
        ("rediss://broker?ssl_ca_certs=/a/ca.pem&ssl_check_hostname=no", {
            "ssl": True, "ssl_ca_certs": "/a/ca.pem", "ssl_check_hostname": False}),
        ("redis://[::1]:7000/", {"host": "::1", "port": 7000}),
        ("unix:///run/srl.sock?db=4", {"unix_socket": "/run/srl.sock", "db": 4, "host": ""}),
        ("redis://broker?task_name=a%20b&connect_timeout_s=2.5&allow_insecure=true", {
            "task_name": "a b", "connect_timeout_s": 2.5, "allow_insecure": True}),
        ("redis://broker?kwargs=%7B%22health_check_interval%22%3A%205%7D", {"kwargs": {"health_check_interval": 5}}),
    ],
)  # fmt: skip
def test_urls(url, expected):
    parameters = RedisParameters(url=url)
    assert {name: getattr(parameters, name) for name in expected} == expected


def test_a_url_may_leave_things_to_arguments():
    parameters = RedisParameters(url="redis://broker", db=3, password="x", username="me", task_name="t")
    assert (parameters.db, parameters.password, parameters.username, parameters.task_name) == (3, "x", "me", "t")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"url": "redis://a", "host": "b"}, "not both"),
        ({"url": "redis://a", "unix_socket": "/b"}, "not both"),
        ({"host": "a", "unix_socket": "/b"}, "not both"),
        ({"url": "http://a"}, "must start with redis://"),
        ({"url": "broker:6379"}, "must start with redis://"),
        ({"url": "redis://a/x"}, "wrong value for db"),
        ({"url": "redis://a/1", "db": 2}, "db is given twice"),
        ({"url": "redis://a:7000", "port": 7001}, "port is given twice"),
        ({"url": "redis://:x@a", "password": "y"}, "password is given twice"),
        ({"url": "redis://a?ssl_ca_cert=x"}, "unknown option 'ssl_ca_cert'.*ssl_ca_certs"),
        ({"url": "redis://a?allow_insecure=maybe"}, "wrong value for allow_insecure"),
        ({"url": "redis://a?kwargs=[1]"}, "wrong value for kwargs"),
        ({"url": "unix://"}, "no path"),
        ({"host": "redis://a"}, "give it as url="),
        ({"port": 0}, "from 1 to 65535"),
        ({"port": "6379"}, "from 1 to 65535"),
        ({"db": -1}, "db must be"),
        ({"connect_timeout_s": -1}, "connect_timeout_s"),
        ({"connect_timeout_s": math.nan}, "connect_timeout_s"),
        ({"ssl_ca_certs": "ca.pem"}, "ssl_ca_certs needs TLS"),
        ({"ssl": True, "ssl_cert_reqs": "never"}, "ssl_cert_reqs must be"),
        ({"unix_socket": "/a", "ssl": True}, "no TLS"),
        ({"kwargs": {"password": "x"}}, "password cannot be in kwargs"),
        ({"kwargs": {"decode_responses": True}}, "decode_responses cannot be in kwargs"),
    ],
)
def test_contradictions_are_refused(arguments, says):
    with pytest.raises(ConfigError, match=says):
        RedisParameters(**arguments)


def test_a_file_may_have_the_password(monkeypatch, tmp_path):
    file = tmp_path / "secret"
    monkeypatch.setenv("SRL_REDIS_PASSWORD_FILE", str(file))
    for text, says in ((None, "secret cannot be read"), (" \n", "secret is empty")):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            RedisParameters(host="h")
    file.write_text("of a file\n")
    assert RedisParameters(host="h").password == "of a file"
    assert RedisParameters(host="h", password="given").password == "given"
    monkeypatch.setenv("SRL_REDIS_PASSWORD", "of a variable")
    assert RedisParameters(host="h").password == "of a variable"


def test_the_environment_fills_in_what_is_not_given(monkeypatch):
    monkeypatch.setenv("SRL_REDIS_URL", "rediss://me:inurl@broker:7000/2?task_name=theirs")
    parameters = RedisParameters()
    assert parameters.address == "rediss://broker:7000/2"
    assert (parameters.username, parameters.password, parameters.task_name) == ("me", "inurl", "theirs")
    assert RedisParameters(task_name="mine").task_name == "mine"
    assert RedisParameters(password="mine").password == "mine"
    for explicit in (RedisParameters("other"), RedisParameters(url="redis://other"), RedisParameters(port=7)):
        assert explicit.password is None and "7000" not in explicit.address
    monkeypatch.setenv("SRL_REDIS_PASSWORD", "variable")
    assert RedisParameters().password == "inurl"
    assert RedisParameters("other").password == "variable"
    assert RedisParameters("other", password="mine").password == "mine"
    monkeypatch.setenv("SRL_REDIS_URL", "")
    monkeypatch.setenv("SRL_REDIS_PASSWORD", "")
    assert RedisParameters() == RedisParameters("127.0.0.1") and RedisParameters().password is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"host": "broker", "password": SECRET},
        {"url": "redis://me:s3cr3t%2Fp%40ss%23word@broker"},
        {"unix_socket": "/a", "password": SECRET, "kwargs": {"credential_provider": SECRET}},
    ],
)
def test_secrets_are_never_shown(arguments):
    parameters = RedisParameters(**arguments)
    for text in (repr(parameters), str(parameters), f"{parameters}", parameters.address):
        assert "s3cr3t" not in text and "p@ss" not in text and "p%40ss" not in text
    assert "password=***" in repr(parameters)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cr3t/x@host",
        "redis://:s3cr3t#x@host",
        "redis://:s3cr3t@host:port",
        "redis://host?password=s3cr3t&db=s3cr3t",
        "redis://[s3cr3t@host",
    ],
)
def test_errors_about_a_url_do_not_show_its_password(url):
    with pytest.raises(ConfigError) as caught:
        RedisParameters(url=url)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "parameters",
    [
        RedisParameters("broker", 7000, db=2, username="m/e@", password=SECRET, task_name="a&b=c"),
        RedisParameters("::1", connect_timeout_s=math.inf, allow_insecure=True, kwargs={"health_check_interval": 3}),
        RedisParameters(
            "broker", ssl=True, ssl_ca_certs="/a b/ca.pem", ssl_certfile="c", ssl_keyfile="k",
            ssl_cert_reqs="none", ssl_check_hostname=False,
        ),
        RedisParameters(unix_socket="/run/a b?c#%.sock", db=3, username="me", password=SECRET),
        RedisParameters(),
    ],
)  # fmt: skip
def test_a_child_process_gets_the_same_parameters(parameters, monkeypatch):
    monkeypatch.setenv("SRL_REDIS_PASSWORD", "of the parent")
    for name, value in parameters.to_env().items():
        monkeypatch.setenv(name, value)
    assert RedisParameters() == parameters
    assert "s3cr3t" not in parameters.to_env()["SRL_REDIS_URL"]


def test_parameters_can_be_copied_and_changed():
    parameters = RedisParameters(url="rediss://me:x@broker:7000/2", kwargs={"health_check_interval": 3})
    assert copy.deepcopy(parameters) == parameters
    changed = dataclasses.replace(parameters, task_name="other")
    assert changed.task_name == "other" and changed.address == parameters.address and changed.password == "x"


def test_kwargs_that_cannot_be_handed_on_are_named():
    with pytest.raises(ConfigError, match="kwargs"):
        RedisParameters(kwargs={"credential_provider": object()}).to_env()


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"host": "10.0.0.1"}, False),
        ({"host": "broker"}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "127.evil.example"}, False),
        ({"host": "broker", "ssl": True}, False),
        ({"host": "broker", "password": ""}, False),
        ({"host": "broker", "password": "x"}, True),
        ({"host": "broker", "allow_insecure": True}, True),
        ({"host": "broker", "ssl": True, "ssl_certfile": "c", "ssl_keyfile": "k"}, True),
        ({"host": "localhost"}, True),
        ({"host": "127.8.0.1"}, True),
        ({"host": "::1"}, True),
        ({"unix_socket": "/a"}, True),
    ],
)
def test_a_broker_of_another_machine_needs_a_password(arguments, allowed):
    parameters = RedisParameters(**arguments)
    if allowed:
        parameters.connect().close()
    else:
        for use in (parameters.connect, parameters.wait_until_reachable):
            with pytest.raises(BrokerError, match=r"SRL_REDIS_PASSWORD.*allow_insecure"):
                use()


def test_clients_use_the_parameters(broker):
    parameters = dataclasses.replace(broker.parameters, db=3, kwargs={"client_name": "mine"})
    with parameters.connect() as client:
        assert client.set("key", b"\xff\0")
        assert client.get("key") == b"\xff\0"
        assert client.client_getname() == "mine"
    with broker.parameters.connect() as client:
        assert client.get("key") is None


def test_a_broker_that_answers_is_reachable(broker, caplog):
    with caplog.at_level(logging.DEBUG, "srl"):
        assert broker.parameters.wait_until_reachable() is True
    assert not caplog.records


def test_failing_calls_do_not_take_long():
    with EmbeddedBroker(port=0) as broker:
        client = broker.parameters.connect()
        client.ping()
        broker.stop()
        start = time.monotonic()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        assert time.monotonic() - start < 2


def test_a_restart_between_two_calls_does_not_show():
    with EmbeddedBroker(port=0) as broker:
        client = broker.parameters.connect()
        client.ping()
        broker.stop()
        broker.start()
        assert client.ping()


def test_nobody_there_is_said_with_address_and_remedy(caplog):
    with EmbeddedBroker(port=0) as broker:
        parameters = dataclasses.replace(broker.parameters, connect_timeout_s=0.3)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "srl"), pytest.raises(BrokerUnreachableError) as caught:
        parameters.wait_until_reachable(None)
    assert 0.25 < time.monotonic() - start < 3
    for part in (parameters.address, "refused", "0.3 s", "SRL_REDIS_URL", "redis-server", "train_mp"):
        assert part in str(caught.value)
    assert len(caplog.records) == 1  # not one a try
    assert str(parameters.password) not in str(caught.value) + caplog.text


class Started(logging.Handler):
    """Sets `event` with the first log line."""

    def __init__(self):
        super().__init__()
        self.event = threading.Event()

    def emit(self, record):
        self.event.set()


def test_a_broker_that_comes_later_is_found():
    waits = Started()
    logger = logging.getLogger("srl.runner.distribution.parameters")
    logger.addHandler(waits)
    try:
        with EmbeddedBroker(port=0) as broker:
            parameters = broker.parameters
            broker.stop()
            answers = []
            waiter = threading.Thread(target=lambda: answers.append(parameters.wait_until_reachable()))
            waiter.start()
            assert waits.event.wait(10)
            broker.start()
            waiter.join(15)
        assert answers == [True]
    finally:
        logger.removeHandler(waits)


def test_loading_is_waited_for_with_one_line_a_change(caplog):
    loading = b"-LOADING Redis is loading\r\n"
    with Fake(loading, loading, b"+PONG\r\n") as fake, caplog.at_level(logging.INFO, "srl"):
        assert RedisParameters(port=fake.port).wait_until_reachable(timeout_s=10)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "loading" in caplog.records[0].getMessage() and "answers" in caplog.records[1].getMessage()


def test_stop_ends_the_wait():
    stop = threading.Event()
    with EmbeddedBroker(port=0) as broker:
        parameters = broker.parameters
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(parameters.wait_until_reachable(stop, math.inf)))
    waiter.start()
    stop.set()
    waiter.join(10)
    assert answers == [False]


def test_a_wrong_password_is_said_at_once(broker):
    port = broker.parameters.port
    with pytest.raises(BrokerError, match="wrong username or password") as caught:
        RedisParameters(port=port, password=SECRET).wait_until_reachable(None, math.inf)
    assert SECRET not in str(caught.value)
    with pytest.raises(BrokerError, match="wants a password"):
        RedisParameters(port=port).wait_until_reachable(None, math.inf)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"-ERR AUTH <password> called without any password configured for the default user.\r\n", "has no password"),
        (b"-WRONGPASS invalid username-password pair or user is disabled.\r\n", "wrong username or password"),
        (b"-DENIED Redis is running in protected mode\r\n", "protected mode"),
        (b"-NOPERM this user has no permissions to run the 'ping' command\r\n", "no permissions"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "refused to be used|Protocol|protocol"),
    ],
)
def test_answers_that_waiting_does_not_change_are_said_at_once(answer, says):
    with Fake(answer) as fake, pytest.raises(BrokerError, match=says) as caught:
        RedisParameters(port=fake.port, password="x").wait_until_reachable(None, math.inf)
    assert not isinstance(caught.value, BrokerUnreachableError)


def test_a_server_without_tls_is_said_at_once():
    with Fake(b"-ERR unknown command\r\n") as fake, pytest.raises(BrokerError, match="does not speak TLS"):
        RedisParameters(port=fake.port, ssl=True).wait_until_reachable(None, math.inf)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls_checks_the_certificate(tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Fake(b"+PONG\r\n", context=context) as fake:
        trusted = RedisParameters("localhost", fake.port, ssl=True, ssl_ca_certs=str(certificate))
        assert trusted.wait_until_reachable(timeout_s=10)
        for changes in ({"ssl_ca_certs": None}, {"host": "127.0.0.1"}):
            with pytest.raises(BrokerError, match="is not trusted"):
                dataclasses.replace(trusted, **changes).wait_until_reachable(None, math.inf)
        for changes in ({"ssl_ca_certs": None, "ssl_cert_reqs": "none"}, {"ssl_check_hostname": False}):
            assert dataclasses.replace(trusted, host="127.0.0.1", **changes).wait_until_reachable(timeout_s=10)
