"""The examples: each starts, and the demo leaves what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SCRIPTS = [path for path in EXAMPLES if "__main__" in path.read_text()]


def run(script: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, cwd=cwd, env=environment
    )


def test_the_examples_are_where_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(SCRIPTS) >= 4
    assert all(f"examples/{script.name}" in readme for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_explains_itself(script: Path, tmp_path: Path) -> None:
    done = run(script, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--updates" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_pictures_are_learned_from_through_a_broker(tmp_path: Path) -> None:
    done = run(ROOT / "examples" / "image_env.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    mean = float(done.stdout.rsplit("greedy episodes:", 1)[1].split()[0])
    assert mean > 0.9, "what sees single pictures, or none, stays below 0.7"


def test_the_demo_leaves_what_it_promises(tmp_path: Path) -> None:
    old = tmp_path / "demo" / "checkpoints" / "99999"
    old.mkdir(parents=True)
    done = run(
        ROOT / "examples" / "pendulum_demo.py",
        *("--updates", "4000", "--actors", "1", "--episodes", "1", "--frames", "3"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "4,000 updates" in done.stdout and "Mean reward of 1 greedy episode" in done.stdout
    demo = tmp_path / "demo"
    assert (demo / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (demo / "pendulum.gif").read_bytes().startswith(b"GIF8")
    assert (demo / "checkpoints" / "4000" / "parameters.safetensors").is_file()
    assert (demo / "history" / "history.jsonl").stat().st_size > 0
    assert not old.exists(), "an earlier demo is replaced"
    # What it says it left is there under the names it prints.
    named = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  demo/")]
    assert len(named) == 4 and all((tmp_path / name).exists() for name in named)
