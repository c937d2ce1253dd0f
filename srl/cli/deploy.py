"""`srl deploy`: the workers on a Kubernetes cluster, by kubectl and the manifests of deploy/kubernetes."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

import srl
from srl.base.errors import SrlError, WorkerError
from srl.cli.budget import ACCOUNT, Account, Budget, account_in, budget_options
from srl.cli.kubectl import Kubectl, problems
from srl.cli.options import DIRECTORY
from srl.runner.progress import bill_text
from srl.runner.status import Bill

NAMESPACE = "srl"
_IN = ("-n", NAMESPACE)
IMAGES = ("srl-actor", "srl-trainer", "srl-broker")
WORKLOADS = "statefulsets,deployments"
# What an overlay may have, and `apply` and `delete` take away. Not what holds data: claims, secrets, the namespace.
KINDS = f"{WORKLOADS},services,configmaps,networkpolicies,poddisruptionbudgets,horizontalpodautoscalers"
# The budget's keeper, its account, and the rights that it has only where it is told to use them.
BUDGET = (
    *("deployment/srl-budget", "networkpolicy/srl-budget", "rolebinding/srl-budget", "role/srl-budget"),
    *("serviceaccount/srl-budget", f"configmap/{ACCOUNT}"),
)
_SCALE = {
    "apiGroups": ["apps"],
    "resources": ["deployments/scale", "statefulsets/scale"],
    "resourceNames": ["srl-actor", "srl-trainer", "srl-broker", "srl-dashboard"],
    "verbs": ["patch"],
}
_DELETE = {"apiGroups": [""], "resources": ["namespaces"], "resourceNames": [NAMESPACE], "verbs": ["delete"]}
BUDGET_RULES = {"scale-to-zero": [_SCALE], "delete": [_DELETE]}
PART_LABEL, PART = "app.kubernetes.io/part-of", "srl"
VERSION_LABEL = "app.kubernetes.io/version"
POLL_S = 2.0
RECONNECT_S = 2.0


@dataclass(frozen=True)
class Target:
    """Which cluster, and where the manifests are."""

    kubectl: Kubectl
    manifests: Path


@click.group()
@click.option("--context", help="kubectl's context; by default its current one.")
@click.option("--manifests", type=DIRECTORY, help="In place of those that came with this srl (deploy/kubernetes).")
@click.pass_context
def deploy(click_context: click.Context, context: str | None, manifests: Path | None) -> None:
    """Put broker, trainer and actors on a Kubernetes cluster, and reach them from here.

    \b
    Examples:
      srl deploy apply docker-desktop
      srl deploy connect                   # leave it running, train from another terminal
      srl deploy dashboard                 # leave it running, and open the address it prints
      srl deploy scale 6
      srl deploy delete
    """  # noqa: D301
    click_context.obj = Target(Kubectl(context), manifests or _own_manifests())


_overlay = click.argument("overlay")
_registry = click.option("--registry", help="Where the images are: REGISTRY/srl-actor, REGISTRY/srl-trainer, ...")
_tag = click.option("--tag", help="Of the images.")


@deploy.command()
@_overlay
@_registry
@_tag
@click.pass_obj
def render(target: Target, overlay: str, registry: str | None, tag: str | None) -> None:
    """Print the manifests of an overlay (docker-desktop, kind, gke, ... or a directory of your own)."""
    click.echo(_render(target, overlay, registry, tag), nl=False)


@deploy.command()
@_overlay
@_registry
@_tag
@click.option("--yes", is_flag=True, help="Do not ask.")
@budget_options
@click.option("--no-budget", is_flag=True, help="Without the budget there was, and forget what was spent.")
@click.option("--upgrade", is_flag=True, help="Also where another version of SRL is deployed.")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds to wait for the pods; 0: none.")
@click.pass_obj
def apply(
    target: Target,
    /,
    overlay: str,
    registry: str | None,
    tag: str | None,
    yes: bool,
    no_budget: bool,
    upgrade: bool,
    timeout_s: float,
    **budget: Any,
) -> None:
    """Create or change what an overlay says, and wait until all pods are ready.

    The first time it makes random passwords for the broker. What it changes in a running deployment is
    replaced pod by pod; the run goes on. The number of actors stays as `srl deploy scale` left it; what the
    overlay has no longer is removed.

    A budget is counted from the first time that one is given, until `srl deploy delete` or --no-budget, by a pod
    of its own; what is not given again stays.
    """
    kubectl = target.kubectl
    deployed = _deployed(kubectl)
    if no_budget and any(budget.values()):
        raise click.UsageError("--no-budget goes with no other option of a budget")
    wanted = None if no_budget else Budget.from_options(budget, deployed.budget)
    if wanted is not None and (spent := _bill(kubectl, wanted).spent):
        raise SrlError(f"{spent}; raise it with --max-cost or --max-hours, or forget it with --no-budget")
    rendered = _render(target, overlay, registry, tag, deployed.actors, wanted)
    if deployed.version not in (None, srl.__version__) and not upgrade:
        raise SrlError(
            f"the cluster has SRL {deployed.version}, this is SRL {srl.__version__}; --upgrade replaces it, "
            "and tasks that run there end where the two do not understand each other"
        )
    if not yes:
        click.confirm(f"Apply {overlay} to the cluster {kubectl.name_of_context()!r}?", abort=True)
    kubectl.run("apply", "-f", "-", text=json.dumps(_namespace()))
    try:
        if not kubectl.run(*_IN, "get", "secret", "srl-broker", "--ignore-not-found", "-o", "name"):
            # By its input: arguments can be seen by everybody on this machine.
            kubectl.run("create", "-f", "-", text=json.dumps(_secret()))
            click.echo("passwords for the broker were made (secret srl-broker)")
        click.echo(kubectl.run("apply", "-f", "-", text=rendered), nl=False)
        if no_budget:
            click.echo(kubectl.run(*_IN, "delete", "--ignore-not-found", *BUDGET), nl=False)
        _remove_what_is_not_in(rendered, kubectl)
    except SrlError as error:
        raise SrlError(
            f"{error}\nwhat was made before that is still there: mend the cause and apply again, or srl deploy delete"
        ) from error
    if deployed.actors is not None:
        click.echo(f"actors: {deployed.actors}, as before; srl deploy scale changes that")
    if timeout_s:
        _wait_until_ready(kubectl, timeout_s)
    click.echo("next: srl deploy connect")


@deploy.command()
@click.pass_obj
def status(target: Target) -> None:
    """Show pods, volumes and services, and what keeps pods from running."""
    target.kubectl.show(*_IN, "get", "pods,persistentvolumeclaims,services", "-o", "wide")
    for text in _problems(target.kubectl, target.kubectl.items(WORKLOADS, *_IN))[0]:
        click.echo(text)
    budget = _deployed(target.kubectl).budget
    if budget is not None:
        bill = _bill(target.kubectl, budget)
        click.echo(f"cost {bill_text(bill)}{f'; {bill.spent}' if bill.spent else ''}")


@deploy.command()
@click.argument("actors", type=click.IntRange(min=0))
@click.pass_obj
def scale(target: Target, actors: int) -> None:
    """Change the number of actors, also while a task runs."""
    click.echo(target.kubectl.run(*_IN, "scale", "deployment/srl-actor", f"--replicas={actors}"), nl=False)


@deploy.command()
@click.argument("role", type=click.Choice(("trainer", "actor", "broker", "dashboard", "budget")))
@click.option("--follow", "-f", is_flag=True)
@click.pass_obj
def logs(target: Target, role: str, follow: bool) -> None:
    """Show what the pods of a role say."""
    options = ["--follow"] if follow else []
    target.kubectl.show(*_IN, "logs", "--prefix", "--tail=100", "-l", f"app.kubernetes.io/name={role}", *options)


@deploy.command()
@click.option("--port", default=6379, show_default=True, help="On this machine.")
@click.pass_obj
def connect(target: Target, port: int) -> None:
    """Forward a local port to the broker until stopped, and say how to use it; reconnects by itself."""
    kubectl = target.kubectl
    deployed = _deployed(kubectl)
    if deployed.is_at_zero:
        spent = _bill(kubectl, deployed.budget).spent if deployed.budget else ""
        reason = f": {spent}; raise it" if spent else ", do so"
        raise SrlError(f"the broker was scaled to zero{reason} with srl deploy apply, what it had is kept")
    encoded = kubectl.run(*_IN, "get", "secret", "srl-broker", "-o", "jsonpath={.data.client}")
    if not base64.b64decode(encoded):
        raise SrlError("the secret srl-broker has no password for clients; apply an overlay first: srl deploy apply")
    command = " ".join(["kubectl", *kubectl.command(*_IN)[1:], "get secret"])
    scheme, options, lines = "redis", "", []
    if deployed.has_tls:
        # The certificate has the names by which others reach the broker; this is a tunnel to it.
        scheme, options = "rediss", "?ssl_ca_certs=srl-ca.crt&ssl_check_hostname=false"
        lines.append(f"{command} srl-broker-tls -o jsonpath='{{.data.ca\\.crt}}' | base64 -d > srl-ca.crt")
    lines.append(f"export SRL_REDIS_URL='{scheme}://client@127.0.0.1:{port}{options}'")
    lines.append(f"export SRL_REDIS_PASSWORD=$({command} srl-broker -o jsonpath='{{.data.client}}' | base64 -d)")
    click.echo("In another terminal:\n\n" + "".join(f"  {line}\n" for line in lines))
    click.echo("and then your script with RedisParameters(), srl train, srl watch, ...\n")
    _forward_on(kubectl, "srl-broker", port, 6379)


@deploy.command()
@click.option("--port", default=8000, show_default=True, help="On this machine.")
@click.pass_obj
def dashboard(target: Target, port: int) -> None:
    """Forward a local port to the dashboard until stopped; reconnects by itself."""
    kubectl = target.kubectl
    if not kubectl.run(*_IN, "get", "service", "srl-dashboard", "--ignore-not-found", "-o", "name"):
        raise SrlError("there is no dashboard there; apply an overlay first: srl deploy apply")
    click.echo(f"dashboard: http://127.0.0.1:{port} (Ctrl-C ends it)")
    _forward_on(kubectl, "srl-dashboard", port, 8000)


def _forward_on(kubectl: Kubectl, service: str, port: int, to_port: int) -> NoReturn:
    # Else SIGTERM would end this process alone, and kubectl would forward on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    told = ""
    while True:
        started_s = time.monotonic()
        reason = _forward(kubectl.command(*_IN, "port-forward", f"service/{service}", f"{port}:{to_port}"))
        if "address already in use" in reason:
            raise SrlError(f"port {port} of this machine is in use; choose another one with --port")
        if reason != told:
            click.echo(f"{reason}; connecting again", err=True)
            told = reason
        threading.Event().wait(max(0.0, RECONNECT_S - (time.monotonic() - started_s)))


@deploy.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--keep-data", is_flag=True, help="Keep the volumes, with the replay memory and the tasks.")
@click.pass_obj
def delete(target: Target, yes: bool, keep_data: bool) -> None:
    """Remove everything from the cluster, volumes included unless told otherwise."""
    kubectl = target.kubectl
    if not yes:
        what = "all but the volumes" if keep_data else "everything, volumes included"
        click.confirm(f"Delete {what} of SRL from the cluster {kubectl.name_of_context()!r}?", abort=True)
    if keep_data:
        click.echo(kubectl.run(*_IN, "delete", KINDS, "-l", f"{PART_LABEL}={PART}"), nl=False)
        click.echo(kubectl.run(*_IN, "delete", "--ignore-not-found", *BUDGET), nl=False)
        kept = kubectl.run(*_IN, "get", "persistentvolumeclaims", "-o", "name").split()
        click.echo(f"kept for the next srl deploy apply, and may cost: {' '.join(kept)}")
        return
    claims = [item["spec"].get("volumeName") for item in kubectl.items("persistentvolumeclaims", *_IN)]
    click.echo(kubectl.run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=true"), nl=False)
    # A volume whose class says so goes with its claim, a moment later.
    left = [v for v in kubectl.items("persistentvolumes") if v["metadata"]["name"] in claims]
    kept = [v["metadata"]["name"] for v in left if v["spec"]["persistentVolumeReclaimPolicy"] == "Retain"]
    if kept:
        click.echo(f"kept by their reclaim policy, and may cost: kubectl delete persistentvolume {' '.join(kept)}")


def _own_manifests() -> Path:
    """Return the manifests of this srl: beside its modules where it was installed, in the repository where not."""
    package = Path(srl.__file__).parent
    installed = package / "kubernetes"
    return installed if installed.is_dir() else package.parent / "deploy" / "kubernetes"


def _render(
    target: Target,
    overlay: str,
    registry: str | None,
    tag: str | None,
    actors: int | None = None,
    budget: Budget | None = None,
) -> str:
    own, overlays = Path(overlay), target.manifests / "overlays"
    directory = overlays / overlay if (overlays / overlay).is_dir() else own
    if not (directory / "kustomization.yaml").exists():
        known = sorted(path.name for path in overlays.glob("*/")) if overlays.is_dir() else []
        hint = f"known: {', '.join(known)}" if known else f"there is no {overlays}; see --manifests"
        raise SrlError(f"{overlay!r} is neither an overlay nor a directory with a kustomization.yaml; {hint}")
    images = [
        {"name": name, **({"newName": f"{registry}/{name}"} if registry else {}), **({"newTag": tag} if tag else {})}
        for name in IMAGES
    ]
    with tempfile.TemporaryDirectory() as folder:
        # JSON is YAML. kustomize takes relative paths only, and resolves links before it compares.
        def relative(path: Path) -> str:
            return os.path.relpath(path.resolve(), Path(folder).resolve())

        patches = []
        if actors is not None:
            count = {"op": "add", "path": "/spec/replicas", "value": actors}
            patches.append(_patch("Deployment", "srl-actor", count))
        if budget is not None:
            arguments = {"op": "add", "path": "/spec/template/spec/containers/0/args", "value": budget.arguments()}
            patches.append(_patch("Deployment", "srl-budget", arguments))
            for rule in BUDGET_RULES.get(budget.when_spent, ()):
                patches.append(_patch("Role", "srl-budget", {"op": "add", "path": "/rules/-", "value": rule}))
        kustomization = {
            "resources": [relative(directory)],
            "components": [relative(target.manifests / "components" / "budget")] if budget else [],
            "patches": patches,
            "labels": [{"pairs": {VERSION_LABEL: srl.__version__, PART_LABEL: PART}}],
            "images": images if registry or tag else [],
        }
        Path(folder, "kustomization.yaml").write_text(json.dumps(kustomization))
        return target.kubectl.run("kustomize", folder)


def _patch(kind: str, name: str, *operations: dict[str, Any]) -> dict[str, Any]:
    return {"target": {"kind": kind, "name": name}, "patch": json.dumps(operations)}


@dataclass(frozen=True)
class _Deployed:
    """What the cluster has: version of SRL, number of actors, budget; None where it has nothing."""

    version: str | None = None
    actors: int | None = None
    budget: Budget | None = None
    has_tls: bool = False
    is_at_zero: bool = False
    """Whether its budget's keeper, or somebody else, scaled all of it to zero."""


