"""What the documents show: Python that runs, commands that the command line takes, links that lead somewhere."""

import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import srl
from srl.cli.main import cli
from srl.runner import distribution

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


PYTHON = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, block in enumerate(blocks(path, "python"))
]
COMMANDS = [
    line
    for path in DOCUMENTS
    for block in blocks(path, "")
    for line in re.split(r"\n|&&|;", block.replace("\\\n", " "))
    if re.match(r"\s*(\w+=\S+ )*srl ", line)
]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace all that would take time or a broker by something that only checks its arguments."""
    for name in ("train", "train_mp", "train_distribution", "train_distribution_start", "evaluate"):
        monkeypatch.setattr(srl.Runner, name, mock.create_autospec(getattr(srl.Runner, name), return_value=[0.0]))
    for name in ("save_checkpoint", "save_parameter", "animation_save_gif", "load_history"):
        monkeypatch.setattr(srl.Runner, name, mock.create_autospec(getattr(srl.Runner, name)))
    for name in ("trainer_run_forever", "actor_run_forever", "TaskManager"):
        monkeypatch.setattr(distribution, name, mock.create_autospec(getattr(distribution, name)), raising=False)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("block", PYTHON)
def test_python_in_the_documents_fits_the_api(block: str) -> None:
    exec(compile(block, "block", "exec"), {"__name__": "__main__"})


@pytest.mark.usefixtures("nothing_runs")
def test_the_lines_of_the_readme_s_tables_fit_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "RedisParameters", mock.create_autospec(distribution.RedisParameters))
    from srl.algorithms import dqn

    names: dict[str, Any] = {
        "srl": srl,
        "runner": srl.Runner("Pendulum-v1", dqn.Config()),
        "RedisParameters": distribution.RedisParameters,
        "dir": "run",
        "path": "run/file",
    }
    lines = re.findall(r"`((?:runner|srl\.Runner)\.[^`]+)`", (ROOT / "README.md").read_text())
    assert {"train", "train_mp", "train_distribution"} <= {re.split(r"[.(]", line)[1] for line in lines}
    for line in lines:
        eval(line, names)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_in_the_documents_are_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    words = shlex.split(line, comments=True)
    name, *arguments = words[words.index("srl") + 1 :]
    cli.commands[name].make_context(name, arguments)  # parses; anything unknown raises


def test_there_are_examples_to_check() -> None:
    assert len(PYTHON) >= 5 and len(COMMANDS) >= 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:", target)]
    missing = [target for target in local if target and not (document.parent / target).exists()]
    assert not missing


def test_every_promise_about_faults_names_a_test_that_exists() -> None:
    table = (ROOT / "docs/reliability.md").read_text().partition("## How")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ") and "what happens" not in line]
    assert len(rows) > 10
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row[-2])
        assert named and set(named) <= written, row[1]
