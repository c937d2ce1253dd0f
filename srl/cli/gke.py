"""`srl gke`: a cluster on Google Kubernetes Engine for an afternoon, by gcloud; it shows each command before."""

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from srl.base.errors import SrlError, WorkerError
from srl.cli.kubectl import Kubectl

REPOSITORY = "srl"
SYSTEM_MACHINE = "e2-standard-2"
MACHINES = {"nvidia-tesla-t4": "n1-standard-4", "nvidia-l4": "g2-standard-4"}
"""The smallest machine that each GPU can be had with."""
ACTOR_MACHINE, ACTORS_PER_MACHINE = "e2-standard-4", 4
"""An actor uses a core."""
_HINTS = (
    ("active account|auth login|Reauthentication", "log in: gcloud auth login"),
    (r"property \[(core/)?project\]|project.*must be specified", "name the project with --project"),
    (
        "SERVICE_DISABLED|has not been used in project|API .*not enabled",
        "gcloud services enable container.googleapis.com",
    ),
    ("billing", "the project needs a billing account: https://console.cloud.google.com/billing"),
    ("quota", "ask for more of it: https://console.cloud.google.com/iam-admin/quotas (for GPUs: GPUS_ALL_REGIONS)"),
    ("accelerator", "gcloud compute accelerator-types list --filter=name=nvidia-tesla-t4 shows the zones that have it"),
    (
        "RESOURCE_POOL_EXHAUSTED|STOCKOUT|does not have enough resources",
        "the zone has none left now; try another --zone",
    ),
    (
        "PERMISSION_DENIED|[Pp]ermission",
        "your account needs the roles Kubernetes Engine Admin and Artifact Registry Admin",
    ),
)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Cluster:
    """What is to be there."""

    project: str
    zone: str
    name: str

    @property
    def region(self) -> str:
        """The zone's region: `us-central1` of `us-central1-a`."""
        return self.zone.rpartition("-")[0]

    @property
    def registry(self) -> str:
        """Where the images are."""
        return f"{self.region}-docker.pkg.dev/{self.project}/{REPOSITORY}"

    @property
    def context(self) -> str:
        """Name by which kubectl knows it, once credentials were fetched."""
        return f"gke_{self.project}_{self.zone}_{self.name}"


@dataclass(frozen=True)
class Step:
    """Something to make: how to see whether it is there, and how to make it (arguments of gcloud)."""

    what: str
    find: tuple[str, ...]
    make: tuple[str, ...]