def _deployed(kubectl: Kubectl) -> _Deployed:
    there = {item["metadata"]["name"]: item for item in kubectl.items(WORKLOADS, *_IN)}
    actor, keeper = there.get("srl-actor"), there.get("srl-budget")
    budget = None
    if keeper is not None:
        budget = Budget.from_arguments(keeper["spec"]["template"]["spec"]["containers"][0]["args"])
    if actor is None:
        return _Deployed(budget=budget)
    version = actor["metadata"].get("labels", {}).get(VERSION_LABEL)
    has_tls = "rediss://" in json.dumps(actor["spec"].get("template", {}))
    if not any(there[name]["spec"]["replicas"] for name in ("srl-trainer", "srl-broker") if name in there):
        return _Deployed(version, None, budget, has_tls, is_at_zero=True)  # how many there should be, the overlay says
    return _Deployed(version, actor["spec"]["replicas"], budget, has_tls)


def _bill(kubectl: Kubectl, budget: Budget) -> Bill:
    """Return what was spent until the keeper of a budget counted last."""
    text = kubectl.run(*_IN, "get", "configmap", ACCOUNT, "--ignore-not-found", "-o", "json")
    account = account_in(json.loads(text)) if text else Account(counted_s=time.time())
    return budget.bill(account.hours, account.usd, account.usd_per_hour)


