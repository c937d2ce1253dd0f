"""The Kubernetes manifests: valid for current clusters, and no pod may do what it need not. Needs no cluster."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from waiting import until

import srl
from srl.cli.budget import Budget
from srl.cli.deploy import Target, _render
from srl.cli.gke import ACTORS_PER_MACHINE
from srl.cli.kubectl import Kubectl, problems
from srl.cli.main import cli

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which renders them, is not installed"
)


def render(directory: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def pod_templates(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for item in items
        if "template" in item.get("spec", {})
    }


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid_and_restricted(overlay: str) -> None:
    items = render(MANIFESTS / "overlays" / overlay)
    for item in items:
        kubernetes_validate.validate(item, "1.37", strict=True)
        assert item["metadata"]["labels"]["app.kubernetes.io/part-of"] == "srl", "by this it is found to be deleted"
    pods = pod_templates(items)
    assert pods.keys() == {"srl-broker", "srl-trainer", "srl-actor", "srl-dashboard"}
    for pod in pods.values():
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        [container] = pod["containers"]
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] is True and rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
    assert not [item for item in items if item["kind"] == "Secret"], "passwords are made where they are used"
    public = [item for item in items if item["kind"] == "Service" and item["spec"].get("type") == "LoadBalancer"]
    assert bool(public) == (overlay == "gke-public")
    for service in public:
        assert service["spec"]["loadBalancerSourceRanges"]
        config = next(item for item in items if item["kind"] == "ConfigMap")["data"]["valkey.conf"]
        assert "port 0\n" in config and "tls-port" in config and "aclfile" in config


@needs_kubectl
def test_as_many_actors_find_room_on_a_machine_as_the_cost_table_says() -> None:
    """GKE leaves 3,920 of a machine's 4,000 m to pods, of which its own take some 300."""
    [container] = pod_templates(render(MANIFESTS / "overlays" / "gke"))["srl-actor"]["containers"]
    request = int(container["resources"]["requests"]["cpu"].removesuffix("m"))
    assert 3600 // request == ACTORS_PER_MACHINE


@needs_kubectl
@pytest.mark.parametrize("component", COMPONENTS)
def test_components_are_valid(component: str, tmp_path: Path) -> None:
    kustomization = {
        "resources": [os.path.relpath(MANIFESTS / "base", tmp_path.resolve())],
        "components": [os.path.relpath(MANIFESTS / "components" / component, tmp_path.resolve())],
    }
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    base, items = render(MANIFESTS / "base"), render(tmp_path)
    assert len(items) > len(base)
    for item in items:
        kubernetes_validate.validate(item, "1.37", strict=True)


@needs_kubectl
def test_rendering_sets_images_and_version() -> None:
    done = CliRunner().invoke(cli, ["deploy", "render", "gke", "--registry", "example.org/mine", "--tag", "7"])
    assert done.exit_code == 0, done.output
    items = [item for item in yaml.safe_load_all(done.output) if item]
    images = {pod["containers"][0]["image"] for pod in pod_templates(items).values()}
    assert images == {"example.org/mine/srl-actor:7", "example.org/mine/srl-trainer:7"}
    assert {item["metadata"]["labels"]["app.kubernetes.io/version"] for item in items} == {srl.__version__}


@needs_kubectl
@pytest.mark.parametrize("when_spent", ["end", "scale-to-zero", "delete"])
def test_a_budget_has_a_keeper_with_no_more_rights_than_it_uses(when_spent: Any, tmp_path: Path) -> None:
    target = Target(Kubectl(None), MANIFESTS)
    budget = Budget(max_hours=4.0, when_spent=when_spent)
    items = list(yaml.safe_load_all(_render(target, "gke-public", None, None, budget=budget)))
    for item in items:
        kubernetes_validate.validate(item, "1.37", strict=True)
    pod = pod_templates(items)["srl-budget"]
    assert Budget.from_arguments(pod["containers"][0]["args"]) == budget
    [url] = [each["value"] for each in pod["containers"][0]["env"] if each["name"] == "SRL_REDIS_URL"]
    assert url.startswith("rediss://"), "the broker's, which has TLS here"
    [role] = [item for item in items if item["kind"] == "Role"]
    verbs = {verb for rule in role["rules"] for verb in rule["verbs"]}
    assert ("delete" in verbs) == (when_spent == "delete")
    scales = any("statefulsets/scale" in rule["resources"] for rule in role["rules"])
    assert scales == (when_spent == "scale-to-zero")


@needs_kubectl
def test_an_overlay_that_does_not_exist_is_named_with_those_that_do() -> None:
    done = CliRunner().invoke(cli, ["deploy", "render", "kindd"])
    assert done.exit_code == 2 and "'kindd' is neither" in done.output and "docker-desktop, gke" in done.output


def kubectl(directory: Path, script: str) -> dict[str, str]:
    """Put a kubectl on the path that answers as one would in some trouble."""
    program = directory / "kubectl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}


