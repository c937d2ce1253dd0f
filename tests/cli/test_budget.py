"""A deployment's budget: what is counted, what is said, and what happens when it is spent."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import click
import pytest
from waiting import until

import srl
from srl.algorithms import dqn
from srl.base.errors import SrlError
from srl.cli import budget as budget_module
from srl.cli.budget import ACCOUNT, Account, Budget, account_in, count, keep
from srl.runner.distribution import RedisParameters, TaskManager
from srl.runner.distribution.embedded import EmbeddedBroker

PRICES = {"usd_per_hour": 0.1, "usd_per_trainer_hour": 0.5, "usd_per_actor_hour": 0.01}


class Cluster:
    """What the keeper sees of Kubernetes; tests/k8s runs it in a real one."""

    def __init__(self, **replicas: int) -> None:
        self.items: dict[str, Any] = {
            path: {"spec": {"replicas": replicas.get(role, 1)}} for role, path in budget_module.WORKLOADS.items()
        }
        self.deleted: list[str] = []

    def get(self, path: str) -> dict[str, Any] | None:
        return self.items.get(path)

    def create(self, path: str, item: dict[str, Any]) -> None:
        self.items[f"{path}/{item['metadata']['name']}"] = item

    def patch(self, path: str, changes: dict[str, Any]) -> None:
        assert path.removesuffix("/scale") in self.items
        self.items[path.removesuffix("/scale")] = changes

    def delete(self, path: str) -> None:
        self.deleted.append(path)

    def replicas(self) -> list[int]:
        return [self.items[path]["spec"]["replicas"] for path in budget_module.WORKLOADS.values()]


@pytest.fixture
def server() -> Iterator[RedisParameters]:
    with EmbeddedBroker() as running:
        yield running.parameters


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "TICK_S", 0.05)
    monkeypatch.setattr(budget_module, "FETCH_S", 0.1)


def test_an_account_grows_by_what_there_was() -> None:
    start = Account(counted_s=0.0, usd_per_hour=0.6, working=True)
    later = start.until(1800.0)
    assert (later.hours, later.usd, later.counted_s) == (0.5, pytest.approx(0.3), 1800.0)
    assert later.until(900.0).usd == later.usd, "a clock that went back gives nothing back"
    idle = Account(counted_s=0.0, usd_per_hour=0.1, working=False).until(3600.0)
    assert (idle.hours, idle.usd) == (0.0, pytest.approx(0.1)), "a cluster costs also when nobody works"


def test_counting_goes_on_where_an_earlier_keeper_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, budget, now_s = Cluster(actor=8, trainer=1, broker=1), Budget(max_cost=5.0, **PRICES), [1000.0]
    monkeypatch.setattr(budget_module.time, "time", lambda: now_s[0])
    replicas = {"actor": 8, "trainer": 1, "broker": 1}
    assert count(cluster, budget, replicas).usd == 0.0
    now_s[0] += 7200
    account = count(cluster, budget, {"actor": 0, "trainer": 0, "broker": 0})
    assert (account.hours, account.usd) == (2.0, pytest.approx(2 * (0.1 + 0.5 + 0.08)))
    now_s[0] += 3600
    account = count(cluster, budget, replicas)
    assert (account.hours, account.usd) == (2.0, pytest.approx(2 * 0.68 + 0.1))


def test_an_account_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(SrlError, match=f"{ACCOUNT} has no account"):
        account_in({"data": {"account": "?"}})


def test_arguments_make_the_same_budget_again_and_what_is_not_given_stays() -> None:
    budget = Budget.from_options({"max_cost": 5.0, "max_hours": None, "when_spent": "delete", **PRICES})
    assert budget is not None and Budget.from_arguments(budget.arguments()) == budget
    raised = Budget.from_options({"max_cost": 9.0, "max_hours": None}, budget)
    assert raised is not None and (raised.max_cost, raised.when_spent) == (9.0, "delete")
    assert Budget.from_options({"max_cost": None}) is None


@pytest.mark.parametrize(
    ("given", "says"), [({"max_cost": 5.0}, "needs prices"), ({"usd_per_hour": 1.0}, "prices alone are no budget")]
)
def test_half_a_budget_is_refused(given: dict[str, float], says: str) -> None:
    with pytest.raises(click.UsageError, match=says):
        Budget.from_options(given)


@pytest.mark.parametrize("when_spent", ["end", "scale-to-zero", "delete"])
def test_what_is_spent_ends_the_tasks_and_then_what_was_told(server: RedisParameters, when_spent: Any) -> None:
    cluster, stop = Cluster(actor=8, trainer=1, broker=1), threading.Event()
    cluster.create(
        f"{budget_module._NAMESPACE}/configmaps",
        {"metadata": {"name": ACCOUNT}, "data": {"account": json.dumps({"counted_s": 0.0, "hours": 3.9})}},
    )
    runner = srl.Runner("CartPole-v1", dqn.Config())
    manager: TaskManager = runner.train_distribution_start(server, max_train_count=10)
    budget = Budget(max_hours=4.0, when_spent=when_spent)
    keeper = threading.Thread(target=keep, args=(budget, cluster, server, stop))
    keeper.start()
    try:
        bill = until(lambda: manager.get_status().bill)
        assert bill.max_hours == 4.0 and not bill.spent and not manager.get_status().finished
        path = f"{budget_module._NAMESPACE}/configmaps/{ACCOUNT}"
        cluster.items[path] = {"data": {"account": json.dumps({"counted_s": 0.0, "hours": 4.0})}}
        until(lambda: manager.get_status().finished)
        assert "budget of 4 hours is spent" in str(manager.get_status().error)
        if when_spent == "scale-to-zero":
            until(lambda: cluster.replicas() == [0, 0, 0, 0])
        elif when_spent == "delete":
            until(lambda: cluster.deleted == [budget_module._NAMESPACE])
        else:
            assert cluster.replicas() == [1, 8, 1, 1]
    finally:
        stop.set()
        keeper.join(20)
        manager.close()
    assert not keeper.is_alive()


def test_a_broker_that_never_answers_does_not_keep_the_bill_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "PATIENCE_S", 0.3)
    cluster, stop = Cluster(actor=1, trainer=1, broker=1), threading.Event()
    nobody = RedisParameters(host="127.0.0.1", port=1, connect_timeout_s=0.1)
    budget = Budget(max_hours=1e-9, when_spent="scale-to-zero")
    keeper = threading.Thread(target=keep, args=(budget, cluster, nobody, stop))
    keeper.start()
    try:
        until(lambda: cluster.replicas() == [0, 0, 0, 0])
    finally:
        stop.set()
        keeper.join(20)


def test_a_cluster_or_broker_that_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, stop = Cluster(actor=1, trainer=1, broker=1), threading.Event()
    answers = iter([OSError("no answer"), OSError("no answer")])
    get = cluster.get

    def fails_twice(path: str) -> dict[str, Any] | None:
        for error in answers:
            raise error
        return get(path)

    monkeypatch.setattr(cluster, "get", fails_twice)
    nobody = RedisParameters(host="127.0.0.1", port=1, connect_timeout_s=0.1)
    keeper = threading.Thread(target=keep, args=(Budget(max_hours=1.0), cluster, nobody, stop))
    keeper.start()
    try:
        until(lambda: "no broker could be used" in caplog.text)
    finally:
        stop.set()
        keeper.join(20)
    assert caplog.text.count("no answer; trying on") == 1
    assert f"{budget_module._NAMESPACE}/configmaps/{ACCOUNT}" in cluster.items, "it counts all the same"