def _remove_what_is_not_in(rendered: str, kubectl: Kubectl) -> None:
    """Remove what an overlay applied earlier had and this one has not: a public load balancer must not stay open."""
    wanted = kubectl.run("get", "-f", "-", "-o", "name", text=rendered).split()
    there = kubectl.run(*_IN, "get", KINDS, "-l", f"{PART_LABEL}={PART}", "-o", "name").split()
    if stale := sorted(set(there) - set(wanted)):
        click.echo(kubectl.run(*_IN, "delete", *stale), nl=False)


def _problems(kubectl: Kubectl, workloads: list[dict[str, Any]]) -> tuple[list[str], bool]:
    def images(spec: dict[str, Any]) -> set[str]:
        return {container["image"] for container in spec["containers"]}

    wanted = set().union(*(images(item["spec"]["template"]["spec"]) for item in workloads))
    # A pod with another image is there only until the one that replaces it is ready: its trouble is over.
    pods = [pod for pod in kubectl.items("pods", *_IN) if images(pod["spec"]) & wanted]
    return problems(pods, kubectl.items("events", *_IN, "--field-selector=type=Warning"))


def _wait_until_ready(kubectl: Kubectl, timeout_s: float) -> None:
    """Wait for all pods, telling of what changes; raises `WorkerError` that says what keeps them from running."""
    deadline_s, told = time.monotonic() + timeout_s, ""
    while True:
        workloads = kubectl.items(WORKLOADS, *_IN)
        waiting = [item["metadata"]["name"] for item in workloads if not _is_ready(item)]
        if not waiting:
            click.echo("all pods are ready")
            return
        reasons, is_final = _problems(kubectl, workloads)
        text = f"waiting for {', '.join(waiting)}" + "".join(f"\n  {reason}" for reason in reasons)
        if is_final or time.monotonic() > deadline_s:
            raise WorkerError(f"not all pods are ready; srl deploy status shows them\n{text}")
        if text != told:
            click.echo(text)
            told = text
        threading.Event().wait(POLL_S)


def _is_ready(workload: dict[str, Any]) -> bool:
    status, wanted = workload["status"], workload["spec"]["replicas"]
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "readyReplicas")]
    return counts == [wanted] * 3 and bool(status.get("observedGeneration", 0) >= workload["metadata"]["generation"])


def _forward(command: list[str]) -> str:
    """Forward a port until that ends or fails, and return why."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            reason = "the connection ended"
            for line in process.stderr:
                reason = line.strip()
                # Some versions of kubectl go on although the pod is another one by now.
                if re.search("an error occurred forwarding|lost connection", line):
                    break
        finally:
            process.terminate()
    return re.sub(r"^[IWE]\d+ .*?\] ", "", reason)


def _namespace() -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}


def _secret() -> dict[str, object]:
    """Return new passwords for the broker's users, and the file by which it knows them."""
    from srl.runner.distribution.accounts import ROLES, acl_file, new_password

    passwords = {role: new_password() for role in ROLES}
    data = {str(role): password for role, password in passwords.items()} | {"users.acl": acl_file(passwords)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "srl-broker", "namespace": NAMESPACE, "labels": {"app.kubernetes.io/part-of": "srl"}},
        "stringData": data,
    }
