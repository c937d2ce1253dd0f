"""`srl gke`: its command lines are gcloud's, and it says what is there, what is missing and what is left."""

import re
import shlex
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from srl.cli.gke import MACHINES, Cluster, leftovers, steps_up
from srl.cli.main import cli

CLUSTER = Cluster("my-project", "us-central1-a", "srl")
COMMANDS = {
    shlex.join(command): command
    for gpu in MACHINES
    for spot in (False, True)
    for step in steps_up(CLUSTER, gpu, spot, 8)
    for command in (step.find, step.make)
    if command
}
COMMANDS |= {shlex.join(command): command for command in leftovers(CLUSTER).values()}
COMMANDS |= {
    "delete cluster": ("container", "clusters", "delete", "srl", "--project", "p", "--zone", "us-central1-a"),
    "delete repository": ("artifacts", "repositories", "delete", "srl", "--project", "p", "--location", "us-central1"),
    "docker": ("auth", "configure-docker", "us-central1-docker.pkg.dev"),
}


def srl(*arguments: str, path: Path | None = None, answers: str = "") -> Result:
    environment = {} if path is None else {"PATH": f"{path}:/usr/bin:/bin"}
    return CliRunner().invoke(cli, ["gke", *arguments], env=environment, input=answers)


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_knows_every_command_and_flag(tmp_path: Path) -> None:
    """It checks flags before it looks for an account, of which there is none in an empty configuration."""
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path)}
    unknown = subprocess.run(
        ["gcloud", "container", "clusters", "list", "--zonex=a"], capture_output=True, env=environment
    )
    assert unknown.returncode == 2, "this gcloud does not tell unknown flags"
    with ThreadPoolExecutor(4) as several:
        answers = several.map(
            lambda command: subprocess.run(
                ["gcloud", *command, "--quiet"], capture_output=True, text=True, env=environment
            ),
            COMMANDS.values(),
        )
    for name, done in zip(COMMANDS, answers, strict=True):
        assert done.returncode != 2 and "unrecognized" not in done.stderr, f"{name}: {done.stderr}"
        has_no_account = re.search("active ?account", done.stderr, re.IGNORECASE)
        assert done.returncode == 0 or has_no_account, f"{name}: {done.stderr}"


def gcloud(directory: Path, exists: str = "nothing^", fails: str = "nothing^", says: str = "", lists: str = "") -> Path:
    """Make a gcloud that notes what it is asked, and answers for what is said to exist, to fail, or to be left."""
    program = directory / "gcloud"
    program.write_text(f"""#!/bin/bash
echo "$*" >> {directory}/asked
case "$*" in
  *describe*) echo "$*" | grep -qE {exists!r} && exit 0; echo "ERROR: NOT_FOUND: it" >&2; exit 1 ;;
  *" list "*) echo "{lists}"; exit 0 ;;
esac
if echo "$*" | grep -qE {fails!r}; then echo "ERROR: {says}" >&2; exit 1; fi
""")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    for tool in ("kubectl",):
        (directory / tool).write_text("#!/bin/sh\n")
        (directory / tool).chmod(0o755)
    return directory


def asked(directory: Path, verb: str) -> list[str]:
    return [line for line in (directory / "asked").read_text().splitlines() if f" {verb} " in line]


def test_what_is_there_is_left_and_the_rest_is_made_once(tmp_path: Path) -> None:
    done = srl("up", "--project", "p", "--yes", path=gcloud(tmp_path, exists="clusters describe|repositories describe"))
    assert done.exit_code == 0, done.output
    assert done.output.count("there already") == 2
    assert [re.search("create (.*?) --", line).group(1) for line in asked(tmp_path, "create")] == ["trainer", "actors"]  # type: ignore[union-attr]
    shown = re.findall(r"^\$ gcloud (.*)$", done.output, re.MULTILINE)
    made = [line for verb in ("create", "enable", "get-credentials") for line in asked(tmp_path, verb)]
    assert {shlex.join([*shlex.split(line), "--quiet"]) for line in shown} == {shlex.join(shlex.split(m)) for m in made}


