"""SRL on a real cluster: everything gets ready, trains, survives what happens to pods, and goes without a trace.

`make test-k8s` runs this on the cluster that KUBECONFIG names, with images that are there as srl-actor:$SRL_TEST_TAG
and srl-trainer:$SRL_TEST_TAG (under $SRL_TEST_REGISTRY). It deletes the namespace `srl` of that cluster.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from on_cluster import apply, connected, delete, items, kubectl, pods, shell, srl_deploy, try_to_apply, until, volumes

import srl
from srl.algorithms import dqn
from srl.base.errors import BrokerError
from srl.runner.distribution import TaskManager
from srl.runner.distribution.broker import Broker

pytestmark = pytest.mark.timeout(900)

CLIENT = """
import sys
from srl.runner.distribution import RedisParameters, TaskManager
from srl.utils.common import logger_print
logger_print()
status = TaskManager(RedisParameters()).train_wait(checkpoint_save_dir=sys.argv[1], history_save_dir=sys.argv[2])
print("the client saw:", status.state, status.train_count)
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    if shutil.which("kubectl") is None or subprocess.run(["kubectl", "version"], capture_output=True).returncode:
        pytest.exit("these tests need kubectl and a cluster that KUBECONFIG names (see tests/k8s/with-cluster)", 2)
    kubectl("delete", "namespace", "srl", "--ignore-not-found", "--wait=true")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The overlay `kind`, with all pods ready."""
    with volumes(tmp_path_factory.mktemp("volumes")):
        assert "all pods are ready" in apply("kind", tmp_path_factory.mktemp("overlay"))
        yield
        if items("namespaces", "--field-selector=metadata.name=srl"):
            delete()


def pendulum() -> srl.Runner:
    config = dqn.Config()
    config.hidden_block.set_mlp((64, 64))
    config.memory.set_proportional_memory()
    config.memory.capacity = 5000
    return srl.Runner("Pendulum-v1", config)


def test_pods_may_do_nothing_that_they_need_not(deployed: None) -> None:
    for pod in pods():
        who = shell(pod, "id -u; ls /var/run/secrets 2>&1; touch /anywhere 2>&1; cat /proc/1/status")
        assert who.stdout.startswith("10001\n")
        assert "No such file" in who.stdout and "Read-only file system" in who.stdout
        assert "CapEff:\t0000000000000000" in who.stdout and "NoNewPrivs:\t1" in who.stdout


def test_a_script_trains_from_outside_and_a_wrong_password_does_not(deployed: None, tmp_path: Path) -> None:
    runner = pendulum()
    with connected(tmp_path / "connect.log") as parameters:
        runner.train_distribution(parameters, actor_num=2, max_train_count=20_000)
        with pytest.raises(BrokerError, match="refused the log-in"):
            TaskManager(dataclasses.replace(parameters, password="wrong"))
    assert runner.train_count == 20_000
    # One run of those that README shows; the bound is for a run that learned nothing (-1,200 and less).
    assert statistics.mean(runner.evaluate(20)) > -400


def test_the_pods_need_less_than_their_limits(deployed: None) -> None:
    for item in items("pods", "-n", "srl"):
        name = item["metadata"]["name"]
        [container] = item["spec"]["containers"]
        limit = _bytes(container["resources"]["limits"]["memory"])
        peak = int(shell(name, "grep VmHWM /proc/1/status").stdout.split()[1]) * 1024
        print(f"{name}: {peak / 2**20:.0f} MiB at most, of {limit / 2**20:.0f} MiB")
        assert peak < 0.7 * limit


def test_whatever_happens_to_pods_the_run_ends_at_the_asked_count(deployed: None, tmp_path: Path) -> None:
    with connected(tmp_path / "connect.log") as parameters, contextlib.closing(Broker(parameters)) as broker:
        manager = pendulum().train_distribution_start(
            parameters, actor_num=2, max_train_count=10**9, checkpoint_interval_s=2.0, eval_episodes=0
        )
        task = manager.task
        command = [sys.executable, "-c", CLIENT, str(tmp_path / "checkpoints"), str(tmp_path / "history")]
        with (tmp_path / "client.log").open("ab") as log:
            client = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **parameters.to_env()})
        try:
            goes_on(manager, "the first update")
            for role in ("trainer", "broker", "actor"):
                # A server that is killed within the second may lose what it has not written: docs/reliability.md.
                how = [] if role == "broker" else ["--now"]
                kubectl("-n", "srl", "delete", "pod", *pods(role), *how)
                goes_on(manager, f"an update after the {role}'s end")
            for replicas in (1, 6, 2):
                assert srl_deploy("scale", str(replicas)).returncode == 0
                until(lambda n=replicas: playing(manager) == n, 180, f"play of {replicas} actors")
            before = image_of("actor")
            apply(
                "kind", tmp_path / "overlay", registry="localhost" if "localhost" not in before else None
            )  # the same image by another name
            assert image_of("actor") != before
            goes_on(manager, "an update after the new image")
            [node] = {item["spec"]["nodeName"] for item in items("pods", "-n", "srl")}
            kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
            kubectl("uncordon", node)
            goes_on(manager, "an update after the drain")
            pause_kubelet(30.0)
            goes_on(manager, "an update after the kubelet's silence")

            # The same task goes on to an end that is set now, while nobody works on it.
            kubectl("-n", "srl", "scale", "statefulset/srl-trainer", "--replicas=0")
            until(lambda: not pods("trainer"), what="the trainer's end")
            target = manager.get_status().train_count + 2_000
            definition = broker.definition(task)
            changed = dataclasses.replace(definition, run={**definition.run, "max_train_count": target})
            fields = {"definition": json.dumps(dataclasses.asdict(changed)), "target_train_count": target}
            broker.redis.hset(f"srl:{task}:task", mapping=fields)
            kubectl("-n", "srl", "scale", "statefulset/srl-trainer", "--replicas=1")
            client.wait(180)
        finally:
            client.kill()
            client.wait()
            manager.close()
    output = (tmp_path / "client.log").read_text()
    assert f"the client saw: done {target}" in output, output[-3000:]
    rows = srl.Runner.load_history(tmp_path / "history").rows
    assert max(row.get("messages_lost", 0) for row in rows) == 0
    assert (tmp_path / "checkpoints" / str(target)).is_dir()


def test_a_wrong_image_is_told_and_mended_by_applying_again(tmp_path: Path) -> None:
    delete()
    with volumes(tmp_path):
        done = try_to_apply("kind", tmp_path / "overlay", tag="never-built")
        assert done.returncode != 0 and "never-built" in done.stderr and "check the image's name" in done.stderr
        apply("kind", tmp_path / "overlay")
        assert srl_deploy("scale", "3").returncode == 0
        assert "actors: 3, as before" in apply("kind", tmp_path / "overlay")
        actor = ("-l", "app.kubernetes.io/name=actor")
        assert [item["status"]["readyReplicas"] for item in items("deployments", "-n", "srl", *actor)] == [3]
        delete()


def test_what_is_public_goes_with_its_overlay_and_the_data_only_when_told(tmp_path: Path) -> None:
    delete()
    with volumes(tmp_path):
        done = try_to_apply("gke-public", tmp_path / "overlay", timeout_s=30)
        assert done.returncode != 0 and 'secret "srl-broker-tls" not found' in done.stderr
        certificate(tmp_path)
        kubectl("-n", "srl", "delete", "pods", "--all", "--now")  # they would look again in two minutes
        apply("gke-public", tmp_path / "overlay")
        assert load_balancers() == ["srl-broker-public"]
        assert 'service "srl-broker-public" deleted' in apply("gke", tmp_path / "overlay") and not load_balancers()

        apply("gke-public", tmp_path / "overlay")
        said = srl_deploy("delete", "--keep-data", "--yes").stdout
        assert "may cost: persistentvolumeclaim/data-srl-broker-0 persistentvolumeclaim/data-srl-trainer-0\n" in said
        assert not load_balancers() and not items("services,deployments,statefulsets,configmaps", "-n", "srl", *OURS)
        until(lambda: not pods(), what="the end of all pods")
        apply("gke", tmp_path / "overlay")
        delete()


@pytest.mark.parametrize("overlay", ["docker-desktop", "gke", "gke-public"])
def test_every_overlay_gets_ready_and_leaves_nothing(overlay: str, tmp_path: Path) -> None:
    delete()
    with volumes(tmp_path):
        if overlay == "gke-public":
            certificate(tmp_path)
        apply(overlay, tmp_path / "overlay")
        for role in ("trainer", "actor"):
            until(lambda r=role: "waiting for tasks" in logs(r), what=f"the {role}'s log-in")
        with connected(tmp_path / "connect.log") as parameters:
            assert parameters.ssl == (overlay == "gke-public") and TaskManager(parameters).tasks() == []
        said = delete()
        left = items("all,secrets,configmaps,persistentvolumeclaims,networkpolicies", "--all-namespaces")
        ours = [i["metadata"]["name"] for i in left if i["metadata"].get("namespace") == "srl"]
        assert not ours and "srl" not in [item["metadata"]["name"] for item in items("namespaces")]
        kept = [item["metadata"]["name"] for item in items("persistentvolumes")]
        assert all(name in said for name in kept), "what stays is said"


def test_a_spent_budget_ends_the_run_scales_to_zero_and_keeps_what_was_learned(tmp_path: Path) -> None:
    delete()
    with volumes(tmp_path):
        apply("kind", tmp_path / "overlay", "--max-hours", "0.03", "--when-spent", "scale-to-zero")
        with connected(tmp_path / "connect.log") as parameters:
            manager = pendulum().train_distribution_start(parameters, actor_num=2, max_train_count=10**9)
            bill = until(lambda: manager.get_status().bill, what="a bill")
            assert bill.max_hours == 0.03 and not bill.spent
            status = manager.train_wait(checkpoint_save_dir=tmp_path / "checkpoints", timeout=240)
            assert status.state == "done" and status.train_count > 0
            with pytest.raises(BrokerError, match=r"budget of 0\.03 hours is spent"):
                pendulum().train_distribution_start(parameters, max_train_count=1)
            manager.close()
        until(lambda: [name for name in pods() if "budget" not in name] == [], what="the end of all other pods")
        assert "is spent" in srl_deploy("status").stdout
        for refused in (try_to_apply("kind", tmp_path / "overlay"), srl_deploy("connect")):
            assert refused.returncode != 0 and "budget of 0.03 hours is spent" in refused.stderr

        apply("kind", tmp_path / "overlay", "--max-hours", "9")
        with connected(tmp_path / "connect.log") as parameters:
            learned = TaskManager(parameters).create_runner()
            assert learned is not None and learned.train_count == status.train_count
        assert "of 9 hours" in srl_deploy("status").stdout
        apply("kind", tmp_path / "overlay", "--no-budget")
        left = items("roles,rolebindings,serviceaccounts,deployments,networkpolicies,configmaps", "-n", "srl")
        assert not {"srl-budget", "srl-spent"} & {item["metadata"]["name"] for item in left}
        delete()


def test_a_spent_budget_deletes_everything_where_told(tmp_path: Path) -> None:
    delete()
    with volumes(tmp_path):
        done = try_to_apply("kind", tmp_path / "overlay", "--max-hours", "0.001", "--when-spent", "delete", timeout_s=0)
        assert done.returncode == 0, done.stderr
        until(lambda: "srl" not in [i["metadata"]["name"] for i in items("namespaces")], 240, "the namespace's end")


def certificate(directory: Path) -> None:
    """Make the secret that the broker of gke-public wants: a certificate for the name by which workers know it."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=srl-broker", "-addext", "subjectAltName=DNS:srl-broker"]
    command = ["openssl", "req", "-x509", *key, "-keyout", "tls.key", "-out", "tls.crt", *names]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    if not items("namespaces", "--field-selector=metadata.name=srl"):
        kubectl("create", "namespace", "srl")
    files = [f"--from-file={name}={directory / source}" for name, source in TLS_FILES.items()]
    kubectl("-n", "srl", "create", "secret", "generic", "srl-broker-tls", *files)


