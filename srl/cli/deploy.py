"""`srl deploy`: the workers on a Kubernetes cluster, by kubectl and the manifests under deploy/kubernetes."""

import base64
import json
import secrets
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import click

from srl.base.errors import SrlError
from srl.cli.options import DIRECTORY

NAMESPACE = "srl"
RECONNECT_S = 2.0


@click.group()
@click.option("--context", help="kubectl's context; by default its current one.")
@click.option("--manifests", type=DIRECTORY, default=Path("deploy/kubernetes"), show_default=True)
@click.pass_context
def deploy(click_context: click.Context, context: str | None, manifests: Path) -> None:
    """Put broker, trainer and actors on a Kubernetes cluster, and reach them from here.

    \b
    Examples:
      srl deploy apply docker-desktop
      srl deploy connect                   # leave it running, train from another terminal
      srl deploy scale 6
      srl deploy delete
    """  # noqa: D301
    click_context.obj = Kubectl(context), manifests


class Kubectl:
    """Runs kubectl in one context; what goes wrong is one message."""

    def __init__(self, context: str | None) -> None:
        self._context = [] if context is None else ["--context", context]

    def command(self, *arguments: str) -> list[str]:
        """Return a command line."""
        found = shutil.which("kubectl")
        if found is None:
            raise SrlError("kubectl is not installed; see https://kubernetes.io/docs/tasks/tools/")
        return [found, *self._context, *arguments]

    def run(self, *arguments: str, text: str | None = None) -> str:
        """Run it, with `text` as its input, and return its output."""
        done = subprocess.run(self.command(*arguments), input=text, capture_output=True, text=True)
        if done.returncode:
            raise SrlError(f"kubectl {' '.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout

    def show(self, *arguments: str) -> None:
        """Run it for people to see."""
        if subprocess.run(self.command(*arguments)).returncode:
            raise SrlError(f"kubectl {' '.join(arguments)} failed")

    def name_of_context(self) -> str:
        """Return which cluster this is about."""
        return self._context[1] if self._context else self.run("config", "current-context").strip()


@deploy.command()
@click.argument("overlay")
@click.pass_obj
def render(target: tuple[Kubectl, Path], overlay: str) -> None:
    """Print the manifests of an overlay (docker-desktop, kind, gke, or a directory of your own)."""
    click.echo(_render(*target, overlay), nl=False)


@deploy.command()
@click.argument("overlay")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def apply(target: tuple[Kubectl, Path], overlay: str, yes: bool) -> None:
    """Create or change what an overlay says, with a random password for the broker the first time."""
    kubectl, _ = target
    rendered = _render(*target, overlay)
    if not yes:
        click.confirm(f"Apply {overlay} to the cluster {kubectl.name_of_context()!r}?", abort=True)
    kubectl.run("apply", "-f", "-", text=json.dumps(_namespace()))
    if not kubectl.run("-n", NAMESPACE, "get", "secret", "srl-broker", "--ignore-not-found", "-o", "name"):
        # By its input: arguments can be seen by everybody on this machine.
        kubectl.run("create", "-f", "-", text=json.dumps(_secret(secrets.token_urlsafe(24))))
        click.echo("a password for the broker was made (secret srl-broker)")
    click.echo(kubectl.run("apply", "-f", "-", text=rendered), nl=False)
    click.echo("next: srl deploy status, srl deploy connect")


@deploy.command()
@click.pass_obj
def status(target: tuple[Kubectl, Path]) -> None:
    """Show pods, volumes and services."""
    target[0].show("-n", NAMESPACE, "get", "pods,persistentvolumeclaims,services", "-o", "wide")


@deploy.command()
@click.argument("actors", type=click.IntRange(min=0))
@click.pass_obj
def scale(target: tuple[Kubectl, Path], actors: int) -> None:
    """Change the number of actors, also while a task runs."""
    click.echo(target[0].run("-n", NAMESPACE, "scale", "deployment/srl-actor", f"--replicas={actors}"), nl=False)


@deploy.command()
@click.argument("role", type=click.Choice(("trainer", "actor", "broker")))
@click.option("--follow", "-f", is_flag=True)
@click.pass_obj
def logs(target: tuple[Kubectl, Path], role: str, follow: bool) -> None:
    """Show what the pods of a role say."""
    options = ["--follow"] if follow else []
    target[0].show("-n", NAMESPACE, "logs", "--prefix", "--tail=100", "-l", f"app.kubernetes.io/name={role}", *options)


@deploy.command()
@click.option("--port", default=6379, show_default=True, help="On this machine.")
@click.pass_obj
def connect(target: tuple[Kubectl, Path], port: int) -> None:
    """Forward a local port to the broker until stopped, and say how to use it; reconnects by itself."""
    kubectl, _ = target
    namespace = ["-n", NAMESPACE]
    encoded = kubectl.run(*namespace, "get", "secret", "srl-broker", "-o", "jsonpath={.data.password}")
    if not base64.b64decode(encoded):
        raise SrlError("the secret srl-broker has no password; apply an overlay first: srl deploy apply")
    command = " ".join(kubectl.command(*namespace)[1:])
    click.echo(
        f"In another terminal:\n\n"
        f"  export SRL_REDIS_URL=redis://127.0.0.1:{port}\n"
        f"  export SRL_REDIS_PASSWORD=$(kubectl {command} get secret srl-broker "
        "-o jsonpath='{.data.password}' | base64 -d)\n\n"
        "and then your script with RedisParameters(), srl train, srl watch, ...\n"
    )
    while True:
        started_s = time.monotonic()
        forward = kubectl.command(*namespace, "port-forward", "service/srl-broker", f"{port}:6379")
        done = subprocess.run(forward, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if "address already in use" in done.stderr:
            raise SrlError(f"port {port} of this machine is in use; choose another one with --port")
        reason = done.stderr.strip().splitlines()[-1:] or ["the connection ended"]
        click.echo(f"{reason[0]}; connecting again", err=True)
        threading.Event().wait(max(0.0, RECONNECT_S - (time.monotonic() - started_s)))


@deploy.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--keep-data", is_flag=True, help="Keep the volumes, with the replay memory and the tasks.")
@click.pass_obj
def delete(target: tuple[Kubectl, Path], yes: bool, keep_data: bool) -> None:
    """Remove everything from the cluster, volumes included unless told otherwise."""
    kubectl, _ = target
    if not yes:
        what = "all but the volumes" if keep_data else "everything, volumes included"
        click.confirm(f"Delete {what} of SRL from the cluster {kubectl.name_of_context()!r}?", abort=True)
    if keep_data:
        kinds = "statefulsets,deployments,services,configmaps,networkpolicies"
        click.echo(kubectl.run("-n", NAMESPACE, "delete", kinds, "-l", "app.kubernetes.io/part-of=srl"), nl=False)
        return
    click.echo(kubectl.run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=true"), nl=False)
    left = kubectl.run("get", "persistentvolumes", "-o", "json")
    claims = [item["spec"].get("claimRef", {}) for item in json.loads(left)["items"]]
    kept = sum(claim.get("namespace") == NAMESPACE for claim in claims)
    if kept:
        click.echo(f"{kept} volumes are kept by their reclaim policy and may cost: kubectl get persistentvolumes")
    sys.stdout.flush()


def _render(kubectl: Kubectl, manifests: Path, overlay: str) -> str:
    own, known = Path(overlay), manifests / "overlays" / overlay
    directory = known if known.is_dir() else own
    if not (directory / "kustomization.yaml").exists():
        overlays = sorted(path.name for path in (manifests / "overlays").glob("*/")) if manifests.is_dir() else []
        hint = f"overlays there: {', '.join(overlays)}" if overlays else f"there is no {manifests}; see --manifests"
        raise SrlError(f"{overlay!r} is neither an overlay of {manifests} nor a directory with one; {hint}")
    return kubectl.run("kustomize", str(directory))


def _namespace() -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}


def _secret(password: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "srl-broker", "namespace": NAMESPACE, "labels": {"app.kubernetes.io/part-of": "srl"}},
        "stringData": {"password": password, "requirepass.conf": f"requirepass {password}\n"},
    }
