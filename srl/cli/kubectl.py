"""kubectl, for `srl deploy`: runs it, and says in words what is wrong with a cluster or with pods."""

import json
import re
import shutil
import subprocess
from typing import Any

from srl.base.errors import SrlError

# What kubectl says, and what to do then.
_HINTS = (
    (
        r"current-context is not set|context .* does not exist|no context exists",
        "kubectl config get-contexts shows yours",
    ),
    (
        r"connection refused|Unable to connect|no such host|i/o timeout",
        "is the cluster running, and the context right?",
    ),
    (r"[Ff]orbidden", "ask for the right to do that in the namespace srl, or use another context"),
    (r"Unauthorized|must be logged in", "log in again; for GKE: gcloud container clusters get-credentials"),
    (
        r'namespaces "srl" not found|deployments.apps "srl-actor" not found',
        "nothing is deployed there; srl deploy apply",
    ),
)
# Why a container waits, and what to do then. Those that time does not mend end the wait for pods.
_WAITING = {
    "ImagePullBackOff": "check the image's name, and that the nodes may pull it (docs/guides/troubleshooting.md)",
    "ErrImagePull": "check the image's name, and that the nodes may pull it (docs/guides/troubleshooting.md)",
    "ErrImageNeverPull": "load the image into the cluster first",
    "InvalidImageName": "give --registry and --tag as in REGION-docker.pkg.dev/PROJECT/srl and 0.1",
    "CreateContainerConfigError": "a secret or config map is missing; srl deploy apply makes them",
    "CrashLoopBackOff": "see srl deploy logs",
}
# Events that say why a pod has no volume, or why there is none.
_NO_VOLUME, _NO_POD = ("FailedMount", "FailedAttachVolume"), "FailedCreate"


class Kubectl:
    """Runs kubectl in one context; what goes wrong is one message."""

    def __init__(self, context: str | None) -> None:
        self._context = [] if context is None else ["--context", context]

    def command(self, *arguments: str) -> list[str]:
        """Return a command line. Raises `SrlError` where kubectl is not installed."""
        found = shutil.which("kubectl")
        if found is None:
            raise SrlError("kubectl is not installed; see https://kubernetes.io/docs/tasks/tools/")
        return [found, *self._context, *arguments]

    def run(self, *arguments: str, text: str | None = None) -> str:
        """Run it, with `text` as its input, and return its output."""
        done = subprocess.run(self.command(*arguments), input=text, capture_output=True, text=True)
        if done.returncode:
            raise SrlError(_failure(arguments, done.stderr))
        return done.stdout

    def show(self, *arguments: str) -> None:
        """Run it for people to see."""
        done = subprocess.run(self.command(*arguments), stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SrlError(_failure(arguments, done.stderr))

    def items(self, kinds: str, *options: str) -> list[dict[str, Any]]:
        """Return objects as JSON data."""
        found: list[dict[str, Any]] = json.loads(self.run("get", kinds, "-o", "json", *options))["items"]
        return found

    def name_of_context(self) -> str:
        """Return which cluster this is about."""
        return self._context[1] if self._context else self.run("config", "current-context").strip()


def problems(pods: list[dict[str, Any]], warnings: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Say what keeps pods from running; `warnings` are the namespace's events of that type.

    Returns one text each, and whether one of them will not mend itself.
    """
    texts, is_final, creating = [], False, set()
    for pod in pods:
        name, status = pod["metadata"]["name"], pod["status"]
        if "deletionTimestamp" in pod["metadata"]:
            continue
        for condition in status.get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                reason = condition.get("message", condition.get("reason", ""))
                texts.append(f"{name} has no node yet: {reason} (more nodes, or fewer actors: srl deploy scale)")
        for container in status.get("containerStatuses", ()):
            waiting = container["state"].get("waiting", {})
            if waiting.get("reason") == "ContainerCreating":
                creating.add(name)
            if waiting.get("reason") in _WAITING:
                reason, detail = waiting["reason"], waiting.get("message", "")
                texts.append(f"{name}: {reason}: {detail} ({_WAITING[reason]})")
                # A first pull may fail for a moment, and a worker may crash for another's sake.
                is_final |= reason not in ("ErrImagePull", "CrashLoopBackOff")
            ended = container.get("lastState", {}).get("terminated", {})
            if ended.get("reason") == "OOMKilled":
                texts.append(f"{name} was killed for its memory; raise its limit in your overlay, or use less memory")
    # Events are kept for an hour: told are those of pods that still wait, and of owners that still have none.
    owners = {_workload(owner) for pod in pods for owner in pod["metadata"].get("ownerReferences", ())}
    for event in warnings:
        about, reason = _workload(event["involvedObject"]), event["reason"]
        if (reason in _NO_VOLUME and about in creating) or (reason == _NO_POD and about not in owners):
            texts.append(f"{about}: {reason}: {event['message']}")
    return list(dict.fromkeys(texts)), is_final


def _workload(reference: dict[str, Any]) -> str:
    """Return an object's name; a Deployment's, where it is one of its ReplicaSets."""
    name: str = reference["name"]
    return name.rpartition("-")[0] if reference["kind"] == "ReplicaSet" else name


def _failure(arguments: tuple[str, ...], said: str) -> str:
    text = f"kubectl {' '.join(arguments)} failed: {said.strip()}"
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, said)), "")
    return f"{text}\n{hint}" if hint else text
