"""The lint finds whatever would turn data into code, and finds nothing of it in SRL."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FORBIDDEN = {
    "pickle": "import pickle\npickle.loads(b'')\n",
    "from pickle": "from pickle import loads\nloads(b'')\n",
    "cloudpickle": "import cloudpickle\ncloudpickle.loads(b'')\n",
    "dill": "import dill\ndill.loads(b'')\n",
    "joblib": "import joblib\njoblib.load('x')\n",
    "marshal": "import marshal\nmarshal.loads(b'')\n",
    "shelve": "import shelve\nshelve.open('x')\n",
    "eval": "eval('1')\n",
    "exec": "exec('1')\n",
    "yaml.load": "import yaml\nyaml.load('', yaml.Loader)\n",
    "np.load": "import numpy as np\nnp.load('x', allow_pickle=True)\n",
    "pandas": "import pandas as pd\npd.read_pickle('x')\n",
    "torch": "import torch\ntorch.load('x')\n",
    "a module that a message names": "import importlib\nimportlib.import_module(message['module'])\n",
    "runpy": "import runpy\nrunpy.run_path('x')\n",
    "a shell": "import subprocess\nsubprocess.run(message['command'], shell=True)\n",
    "os.system": "import os\nos.system(message['command'])\n",
}


def ruff(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff", "check", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("code", FORBIDDEN.values(), ids=FORBIDDEN)
def test_the_lint_finds(code: str) -> None:
    done = ruff("--select", "TID251,S", "-", "--stdin-filename", "srl/runner/received.py", text=code)
    assert done.returncode == 1, f"nothing was found in {code!r}"


def test_srl_has_none_of_it() -> None:
    done = ruff("srl")
    assert done.returncode == 0, done.stdout
    # Where a rule is switched off, the line says which, and it is a module's name that no message chooses.
    found = [
        (path.relative_to(ROOT).as_posix(), line.strip())
        for path in (ROOT / "srl").rglob("*.py")
        for line in path.read_text().splitlines()
        if "noqa" in line and "TID251" in line
    ]
    assert {path for path, _ in found} == {
        "srl/__init__.py",
        "srl/base/env.py",
        "srl/runner/distribution/__init__.py",
        "srl/runner/plugins.py",
    }
    assert all("importlib.import_module(" in line for _, line in found)
    assert not [path for path in (ROOT / "srl").rglob("*.py") if "__import__(" in path.read_text()]
