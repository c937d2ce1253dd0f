"""The dashboard over a real broker, asked as browsers ask it."""

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import srl
from srl.algorithms import dqn
from srl.dashboard.server import MOST_ROWS, Dashboard
from srl.runner.distribution import RedisParameters, TaskManager
from srl.runner.distribution.broker import Broker
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.status import Bill

STATIC = Path(srl.__file__).parent / "dashboard" / "static"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as running:
        yield running


@contextlib.contextmanager
def serving(parameters: RedisParameters, **options: Any) -> Iterator[tuple[str, int]]:
    stop = threading.Event()
    with Dashboard(parameters, port=0, **options) as dashboard:
        thread = threading.Thread(target=dashboard.serve_until, args=(stop,))
        thread.start()
        host, _, port = dashboard.url.removeprefix("http://").rpartition(":")
        try:
            yield host, int(port)
        finally:
            stop.set()
            thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def address(server: EmbeddedBroker) -> Iterator[tuple[str, int]]:
    with serving(server.parameters) as found:
        yield found


def ask(address: tuple[str, int], path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=30)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def ask_json(address: tuple[str, int], path: str) -> Any:
    status, headers, body = ask(address, path)
    assert status == 200 and headers["content-type"].startswith("application/json"), body
    return json.loads(body)


@pytest.fixture
def manager(server: EmbeddedBroker) -> Iterator[TaskManager]:
    made = srl.Runner("CartPole-v1", dqn.Config()).train_distribution_start(server.parameters, max_train_count=100)
    yield made
    made.cancel()
    made.close()


def test_a_task_with_its_history_errors_and_cost(
    server: EmbeddedBroker, address: tuple[str, int], manager: TaskManager
) -> None:
    with contextlib.closing(Broker(server.parameters)) as broker:
        lease = broker.acquire(manager.task, "trainer")
        assert lease is not None
        broker.add_history(lease, {"time": 1.0, "role": "trainer", "loss": 0.5})
        broker.add_error(manager.task, "actor-0", "<b>boom</b>")
        bill = Bill(hours=1.0, usd=0.5, usd_per_hour=0.5, max_usd=2.0)
        broker.write_bill(msgspec.json.encode(bill).decode())
        tasks = ask_json(address, "/api/tasks")["tasks"]
        assert [task["task"] for task in tasks][-1] == manager.task
        found = ask_json(address, f"/api/task?id={manager.task}")
        assert found["status"]["state"] == "running" and found["status"]["max_train_count"] == 100
        assert [row["loss"] for row in found["rows"]] == [0.5]
        assert [(e["worker"], e["message"]) for e in found["errors"]] == [("actor-0", "<b>boom</b>")]
        assert found["cost"] == "0.50 of 2.00 USD in 1.0 hours"
        broker.add_history(lease, {"time": 2.0, "role": "trainer", "loss": 0.25})
        more = ask_json(address, f"/api/task?id={manager.task}&after={found['last']}")
        assert [row["loss"] for row in more["rows"]] == [0.25], "only what is new"
        broker.redis.delete("srl:bill")


def test_a_long_history_is_thinned_but_keeps_evaluations(
    server: EmbeddedBroker, address: tuple[str, int], manager: TaskManager
) -> None:
    with contextlib.closing(Broker(server.parameters)) as broker, broker.redis.pipeline() as pipe:
        for i in range(3 * MOST_ROWS):
            row = {"time": i, "role": "eval" if i % 1000 == 1 else "trainer"}
            pipe.xadd(f"srl:{manager.task}:history", {"row": json.dumps(row)})
        pipe.execute()
    rows = ask_json(address, f"/api/task?id={manager.task}")["rows"]
    assert len(rows) <= MOST_ROWS + 6
    assert [row["time"] for row in rows if row["role"] == "eval"] == [1000 * k + 1 for k in range(6)]


def test_the_page_and_what_it_needs(address: tuple[str, int]) -> None:
    for path, kind in (("/", "text/html"), ("/app.js", "text/javascript"), ("/style.css", "text/css")):
        status, headers, body = ask(address, path)
        assert status == 200 and headers["content-type"].startswith(kind) and body
        assert "default-src 'self'" in headers["content-security-policy"]
    page = (STATIC / "index.html").read_text()
    for path in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert ask(address, f"/{path}")[0] == 200
    ids = set(re.findall(r'id="([^"]+)"', page))
    script = (STATIC / "app.js").read_text()
    assert set(re.findall(r'byId\("([^"]+)"\)', script)) <= ids
    # Texts come from workers that nobody trusts.
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(", script)


@pytest.mark.parametrize("path", ["/nothing", "/../server.py", "/static/app.js", "/api", "//etc/passwd"])
def test_nothing_else_is_served(address: tuple[str, int], path: str) -> None:
    assert ask(address, path)[0] == 404


def test_a_task_that_is_not_there_is_said(address: tuple[str, int]) -> None:
    status, _, body = ask(address, "/api/task?id=nobody")
    assert status == 404 and "nobody" in json.loads(body)["error"]


def test_nothing_can_be_changed(address: tuple[str, int], manager: TaskManager) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask(address, f"/api/task?id={manager.task}", method)[0] == 501


def test_pages_of_other_hosts_read_nothing(server: EmbeddedBroker, address: tuple[str, int]) -> None:
    """A name that somebody else points at this machine (DNS rebinding) is not one of ours."""
    for host in ("evil.example", "evil.example:8000", "", "[::2]"):
        status, _, body = ask(address, "/api/tasks", Host=host)
        assert status == 403 and b"--allow-host" in body, host
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
        assert ask(address, "/api/tasks", Host=host)[0] == 200
    with serving(server.parameters, allow_hosts=["srl.example"]) as allowed:
        assert ask(allowed, "/api/tasks", Host="srl.example")[0] == 200


def test_a_broker_that_is_away_is_said_and_its_return_noticed() -> None:
    with EmbeddedBroker() as running:
        parameters = running.parameters
        parameters.connect_timeout_s = 0.2
        with serving(parameters) as address:
            assert ask(address, "/api/tasks")[0] == 200
            running.__exit__(None, None, None)
            status, _, body = ask(address, "/api/tasks")
            assert status == 503 and "no broker" in json.loads(body)["error"]
            assert ask(address, "/")[0] == 200