TLS_FILES = {"tls.crt": "tls.crt", "tls.key": "tls.key", "ca.crt": "tls.crt"}
OURS = ("-l", "app.kubernetes.io/part-of=srl")


def load_balancers() -> list[str]:
    return [s["metadata"]["name"] for s in items("services", "-n", "srl") if s["spec"]["type"] == "LoadBalancer"]


def logs(role: str) -> str:
    return kubectl("-n", "srl", "logs", "-l", f"app.kubernetes.io/name={role}", "--tail=-1")


def goes_on(manager: TaskManager, what: str) -> None:
    """Wait for more updates than there ever were."""

    def updates() -> int:
        try:
            return manager.get_status().train_count
        except BrokerError:
            return -1  # the port is forwarded anew

    started_s = time.monotonic()
    most = until(lambda: max(updates(), 0) or None, 180, what)
    until(lambda: updates() > most, 180, what)
    print(f"{what}: after {time.monotonic() - started_s:.1f} s")


def playing(manager: TaskManager) -> int:
    """Return how many actors have been heard within the last seconds."""
    try:
        return sum(actor.heartbeat_age_s < 5 for actor in manager.get_status().actors)
    except BrokerError:
        return -1


def image_of(role: str) -> str:
    [deployment] = items("deployments", "-n", "srl", "-l", f"app.kubernetes.io/name={role}")
    image: str = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    return image


def pause_kubelet(seconds: float) -> None:
    """Let the node's agent say nothing for a while, where that runs on this machine."""
    found = subprocess.run(["pidof", "kubelet"], capture_output=True, text=True).stdout.split()
    if not found:
        print("the kubelet does not run on this machine; its silence is not tested")
        return
    os.kill(int(found[0]), signal.SIGSTOP)
    try:
        until(lambda: not is_node_ready(), 90, "a node that is not ready")
        time.sleep(seconds)  # the fault itself takes this long
    finally:
        os.kill(int(found[0]), signal.SIGCONT)
    until(is_node_ready, 90, "a node that is ready")


def is_node_ready() -> bool:
    [node] = items("nodes")
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])


def _bytes(text: str) -> int:
    units: dict[str, Any] = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    return int(text[:-2]) * int(units[text[-2:]])
