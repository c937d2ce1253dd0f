"""The Kubernetes API as a pod reaches it, for the one pod that needs it."""

import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from srl.base.errors import SrlError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts the credentials of a pod's service account."""
TIMEOUT_S = 10.0


class Kubernetes:
    """Asks for objects by their path, with the rights of this pod's service account.

    Raises `SrlError` outside a cluster.
    """

    def __init__(self) -> None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not _ACCOUNT.is_dir():
            raise SrlError("this runs in a pod with a service account; srl deploy apply --max-hours 4 makes one")
        self._server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self._tls = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))

    def get(self, path: str) -> dict[str, Any] | None:
        """Return an object, `None` where there is none."""
        return self._ask("GET", path)

    def create(self, path: str, item: dict[str, Any]) -> None:
        """Add an object to a collection."""
        self._ask("POST", path, item)

    def patch(self, path: str, changes: dict[str, Any]) -> None:
        """Change some fields of an object."""
        self._ask("PATCH", path, changes)

    def delete(self, path: str) -> None:
        """Delete an object."""
        self._ask("DELETE", path)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the answer. Raises `OSError` where there is none, `SrlError` where it is a refusal."""
        token = (_ACCOUNT / "token").read_text()  # it changes by the hour
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(  # noqa: S310 - always https
            f"{self._server}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": kind},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:  # noqa: S310
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            if error.code == 404 and method == "GET":
                return None
            if error.code >= 500 or error.code in (409, 429):
                raise OSError(f"Kubernetes answers {error.code} to {method} {path}") from error
            raise SrlError(f"Kubernetes refuses {method} {path}: {error.read().decode(errors='replace')}") from error
