"""The dashboard's server: a page, and the JSON that it asks for every other second.

For the few people who watch a run, so Python's own HTTP server will do. It changes nothing at the broker, and its user
there (`viewer`) could not. It answers only requests that name a host it knows: other web pages that a browser has open
must not read a broker by way of it.
"""

import functools
import mimetypes
import threading
import urllib.parse
from collections.abc import Sequence
from contextlib import closing
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from srl.base.errors import BrokerError
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.distribution.records import TaskGoneError
from srl.runner.distribution.task_manager import TaskManager
from srl.runner.progress import bill_text

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
MOST_ROWS = 2_000
"""History rows of one answer; a longer history is thinned."""
_STATIC = Path(__file__).with_name("static")
_PAGES = {"/": "index.html", "/app.js": "app.js", "/style.css": "style.css"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Dashboard:
    """Serves the dashboard; a context manager that ends it.

    Args:
        redis_params: the broker whose tasks are shown.
        host, port: where it listens; port 0 takes a free one.
        allow_hosts: further names that a browser may reach it by.

    Raises `OSError` where the port is taken.
    """

    def __init__(
        self, redis_params: RedisParameters, host: str = "127.0.0.1", port: int = 8000, allow_hosts: Sequence[str] = ()
    ) -> None:
        handler = functools.partial(_Handler, redis_params, {*LOCAL_HOSTS, host, *allow_hosts})
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}"

    def serve_until(self, stop: threading.Event) -> None:
        """Serve until stopped."""
        thread = threading.Thread(target=self._server.serve_forever, name="srl-dashboard", daemon=True)
        thread.start()
        stop.wait()
        self._server.shutdown()
        thread.join()

    def __enter__(self) -> "Dashboard":
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "srl", ""
    timeout = 30  # of a connection that says nothing

    def __init__(self, redis_params: RedisParameters, hosts: set[str], *arguments: Any) -> None:
        self._redis_params = redis_params
        self._hosts = hosts
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer a request."""
        if urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname not in self._hosts:
            self._send(HTTPStatus.FORBIDDEN, b"unknown host; name it with --allow-host\n", "text/plain")
            return
        path, _, query = self.path.partition("?")
        if path in _PAGES:
            file = _STATIC / _PAGES[path]
            self._send(HTTPStatus.OK, file.read_bytes(), mimetypes.guess_type(file.name)[0] or "text/plain")
            return
        arguments = dict(urllib.parse.parse_qsl(query))
        try:
            if path == "/api/tasks":
                self._send_json(self._tasks())
            elif path == "/api/task":
                self._send_json(self._task(arguments.get("id", ""), arguments.get("after", "0")))
            else:
                self._send(HTTPStatus.NOT_FOUND, b"there is no such page\n", "text/plain")
        except TaskGoneError as error:
            self._send_json({"error": str(error)}, HTTPStatus.NOT_FOUND)
        except BrokerError as error:
            self._send_json({"error": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of each request."""

    def _tasks(self) -> dict[str, Any]:
        with self._manager("") as manager:
            return {"address": self._redis_params.address, "tasks": manager.tasks()}

    def _task(self, task: str, after: str) -> dict[str, Any]:
        with self._manager(task) as manager:
            status, rows = manager.get_status(), manager.history(after)
            return {
                "status": status,
                "cost": bill_text(status.bill, status) if status.bill else "",
                "rows": _thinned(rows),
                "last": rows[-1]["id"] if rows else after,
                "errors": [{"time_ms": e.time_ms, "worker": e.worker, "message": e.message} for e in manager.errors()],
            }

    def _manager(self, task: str) -> "closing[TaskManager]":
        return closing(TaskManager(self._redis_params, task))

    def _send_json(self, data: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, msgspec.json.encode(data), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every so many of the trainer's rows; evaluations are few and worth more."""
    every = -(-len(rows) // MOST_ROWS)
    return [row for i, row in enumerate(rows) if i % every == 0 or row.get("role") == "eval"]
