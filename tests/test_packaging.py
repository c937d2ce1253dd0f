"""What an installed package promises, and what the lock file holds."""

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()


def locked_names() -> set[str]:
    return {match.lower() for match in re.findall(r"^([A-Za-z0-9_.-]+)==", LOCK, re.MULTILINE)}


def test_import_srl_is_cheap() -> None:
    program = "import sys, srl; print(sorted({'jax', 'flax', 'optax', 'rich', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("group", ["", "embedded", "classic-control", "atari", "plot", "test"])
def test_every_dependency_is_locked(group: str) -> None:
    wanted = PROJECT["optional-dependencies"][group] if group else PROJECT["dependencies"]
    names = {re.split(r"[\[<>=;]", requirement)[0].strip().lower() for requirement in wanted}
    assert names and names <= locked_names()


def test_the_lock_is_portable_and_complete() -> None:
    assert not re.search(r"https?:|file:|--(extra-)?index-url|--find-links|(^|\s)/", LOCK)
    entries = re.split(r"\n(?=[A-Za-z0-9])", LOCK)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    # Their old builds disappear from the index, or nothing here needs them.
    assert not locked_names() & {"rlax", "tfp-nightly", "torch"}


def test_dependencies_have_lower_bounds_and_no_pins() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in itertools.chain(*groups):
        specifier = requirement.partition(";")[0]
        assert specifier.startswith("srl[") or (">=" in specifier and "==" not in specifier), requirement
