"""The command line, as a shell and a script meet it: output, messages and exit codes."""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
from click.testing import CliRunner, Result

from srl.algorithms import dqn
from srl.base.env import ALLOWED_MODULES
from srl.base.settings import set_by_path
from srl.cli.main import cli
from srl.runner.distribution.embedded import EmbeddedBroker
from srl.runner.history import History

ROOT = Path(__file__).parents[2]
NOBODY = "redis://127.0.0.1:1"
QUICK = ["--num-envs", "2", "--eval-episodes", "2"]
for setting in ("memory.warmup_size=64", "hidden_block.mlp=8", "n_step=1"):
    QUICK += ["--set", setting]

OWN_ENV = """
import gymnasium
from gymnasium import spaces

class Line(gymnasium.Env):
    observation_space, action_space = spaces.Discrete(4), spaces.Discrete(2)

    def __init__(self, broken=False):
        if broken:
            raise RuntimeError("the line is cut")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return 0, {}

    def step(self, action):
        self.place += int(action)
        return self.place, 1.0, self.place == 3, False, {}

gymnasium.register("Line-v0", Line, max_episode_steps=10)
"""


@pytest.fixture(autouse=True)
def clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands run in an empty directory, and what they change in this process is put back."""
    logger = logging.getLogger("srl")
    before = logger.level, logger.propagate, logger.handlers[:]
    for name in [name for name in os.environ if name.startswith("SRL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    logger.level, logger.propagate, logger.handlers = before
    logging.getLogger("srl").setLevel(before[0])
    sys.modules.pop("line_env", None)
    gymnasium.registry.pop("Line-v0", None)
    ALLOWED_MODULES.discard("line_env")


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(port=0) as running:
        yield running


def srl(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], env=environment, prog_name="srl")


def ok(*arguments: str | Path, **environment: str) -> str:
    result = srl(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return result.stdout


@contextlib.contextmanager
def command(*arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """A real process, killed at the end at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-m", "srl.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# --- help -------------------------------------------------------------------------------------------------