def steps_up(cluster: Cluster, gpu: str, gpu_spot: bool, most_actors: int) -> list[Step]:
    """Return what a run needs, in the order in which it is made."""
    place = ("--project", cluster.project)
    zone = (*place, "--zone", cluster.zone)
    repository = ("artifacts", "repositories")
    where = (REPOSITORY, *place, "--location", cluster.region)
    clusters, pools = ("container", "clusters"), ("container", "node-pools")
    pool = ("--cluster", cluster.name, *zone)
    nodes = -(-most_actors // ACTORS_PER_MACHINE)
    trainer = (
        "--machine-type",
        MACHINES[gpu],
        "--num-nodes",
        "1",
        # None where all is scaled to zero, as when a budget is spent.
        *("--enable-autoscaling", "--min-nodes", "0", "--max-nodes", "1"),
        "--accelerator",
        f"type={gpu},count=1,gpu-driver-version=default",
    )
    spot = ("--spot",) if gpu_spot else ()
    actors = ("--spot", "--machine-type", ACTOR_MACHINE, "--num-nodes", "0", "--enable-autoscaling")
    return [
        Step(
            "the services",
            (),
            ("services", "enable", "container.googleapis.com", "artifactregistry.googleapis.com", *place),
        ),
        Step(
            f"the repository {REPOSITORY} for images",
            (*repository, "describe", *where),
            (*repository, "create", *where, "--repository-format", "docker"),
        ),
        Step(
            f"the cluster {cluster.name}",
            (*clusters, "describe", cluster.name, *zone),
            # Data plane V2 is what enforces network policies.
            (*clusters, "create", cluster.name, *zone, "--num-nodes", "1", "--machine-type", SYSTEM_MACHINE,
             "--enable-dataplane-v2", "--labels", "app=srl"),
        ),
        Step(
            f"the trainer's node, {MACHINES[gpu]} with {gpu}",
            (*pools, "describe", "trainer", *pool),
            (*pools, "create", "trainer", *pool, *trainer, *spot),
        ),
        Step(
            f"up to {nodes} Spot nodes for actors, none yet",
            (*pools, "describe", "actors", *pool),
            (*pools, "create", "actors", *pool, *actors, "--min-nodes", "0", "--max-nodes", str(nodes)),
        ),
        Step("credentials for kubectl", (), (*clusters, "get-credentials", cluster.name, *zone)),
    ]  # fmt: skip


def leftovers(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Return the commands that list what may still cost after everything was deleted."""
    place, name = ("--project", cluster.project, "--format", "value(name)"), re.escape(cluster.name)
    return {
        "clusters": ("container", "clusters", "list", *place, "--filter", f"name={cluster.name}"),
        "machines": ("compute", "instances", "list", *place, "--filter", f"name~^gke-{name}-"),
        "disks": ("compute", "disks", "list", *place, "--filter", f"name~^(gke-{name}-|pvc-)"),
        "load balancers": ("compute", "forwarding-rules", "list", *place, "--filter", "description~srl/srl-broker"),
        "image repositories": ("artifacts", "repositories", "list", *place, "--location", cluster.region,
                               "--filter", f"name~/{REPOSITORY}$"),
    }  # fmt: skip


class Gcloud:
    """Runs gcloud, each command shown before; with `dry_run` it is only shown."""

    def __init__(self, *, dry_run: bool) -> None:
        self.dry_run = dry_run

    def run(self, arguments: Sequence[str], *, quiet: bool = False) -> str:
        """Run a command and return its output."""
        done = self._call(arguments, quiet=quiet)
        if done.returncode:
            raise SrlError(_failure(arguments, done.stderr))
        return done.stdout

    def finds(self, arguments: Sequence[str]) -> bool:
        """Whether something is there; in a dry run nothing is."""
        done = self._call(arguments, quiet=True)
        if done.returncode == 0:
            return not self.dry_run
        if re.search("NOT_FOUND|[Nn]ot found|does not exist|code=404", done.stderr):
            return False
        raise SrlError(_failure(arguments, done.stderr))

    def _call(self, arguments: Sequence[str], *, quiet: bool) -> subprocess.CompletedProcess[str]:
        if self.dry_run or not quiet:
            click.echo(f"$ gcloud {shlex.join(arguments)}")
        if self.dry_run:
            return subprocess.CompletedProcess([], 0, "", "")
        found = shutil.which("gcloud")
        if found is None:
            raise SrlError("gcloud is not installed; see https://cloud.google.com/sdk/docs/install")
        return subprocess.run([found, *arguments, "--quiet"], capture_output=True, text=True)


@click.group()
def gke() -> None:
    """A cluster on Google Kubernetes Engine for a run, and back to nothing.

    \b
    Examples:
      srl gke cost --actors 8 --hours 4
      srl gke up --project my-project --dry-run
      srl gke image --project my-project
      srl gke down --project my-project
    """  # noqa: D301


def _cluster_options(command: F) -> F:
    for option in (
        click.option("--name", default="srl", show_default=True, help="Of the cluster."),
        click.option("--zone", default="us-central1-a", show_default=True),
        click.option("--project", required=True, help="Google Cloud project that pays."),
    ):
        command = option(command)
    return command


def _size_options(command: F) -> F:
    for option in (
        click.option(
            "--gpu-spot", is_flag=True, help="Also the trainer on a Spot machine: cheaper, and taken away at times."
        ),
        click.option("--gpu", type=click.Choice(tuple(MACHINES)), default="nvidia-tesla-t4", show_default=True),
        click.option("--actors", type=click.IntRange(min=1), default=8, show_default=True, help="At most."),
    ):
        command = option(command)
    return command


@gke.command()
@_cluster_options
@_size_options
@click.option("--dry-run", is_flag=True, help="Only show the commands.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def up(project: str, zone: str, name: str, actors: int, gpu: str, gpu_spot: bool, dry_run: bool, yes: bool) -> None:
    """Make cluster, node pools and image repository; what is there already stays as it is."""
    cluster, gcloud = Cluster(project, zone, name), Gcloud(dry_run=dry_run)
    if not (dry_run or yes):
        lines, _ = estimate(read_prices(None), actors, gpu, gpu_spot, hours=1.0)
        click.echo("\n".join(["an hour of it:", *lines]))
        click.confirm(f"Make it in {project}, {zone}? It costs until srl gke down", abort=True)
    made: list[str] = []
    for step in steps_up(cluster, gpu, gpu_spot, actors):
        if step.find and gcloud.finds(step.find):
            click.echo(f"{step.what}: there already, and left as it is")
            continue
        click.echo(f"{step.what}:")
        try:
            gcloud.run(step.make)
        except SrlError as error:
            so_far = f"made so far: {', '.join(made) or 'nothing'}; go on with the same command, or srl gke down"
            raise SrlError(f"{error}\n{so_far}") from error
        made.append(step.what)
    click.echo(f"next: srl gke image --project {project}, srl deploy apply gke --registry {cluster.registry}")


@gke.command()
@_cluster_options
@click.option("--tag", default="latest", show_default=True)
@click.option("--dry-run", is_flag=True, help="Only show the commands.")
def image(project: str, zone: str, name: str, tag: str, dry_run: bool) -> None:
    """Build the images in a clone of the repository, and push them to the cluster's registry."""
    cluster = Cluster(project, zone, name)
    script = Path("deploy/build-images")
    if not script.exists():
        raise SrlError(f"there is no {script} here; run this in a clone of the repository")
    builder = next(filter(shutil.which, ("docker", "podman")), None)
    if builder is None and not dry_run:
        raise SrlError("install docker or podman, which build and push the images")
    Gcloud(dry_run=dry_run).run(["auth", "configure-docker", f"{cluster.region}-docker.pkg.dev"])
    builder = builder or "docker"
    # The cluster's machines are x86-64, also where this one is not.
    variables = {"REGISTRY": cluster.registry, "TAG": tag, "ACCELERATOR": "cuda12", "PLATFORM": "linux/amd64",
                 "BUILDER": builder}  # fmt: skip
    commands = [
        [str(script)],
        *([builder, "push", f"{cluster.registry}/srl-{role}:{tag}"] for role in ("actor", "trainer")),
    ]
    for command in commands:
        click.echo(f"$ {' '.join(f'{k}={v}' for k, v in variables.items())} {shlex.join(command)}")
        if not dry_run and subprocess.run(command, env={**os.environ, **variables}).returncode:
            raise WorkerError(f"{shlex.join(command)} failed")


@gke.command()
@_cluster_options
@click.option("--dry-run", is_flag=True, help="Only show the commands.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def down(project: str, zone: str, name: str, dry_run: bool, yes: bool) -> None:
    """Delete all of it, volumes and images included, and list what may still cost."""
    cluster, gcloud = Cluster(project, zone, name), Gcloud(dry_run=dry_run)
    if not (dry_run or yes):
        click.confirm(f"Delete the cluster {name} of {project} with all its volumes and images?", abort=True)
    where = ("--project", project)
    if gcloud.finds(("container", "clusters", "describe", name, *where, "--zone", zone)) or dry_run:
        # Disks of volumes outlive a cluster unless their claims went before it.
        click.echo(f"$ kubectl --context {cluster.context} delete namespace srl --ignore-not-found --wait=true")
        if not dry_run:
            try:
                Kubectl(cluster.context).run("delete", "namespace", "srl", "--ignore-not-found", "--wait=true")
            except SrlError as error:
                click.echo(f"{error}\nits volumes may be left; see below", err=True)
        gcloud.run(("container", "clusters", "delete", name, *where, "--zone", zone))
    location = ("--location", cluster.region)
    if gcloud.finds(("artifacts", "repositories", "describe", REPOSITORY, *where, *location)) or dry_run:
        gcloud.run(("artifacts", "repositories", "delete", REPOSITORY, *where, *location))
    left = {what: gcloud.run(command).split() for what, command in leftovers(cluster).items()}
    if any(left.values()):
        texts = [f"{what}: {', '.join(names)}" for what, names in left.items() if names]
        raise WorkerError("still there, and may cost; delete them in the console or by gcloud\n  " + "\n  ".join(texts))
    if not dry_run:
        click.echo("nothing of it is left: no cluster, machine, disk, load balancer or image repository")


@gke.command()
@_size_options
@click.option("--hours", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.option(
    "--prices", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file like srl/cli/prices.toml."
)
def cost(actors: int, gpu: str, gpu_spot: bool, hours: float, prices: Path | None) -> None:
    """Estimate what a run costs, item by item, from a file of prices."""
    known = read_prices(prices)
    lines, _ = estimate(known, actors, gpu, gpu_spot, hours)
    click.echo("\n".join([*lines, budget_line(known, gpu, gpu_spot)]))


def read_prices(path: Path | None) -> dict[str, float]:
    """Return US dollars per hour by item. Raises `SrlError` where the file is not as it should be."""
    file = path or Path(__file__).with_name("prices.toml")
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))["price"]
        return {str(entry["item"]): float(entry["usd_per_hour"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SrlError(f"{file} has no list of [[price]] with item and usd_per_hour: {error!r}") from error


def items(gpu: str, gpu_spot: bool) -> dict[str, list[str]]:
    """Return what the cluster, a trainer and a machine for actors are made of, by names of prices."""
    spot = " spot" if gpu_spot else ""
    # Machines for an L4 come with it.
    extra = [] if gpu == "nvidia-l4" else [f"{gpu}{spot}"]
    return {
        "cluster": ["cluster", SYSTEM_MACHINE],
        "trainer": [f"{MACHINES[gpu]}{spot}", *extra],
        "actors": [f"{ACTOR_MACHINE} spot"],
    }


def budget_line(prices: dict[str, float], gpu: str, gpu_spot: bool) -> str:
    """Return the options that give `srl deploy apply` these prices for its budget."""
    each = items(gpu, gpu_spot)
    if missing := [item for names in each.values() for item in names if item not in prices]:
        return f"for a budget in USD the prices of {', '.join(missing)} are needed, too"
    cluster, trainer, machine = (sum(prices[item] for item in names) for names in each.values())
    return (
        f"for a budget: srl deploy apply gke --max-cost USD --usd-per-hour {cluster:.4g} "
        f"--usd-per-trainer-hour {trainer:.4g} --usd-per-actor-hour {machine / ACTORS_PER_MACHINE:.4g}"
    )


def estimate(prices: dict[str, float], actors: int, gpu: str, gpu_spot: bool, hours: float) -> tuple[list[str], float]:
    """Return a table of what is used for so many hours, and the sum of what has a price."""
    counts = {"cluster": 1, "trainer": 1, "actors": -(-actors // ACTORS_PER_MACHINE)}
    used = {item: counts[part] for part, names in items(gpu, gpu_spot).items() for item in names}
    lines, total, missing = [], 0.0, []
    for item, count in used.items():
        price = prices.get(item)
        if price is None:
            missing.append(item)
            lines.append(f"{count:3} x {item:26} {'no price':>12}")
        else:
            total += count * price * hours
            lines.append(f"{count:3} x {item:26} {count * price * hours:12.2f} USD")
    lines.append(
        f"{'at least' if missing else 'together'} for {hours:g} hours {total:18.2f} USD, disks and traffic apart"
    )
    if missing:
        lines.append(f"add {', '.join(missing)} to a file of prices: --prices")
    return lines, total


def _failure(arguments: Sequence[str], said: str) -> str:
    text = f"gcloud {shlex.join(arguments)} failed: {said.strip()}"
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, said)), "")
    return f"{text}\n{hint}" if hint else text
