"""SRL on the cluster that KUBECONFIG names, as its users see it: `srl deploy`, and scripts that reach the broker."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from srl.runner.distribution import RedisParameters
from srl.runner.distribution.embedded import _unused_port

TAG = os.environ.get("SRL_TEST_TAG", "latest")
REGISTRY = os.environ.get("SRL_TEST_REGISTRY")
USER = 10001


def kubectl(*arguments: str, text: str | None = None) -> str:
    """Run kubectl and return its output."""
    done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


def items(kinds: str, *options: str) -> list[dict[str, Any]]:
    """Return objects as JSON data."""
    found: list[dict[str, Any]] = json.loads(kubectl("get", kinds, "-o", "json", *options))["items"]
    return found


def srl_deploy(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `srl deploy`."""
    command = [sys.executable, "-m", "srl.cli", "deploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def apply(overlay: str, directory: Path, *options: str, registry: str | None = REGISTRY) -> str:
    """Apply an overlay and wait until all pods are ready; returns what was said."""
    done = try_to_apply(overlay, directory, *options, registry=registry)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def try_to_apply(
    overlay: str,
    directory: Path,
    *options: str,
    registry: str | None = REGISTRY,
    tag: str = TAG,
    timeout_s: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Apply an overlay of the user's own, in `directory`. It asks for less than whole cores: nodes may be small."""
    directory.mkdir(exist_ok=True)
    theirs = Path(__file__).parents[2] / "deploy" / "kubernetes" / "overlays" / overlay
    cpu = {"op": "replace", "path": "/spec/template/spec/containers/0/resources/requests/cpu", "value": "100m"}
    kustomization = {
        "resources": [os.path.relpath(theirs, directory.resolve())],
        "patches": [{"target": {"kind": "(StatefulSet|Deployment)"}, "patch": json.dumps([cpu])}],
    }
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))
    place = ["--registry", registry] if registry else []
    return srl_deploy("apply", str(directory), "--yes", "--tag", tag, "--timeout", str(timeout_s), *place, *options)


def delete() -> str:
    """Remove everything and return what was said."""
    done = srl_deploy("delete", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pods(role: str = "") -> list[str]:
    """Return the names of the pods, of one role if asked."""
    selector = ["-l", f"app.kubernetes.io/name={role}"] if role else []
    return [item["metadata"]["name"] for item in items("pods", "-n", "srl", *selector)]


def shell(pod: str, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a pod."""
    return subprocess.run(
        ["kubectl", "-n", "srl", "exec", pod, "--", "sh", "-c", command], capture_output=True, text=True, timeout=60
    )


def until(condition: Callable[[], Any], timeout_s: float = 120.0, what: str = "it") -> Any:
    """Wait for something true and return it."""
    deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"{what} did not happen in {timeout_s:.0f} s"
        pause.wait(0.5)
    return found


@contextlib.contextmanager
def volumes(directory: Path) -> Iterator[None]:
    """Give two volumes where the cluster makes none by itself."""
    if items("storageclasses"):
        yield
        return
    names = ["srl-test-0", "srl-test-1"]
    kubectl("delete", "persistentvolume", *names, "--ignore-not-found")
    for name in names:
        (directory / name).mkdir()
        shutil.chown(directory / name, USER, USER)
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "50Gi"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": str(directory / name)},
            },
        }
        kubectl("apply", "-f", "-", text=json.dumps(volume))
    try:
        yield
    finally:
        # A claim of a test that failed may still hold them.
        kubectl("delete", "persistentvolume", *names, "--ignore-not-found", "--wait=false")


@contextlib.contextmanager
def connected(log: Path) -> Iterator[RedisParameters]:
    """Give the broker's address on this machine while `srl deploy connect` runs."""
    port = _unused_port("127.0.0.1")
    with log.open("wb") as output:
        command = [sys.executable, "-m", "srl.cli", "deploy", "connect", "--port", str(port)]
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            said = until(
                lambda: re.search(r"(  .*\n)+  export SRL_REDIS_PASSWORD.*\n", log.read_text()), what="connect"
            )
            shell = f"set -e\n{said.group()}\nprintenv SRL_REDIS_URL SRL_REDIS_PASSWORD"
            done = subprocess.run(["bash", "-c", shell], cwd=log.parent, capture_output=True, text=True, check=True)
            url, password = done.stdout.splitlines()
            ca = log.parent / "srl-ca.crt"
            parameters = RedisParameters(url=url.replace(ca.name, str(ca)), password=password)
            parameters.wait_until_reachable(timeout_s=60)
            yield parameters
        finally:
            process.terminate()
            process.wait(10)