def test_help_is_instant_and_imports_nothing_that_computes() -> None:
    program = (
        "import sys; from srl.cli.main import main\n"
        "try: main()\n"
        "finally: print({'jax', 'gymnasium', 'numpy', 'redis', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    times_s = []
    for arguments in (["--help"], ["train", "--help"], ["--version"]):
        started_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        times_s.append(time.monotonic() - started_s)
        assert done.stderr.strip() == "set()"
        assert "srl" in done.stdout
    assert min(times_s) < 1.5  # far less, on a machine that does nothing else


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_commands_help_has_examples_that_parse(name: str) -> None:
    text = ok(name, "--help", COLUMNS="200").split("Examples:")[1].split("Options:")[0]
    lines = [line for line in text.splitlines() if f"srl {name}" in line]
    examples = [re.split(r"[#|>]", line)[0].split() for line in lines]
    assert examples
    for words in examples:
        arguments = words[words.index("srl") + 2 :]
        cli.commands[name].make_context(name, [word for word in arguments if word != "/run/secrets/broker"
                                               and word != "--password-file"])  # fmt: skip


def test_a_password_may_be_asked_for() -> None:
    with EmbeddedBroker(port=0) as broker:
        url = f"redis://127.0.0.1:{broker.parameters.port}"
        good, wrong = str(broker.parameters.password), "wrong"
        asked = CliRunner().invoke(cli, ["status", "--redis-url", url, "--ask-password"], input=f"{good}\n")
        assert asked.exit_code == 0 and good not in asked.output
        asked = CliRunner().invoke(cli, ["status", "--redis-url", url, "--ask-password"], input=f"{wrong}\n")
        assert asked.exit_code == 3 and "refused the log-in" in asked.output


def test_the_exit_codes_are_documented() -> None:
    help_text, page = ok("--help"), (ROOT / "docs" / "cli.md").read_text()
    for code in (0, 1, 2, 3, 4, 130, 143):
        assert re.search(rf"\b{code}\b", help_text)
        assert re.search(rf"^\| {code} \|", page, re.MULTILINE)


def test_the_listed_settings_are_those_that_can_be_set() -> None:
    listed = [line for line in ok("settings", "dqn").splitlines() if line and not line.startswith((" ", "srl"))]
    config = dqn.Config()
    assert {"batch_size=32", "memory.capacity=100000", "hidden_block.mlp=512", "lr=0.001"} <= set(listed)
    plain = [line for line in listed if "=" in line and not re.search("[A-Z]", line)]
    assert len(plain) > 30
    for line in plain:
        set_by_path(config, *line.split("=", 1))
    with_commas = [line.split("=") for line in listed if "STEPS" in line]
    assert with_commas
    for name, words in with_commas:
        set_by_path(config, name, words.replace("STEPS", "5").replace("START", "0.1").replace("END", "0.2"))
    assert "dqn" in ok("settings").split()


# --- what is refused --------------------------------------------------------------------------------------

TRAIN = ("train", "CartPole-v1", "--actors", "0", "--max-train-count", "8")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("train", "CartPole-v1"), 2, r"at least one of --max-train-count, .*--timeout"),
        (("train", "CartPole-v1", "--max-train-count", "-5"), 2, r"'--max-train-count': -5"),
        (("train", "CartPole-v1", "--timeout", "0"), 2, r"'--timeout'"),
        (("train", "CartPole-v1", "--timeout", "nan"), 2, r"timeout"),
        ((*TRAIN, "--set", "hiden_block.mlp=64"), 2, r"hiden_block.*did you mean 'hidden_block'.*srl settings dqn"),
        ((*TRAIN, "--set", "batch_size=-1"), 2, r"--set batch_size=-1: .*at least 1"),
        ((*TRAIN, "--set", "batch_size=many"), 2, r"batch_size takes int"),
        ((*TRAIN, "--set", "batch_size.x.y=1"), 2, r"batch_size has no settings of its own"),
        ((*TRAIN, "--set", "lr.linear=100"), 2, r"lr.linear takes steps, start, end"),
        ((*TRAIN, "--set", "__class__.x=1"), 2, r"no setting '__class__'"),
        ((*TRAIN, "--set", "batch_size"), 2, r"NAME=VALUE"),
        ((*TRAIN, "--set", "memory.warmup_size=8"), 2, r"warmup_size \(8\) is below batch_size"),
        ((*TRAIN, "--algorithm", "dqm"), 2, r"did you mean 'dqn'"),
        ((*TRAIN, "--env-kwargs", "length=3"), 2, r"unexpected keyword argument 'length'"),
        (("train", "CartPol-v1", "--max-steps", "8"), 2, r"'CartPol-v1'; did you mean CartPole-v1"),
        (("train", "nowhere:Env-v0", "--max-steps", "8"), 2, r"'nowhere:Env-v0' needs .*No module named 'nowhere'"),
        ((*TRAIN, "--allow", "nowhere"), 2, r"'nowhere' cannot be imported"),
        ((*TRAIN, "--redis-url", NOBODY), 2, r"--actors 0 trains in this process"),
        ((*TRAIN, "--detach"), 2, r"--detach is for a task at a broker"),
        ((*TRAIN, "--resume"), 2, r"--resume needs the --checkpoint-dir"),
        ((*TRAIN, "--checkpoint-dir", "file/below"), 2, r"directory file/below cannot be made"),
        (("train", "CartPole-v1", "--max-steps", "8", "--redis-url", "http://a"), 2, r"must start with redis://"),
        (("status", "--redis-url", NOBODY, "--connect-timeout", "0.2"), 3, r"no broker could be used.*refused"),
        (("trainer", "--redis-url", NOBODY, "--connect-timeout", "0.2"), 3, r"no broker could be used.*refused"),
        (("cancel", "--redis-url", "redis://10.0.0.1"), 3, r"without a password.*SRL_REDIS_PASSWORD"),
        (("evaluate", "nothing"), 2, r"no checkpoint directory .*nothing"),
        (("evaluate", "."), 2, r"no checkpoint in"),
        (("evaluate", ".", "--gif", "a.png"), 2, r"\.gif or \.mp4"),
        (("plot", "nothing"), 2, r"no history in nothing"),
        (("plot", ".", "--output", "a.txt"), 2, r"\.png, \.svg, \.pdf"),
        (("settings", "dqm"), 2, r"did you mean 'dqn'"),
        (("trian",), 2, r"No such command 'trian'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_and_a_code(arguments: tuple[str, ...], code: int, message: str) -> None:
    Path("file").touch()
    result = srl(*arguments)
    assert result.exit_code == code, result.output
    assert re.search(message, result.output, re.DOTALL), result.output
    assert "Traceback" not in result.output


def test_the_traceback_is_shown_when_asked_for() -> None:
    result = srl("evaluate", "nothing", SRL_DEBUG="1")
    assert result.exit_code == 2
    assert "Traceback" in result.output and "Error: there is no checkpoint directory" in result.output


def test_an_own_env_is_found_beside_the_shell_and_its_failure_named(tmp_path: Path) -> None:
    (tmp_path / "line_env.py").write_text(OWN_ENV)
    result = srl("train", "line_env:Line-v0", "--max-steps", "8", "--env-kwargs", "broken=true")
    assert result.exit_code == 2
    assert "'line_env:Line-v0' could not be made: RuntimeError: the line is cut" in result.output


# --- a run on this machine --------------------------------------------------------------------------------


def test_train_evaluate_plot_and_resume(tmp_path: Path) -> None:
    train = ["train", "CartPole-v1", *QUICK, "--actors", "0", "--seed", "3", "--checkpoint-dir", "run"]
    train += ["--history-dir", "run", "--set", "updates_per_dispatch=8"]
    output = ok(*train, "--max-train-count", "64")
    assert "CartPole-v1: 64 updates" in output
    assert re.search(r"mean reward [\d.]+ over 2 episodes", output)
    assert "srl evaluate run" in output and "srl plot run" in output

    assert "run/64: CartPole-v1, dqn, 64 updates" in ok("evaluate", "run", "--episodes", "3", "--gif", "a.gif")
    assert Path("a.gif").read_bytes().startswith(b"GIF8")
    ok("plot", "run", "--left", "reward0", "--right", "memory", "--x", "train", "--output", "a.svg")
    assert "<svg" in Path("a.svg").read_text()
    assert re.search(
        "no numbers called 'rewad0'; did you mean 'reward0'", srl("plot", "run", "--left", "rewad0").output
    )
    for command in (("evaluate", "run", "--gif", "a.svg/a.gif"), ("plot", "run", "--output", "a.svg/a.png")):
        nowhere = srl(*command)
        assert nowhere.exit_code == 2 and "a.svg" in nowhere.stderr and "Traceback" not in nowhere.stderr

    refused = srl(*train, "--max-train-count", "64")
    assert refused.exit_code == 2 and "--resume" in refused.output
    assert "nothing left to do" in ok(*train, "--max-train-count", "64", "--resume")
    rows = len(History.load("run").rows)
    assert "CartPole-v1: 72 updates" in ok(*train, "--max-train-count", "72", "--resume", "--eval-episodes", "0")
    assert len(History.load("run").rows) > rows
    other = ["train", "Acrobot-v1", *train[2:], "--max-train-count", "99", "--resume"]
    assert "is of the env {'name': 'CartPole-v1'" in srl(*other).output

    shutil.rmtree("run/64")
    with Path("run/72/parameters.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    damaged = srl("evaluate", "run")
    assert damaged.exit_code == 2
    assert re.search(r"Error: no checkpoint in run can be used: run/72: parameters.*changed", damaged.output)


def test_actors_of_this_machine_play_an_own_env(tmp_path: Path) -> None:
    (tmp_path / "line_env.py").write_text(OWN_ENV)
    arguments = ["train", "line_env:Line-v0", *QUICK, "--actors", "1", "--max-train-count", "32"]
    output = ok(*arguments, "--checkpoint-dir", "run", "--history-dir", "run")
    assert "line_env:Line-v0: 32 updates" in output
    assert {row["role"] for row in History.load("run").rows} >= {"trainer"}
    refused = srl("evaluate", "run")
    assert refused.exit_code == 2 and "--allow line_env" in refused.output
    assert "32 updates" in ok("evaluate", "run", "--episodes", "1", "--allow", "line_env")


# --- a run at a broker ------------------------------------------------------------------------------------


def test_a_task_from_its_start_to_its_end(broker: EmbeddedBroker, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{broker.parameters.password}\n")
    where = ["--redis-url", broker.parameters.address, "--password-file", "password"]
    assert "no tasks at redis://127.0.0.1" in ok("status", *where)
    missing = srl("watch", *where)
    assert missing.exit_code == 4 and "there is no task at" in missing.output
    assert srl("cancel", *where).exit_code == 4

    train = ["train", "CartPole-v1", *QUICK, *where, "--actors", "1", "--max-train-count", "32"]
    first, hint = ok(*train, "--detach", "--task-name", "first").splitlines()
    assert hint == f"watch it with: srl watch --redis-url {broker.parameters.address} --task {first}"
    assert "a task called 'first' is waiting" in srl(*train, "--detach", "--task-name", "first").output
    second = ok(*train, "--detach").splitlines()[0]
    assert re.search(rf"{first}: waiting.*no trainer has joined yet", ok("status", *where), re.DOTALL)
    unclear = srl("cancel", *where)
    assert unclear.exit_code == 2 and first in unclear.output and second in unclear.output
    assert ok("cancel", *where, "--task", second) == f"cancelled {second}\n"
    assert ok("cancel", *where, "--task", second) == f"{second} is cancelled already\n"
    assert srl("watch", *where, "--task", second).exit_code == 1
    nobody = srl("status", *where, "--task", "third")
    assert nobody.exit_code == 4 and "no task is called 'third'" in nobody.output
    assert [each["state"] for each in json.loads(ok("status", *where, "--json"))] == ["waiting", "cancelled"]

    environment = broker.parameters.to_env()
    with command("trainer", "--work-dir", "work", **environment) as trainer, command("actor", **environment) as actor:
        watched = ok("watch", *where, "--task", "first", "--checkpoint-dir", "run", "--history-dir", "run")
        assert watched.startswith(f"{first}: done after")
        for worker in (trainer, actor):
            worker.send_signal(signal.SIGTERM)
        assert (trainer.wait(20), actor.wait(20)) == (0, 0)
    status = json.loads(ok("status", *where, "--task", first, "--json"))
    assert (status["state"], status["train_count"]) == ("done", 32)
    assert "run/32: CartPole-v1, dqn, 32 updates" in ok("evaluate", "run", "--episodes", "1")
    assert History.load("run").rows


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_watcher_says_so_and_the_task_goes_on(
    broker: EmbeddedBroker, number: signal.Signals, code: int
) -> None:
    environment = broker.parameters.to_env()
    arguments = ["train", "CartPole-v1", *QUICK, "--max-train-count", "32", "--task-name", f"stop-{code}"]
    task = ok(*arguments, "--detach", **environment).splitlines()[0]
    with command("watch", "--task", task, **environment) as watcher:
        assert watcher.stdout is not None
        assert "waiting" in watcher.stdout.readline()
        watcher.send_signal(number)
        rest, _ = watcher.communicate(timeout=20)
    assert watcher.returncode == code, rest
    assert f"task {task} goes on" in rest and "Traceback" not in rest
    assert json.loads(ok("status", "--task", task, "--json", **environment))["state"] == "waiting"
    ok("cancel", "--task", task, **environment)


def test_a_broker_that_refuses_is_exit_code_3(broker: EmbeddedBroker) -> None:
    client, port = broker.parameters.connect(), broker.parameters.port
    client.execute_command("ACL", "SETUSER", "weak", "on", ">secret", "+ping")  # type: ignore[no-untyped-call]
    client.close()
    wrong = srl("status", "--redis-url", f"redis://weak:wrong@127.0.0.1:{port}")
    assert wrong.exit_code == 3 and "wrong username or password" in wrong.output
    weak = srl("status", "--redis-url", f"redis://weak:secret@127.0.0.1:{port}")
    assert weak.exit_code == 3 and "the broker was lost or refused a command" in weak.output
    assert "secret" not in wrong.output + weak.output