def deployed(
    version: str = srl.__version__,
    replicas: int = 1,
    budget: list[str] | None = None,
    account: dict[str, float] | None = None,
) -> str:
    """Return a script that answers as kubectl does where SRL is deployed."""
    items: list[dict[str, Any]] = [
        {"metadata": {"name": name, "labels": {"app.kubernetes.io/version": version}}, "spec": {"replicas": replicas}}
        for name in ("srl-trainer", "srl-broker", "srl-actor")
    ]
    if budget is not None:
        pod = {"spec": {"containers": [{"args": ["budget", *budget]}]}}
        items.append({"metadata": {"name": "srl-budget"}, "spec": {"replicas": 1, "template": pod}})
    config_map = {"data": {"account": json.dumps({"counted_s": 0.0, **(account or {})})}}
    return (
        f"case \"$*\" in *statefulsets*) echo '{json.dumps({'items': items})}' ;; "
        f"*configmap*) echo '{json.dumps(config_map)}' ;; esac"
    )


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("echo 'error: current-context is not set' >&2; exit 1", ["status"], "get-contexts"),
        ("echo 'The connection to the server x was refused - connection refused' >&2; exit 1", ["status"], "running"),
        ("echo 'Error from server (Forbidden): pods is forbidden' >&2; exit 1", ["scale", "3"], "ask for the right"),
        ("echo 'error: You must be logged in to the server' >&2; exit 1", ["status"], "log in again"),
        (
            "echo 'Error from server (NotFound): deployments.apps \"srl-actor\" not found' >&2; exit 1",
            ["scale", "3"],
            "nothing is deployed there",
        ),
        (
            deployed(version="0.0.1"),
            ["apply", "kind", "--yes"],
            "has SRL 0.0.1.*--upgrade",
        ),
        (
            deployed(budget=["--max-cost=5.0", "--usd-per-hour=1.0"], account={"hours": 4.1, "usd": 5.02}),
            ["apply", "kind", "--yes"],
            r"budget of 5\.00 USD is spent \(5\.02 USD in 4\.1 hours\); raise it with --max-cost",
        ),
        ("", ["dashboard"], "there is no dashboard there"),
        (deployed(replicas=0), ["connect"], "scaled to zero, do so with srl deploy apply"),
        (
            'case "$*" in *statefulsets*) echo \'{"items": []}\' ;; *secret*) echo "no room" >&2; exit 1 ;; esac',
            ["apply", "kind", "--yes"],
            "(?s)no room.*still there.*srl deploy delete",
        ),
    ],
)
def test_what_is_wrong_is_said_with_a_next_step(script: str, arguments: list[str], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["deploy", *arguments], env=kubectl(tmp_path, script))
    assert done.exit_code == 2 and re.search(says, done.output), done.output


def test_no_kubectl_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["deploy", "status"], env={"PATH": str(tmp_path)})
    assert done.exit_code == 2 and "kubectl is not installed" in done.output


# What a pod and an event say, what is told, and whether time may mend it.
TROUBLES = {
    "no node": (
        {
            "conditions": [
                {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient nvidia.com/gpu"}
            ]
        },
        {},
        "srl-x-0 has no node yet: .*Insufficient nvidia.com/gpu",
        False,
    ),
    "no image": (
        {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}]},
        {},
        "srl-x-0: ImagePullBackOff: not found .*check the image's name",
        True,
    ),
    "no memory": (
        {"containerStatuses": [{"state": {"running": {}}, "lastState": {"terminated": {"reason": "OOMKilled"}}}]},
        {},
        "srl-x-0 was killed for its memory",
        False,
    ),
    "no secret": (
        {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
        {
            "reason": "FailedMount",
            "message": 'secret "tls" not found',
            "involvedObject": {"kind": "Pod", "name": "srl-x-0"},
        },
        'srl-x-0: FailedMount: secret "tls" not found',
        False,
    ),
    "no pod": (
        {},
        {
            "reason": "FailedCreate",
            "message": "exceeded quota",
            "involvedObject": {"kind": "ReplicaSet", "name": "srl-y-1f"},
        },
        "srl-y: FailedCreate: exceeded quota",
        False,
    ),
}


@pytest.mark.parametrize(("status", "event", "says", "is_final"), TROUBLES.values(), ids=TROUBLES)
def test_what_keeps_pods_from_running_is_said(
    status: dict[str, Any], event: dict[str, Any], says: str, is_final: bool
) -> None:
    pod = {"metadata": {"name": "srl-x-0", "ownerReferences": [{"kind": "StatefulSet", "name": "srl-x"}]}}
    [text], found_final = problems([pod | {"status": status}], [event] if event else [])
    assert re.match(says, text) and found_final == is_final


def test_trouble_that_is_over_is_not_told() -> None:
    """Events stay for an hour, and so do pods that are being deleted for a while."""
    running = {"containerStatuses": [{"state": {"running": {}}}]}
    waiting = {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}
    owner = [{"kind": "ReplicaSet", "name": "srl-x-2"}]
    pods = [
        {"metadata": {"name": "srl-x-2-a", "ownerReferences": owner}, "status": running},
        {"metadata": {"name": "srl-x-1-a", "deletionTimestamp": "now"}, "status": waiting},
    ]
    events = [
        {"reason": "FailedMount", "message": "", "involvedObject": {"kind": "Pod", "name": "srl-x-2-a"}},
        {"reason": "FailedCreate", "message": "", "involvedObject": {"kind": "ReplicaSet", "name": "srl-x-1"}},
    ]
    assert problems(pods, events) == ([], False)


def test_who_stops_connecting_leaves_no_kubectl_behind(tmp_path: Path) -> None:
    forwards = f"*port-forward*) echo $$ > {tmp_path}/pid; exec sleep 600 ;;"
    secret = f'case "$*" in *secret*) printf Zm9v ;; {forwards} esac'
    environment = kubectl(tmp_path, f"{deployed()}; {secret}")
    command = [sys.executable, "-m", "srl.cli", "deploy", "connect", "--port", "1"]
    with subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL) as process:
        pid = until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        process.terminate()
        assert process.wait(20) == 143
    until(lambda: not is_alive(int(pid)), what="the end of kubectl")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