def test_it_asks_before_anything_that_costs(tmp_path: Path) -> None:
    done = srl("up", "--project", "p", path=gcloud(tmp_path), answers="n\n")
    assert done.exit_code == 1 and "It costs until srl gke down" in done.output
    assert not (tmp_path / "asked").exists()
    done = srl("up", "--project", "p", "--dry-run", path=gcloud(tmp_path))
    assert done.exit_code == 0 and "node-pools create actors" in done.output and not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("fails", "says", "hint"),
    [
        ("services enable", "You do not currently have an active account selected.", "gcloud auth login"),
        ("clusters create", "PERMISSION_DENIED: denied", "Kubernetes Engine Admin"),
        ("create trainer", "Insufficient quota: GPUS_ALL_REGIONS", "iam-admin/quotas"),
        ("create trainer", "ZONE_RESOURCE_POOL_EXHAUSTED", "another --zone"),
    ],
)
def test_what_goes_wrong_is_said_with_what_was_made(fails: str, says: str, hint: str, tmp_path: Path) -> None:
    done = srl("up", "--project", "p", "--yes", path=gcloud(tmp_path, fails=fails, says=says))
    assert done.exit_code == 2 and hint in done.output and "made so far" in done.output
    assert ("the cluster srl" in done.output.split("made so far")[1]) == (fails == "create trainer")


def test_no_gcloud_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["gke", "up", "--project", "p", "--yes"], env={"PATH": str(tmp_path)})
    assert done.exit_code == 2 and "gcloud is not installed" in done.output


def test_everything_goes_and_what_is_left_is_an_error(tmp_path: Path) -> None:
    done = srl("down", "--project", "p", "--yes", path=gcloud(tmp_path, exists="describe"))
    assert done.exit_code == 0 and "nothing of it is left" in done.output
    assert len(asked(tmp_path, "delete")) == 2
    again = srl("down", "--project", "p", "--yes", path=gcloud(tmp_path))
    assert again.exit_code == 0 and "nothing of it is left" in again.output
    left = srl("down", "--project", "p", "--yes", path=gcloud(tmp_path, lists="pvc-12ab"))
    assert left.exit_code == 1 and "disks: pvc-12ab" in left.output


def test_costs_are_the_sum_of_what_has_a_price(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    names = ("cluster", "e2-standard-2", "n1-standard-4", "nvidia-tesla-t4", "e2-standard-4 spot")
    prices.write_text("".join(f'[[price]]\nitem = "{name}"\nusd_per_hour = 0.5\n' for name in names))
    done = srl("cost", "--actors", "9", "--hours", "4", "--prices", str(prices))
    assert done.exit_code == 0 and "together for 4 hours" in done.output and "14.00 USD" in done.output  # 7 items
    options = "--usd-per-hour 1 --usd-per-trainer-hour 1 --usd-per-actor-hour 0.125"
    assert f"srl deploy apply gke --max-cost USD {options}\n" in done.output
    some = srl("cost", "--actors", "3", "--gpu-spot", "--hours", "4", "--prices", str(prices))
    assert "at least for 4 hours" in some.output and "no price" in some.output and "--prices" in some.output
    assert "prices of n1-standard-4 spot, nvidia-tesla-t4 spot are needed" in some.output
    prices.write_text("price = 3\n")
    assert srl("cost", "--prices", str(prices)).exit_code == 2


@pytest.mark.parametrize("gpu", MACHINES)
@pytest.mark.parametrize("spot", [[], ["--gpu-spot"]])
def test_every_item_has_a_price(gpu: str, spot: list[str]) -> None:
    done = srl("cost", "--actors", "3", "--gpu", gpu, *spot)
    assert done.exit_code == 0 and "together for 1 hours" in done.output
