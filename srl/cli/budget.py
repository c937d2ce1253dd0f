"""`srl budget`: counts in the cluster what a deployment costs, and ends its tasks when a budget is spent.

`srl deploy apply --max-cost ... --max-hours ...` puts it there, so that a budget holds while the user's laptop sleeps.
What it has counted lies in a config map of the cluster, and at the broker for clients to show.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import click
import msgspec

from srl.base.errors import BrokerError, SrlError
from srl.cli.in_cluster import Kubernetes
from srl.cli.options import broker_options, show_log
from srl.runner.alive import give_sign_of_life
from srl.runner.status import Bill

if TYPE_CHECKING:
    from srl.runner.distribution.parameters import RedisParameters

logger = logging.getLogger("srl")

ACCOUNT = "srl-spent"
"""The config map with what was counted."""
TICK_S = 10.0
FETCH_S, PATIENCE_S = 30.0, 180.0
"""How long clients have to fetch what a task left when it is over, and how long it may take to end, before pods go."""
_NAMESPACE, _APPS = "/api/v1/namespaces/srl", "/apis/apps/v1/namespaces/srl"
WORKLOADS = {
    "dashboard": f"{_APPS}/deployments/srl-dashboard",
    "actor": f"{_APPS}/deployments/srl-actor",
    "trainer": f"{_APPS}/statefulsets/srl-trainer",
    "broker": f"{_APPS}/statefulsets/srl-broker",
}
"""In the order in which they are ended; the keeper itself stays."""

WhenSpent = Literal["end", "scale-to-zero", "delete"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Budget:
    """What a deployment may cost, and its prices in US dollars."""

    max_cost: float | None = None
    max_hours: float | None = None
    usd_per_hour: float = 0.0
    usd_per_trainer_hour: float = 0.0
    usd_per_actor_hour: float = 0.0
    when_spent: WhenSpent = "end"

    @classmethod
    def from_options(cls, given: Mapping[str, Any], before: Self | None = None) -> Self | None:
        """Return the budget that options make of the one there was before; `None` where there was and is none."""
        changes = {name: value for name, value in given.items() if value is not None}
        if before is None and not changes:
            return None
        budget = cls(**{**({} if before is None else vars(before)), **changes})
        if budget.max_cost is None and budget.max_hours is None:
            raise click.UsageError("prices alone are no budget; add --max-cost or --max-hours")
        if budget.max_cost is not None and not budget.per_hour(1, 1) > 0:
            raise click.UsageError(
                "--max-cost needs prices: --usd-per-hour, --usd-per-trainer-hour, --usd-per-actor-hour (srl gke cost "
                "says which)"
            )
        return budget

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        """Return what `arguments` made of a budget."""
        values: dict[str, Any] = {}
        for argument in arguments[1:]:
            option, _, value = argument.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            values[name] = value if name == "when_spent" else float(value)
        return cls(**values)

    def arguments(self) -> list[str]:
        """Return arguments of `srl` that run the keeper of this budget."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return ["budget", *(f"--{name.replace('_', '-')}={value}" for name, value in given)]

    def per_hour(self, trainers: int, actors: int) -> float:
        """Return what so many workers cost an hour."""
        return self.usd_per_hour + trainers * self.usd_per_trainer_hour + actors * self.usd_per_actor_hour

    def bill(self, hours: float, usd: float, usd_per_hour: float = 0.0) -> Bill:
        """Return what was counted beside what is allowed."""
        return Bill(hours=hours, usd=usd, usd_per_hour=usd_per_hour, max_hours=self.max_hours, max_usd=self.max_cost)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What a deployment has cost up to a moment, and what it costs from then on."""

    counted_s: float
    """The moment, in seconds of Unix time."""
    hours: float = 0.0
    usd: float = 0.0
    usd_per_hour: float = 0.0
    working: bool = False

    def until(self, now_s: float) -> "Account":
        """Return the account of a later moment, where nothing else changed meanwhile."""
        hours = max(0.0, now_s - self.counted_s) / 3600
        return msgspec.structs.replace(
            self,
            counted_s=now_s,
            hours=self.hours + hours * self.working,
            usd=self.usd + hours * self.usd_per_hour,
        )


def budget_options(command: F) -> F:
    """Add options that make a `Budget`."""
    positive = click.FloatRange(min=0, min_open=True)
    price = click.FloatRange(min=0)
    for option in reversed(
        [
            click.option("--max-cost", type=positive, metavar="USD", help="End all tasks when so much is spent."),
            click.option("--max-hours", type=positive, metavar="HOURS", help="End them when workers ran for so long."),
            click.option(
                "--when-spent",
                type=click.Choice(("end", "scale-to-zero", "delete")),
                help="What to do with the workers then: leave them, end all pods, or delete the namespace and all "
                "data with it.  [default: end]",
            ),
            click.option("--usd-per-hour", type=price, metavar="USD", help="Price of the cluster without workers."),
            click.option("--usd-per-trainer-hour", type=price, metavar="USD", help="Price of a trainer's machine."),
            click.option("--usd-per-actor-hour", type=price, metavar="USD", help="Price of an actor's share of one."),
        ]
    ):
        command = option(command)
    return command


@click.command(hidden=True)
@broker_options
@budget_options
def budget(redis_url: str | None, password_file: Any, connect_timeout: float | None, **given: Any) -> None:
    """Keep a deployment's budget; a pod of the deployment runs this, `srl deploy apply` puts it there.

    \b
    Examples:
      srl budget --max-hours 4 --when-spent scale-to-zero
      srl budget --max-cost 5 --usd-per-hour 0.17 --usd-per-trainer-hour 0.54 --usd-per-actor-hour 0.0147
    """  # noqa: D301
    from srl.runner.distribution.parameters import RedisParameters
    from srl.runner.shutdown import stop_on_signals

    show_log()
    wanted = Budget.from_options(given)
    if wanted is None:
        raise click.UsageError("give --max-cost or --max-hours")
    with stop_on_signals() as stop:
        keep(wanted, Kubernetes(), RedisParameters(username="client", connect_timeout_s=TICK_S / 2), stop)


def keep(budget: Budget, kubernetes: Kubernetes, redis_params: "RedisParameters", stop: threading.Event) -> None:
    """Count, show and end until stopped; a cluster or broker that does not answer is asked again."""
    import redis

    spent_s, has_acted, told = 0.0, False, ""
    while not stop.is_set():
        give_sign_of_life()
        trouble, unfinished = "", 0
        try:
            replicas = {role: _replicas(kubernetes, path) for role, path in WORKLOADS.items()}
            account = count(kubernetes, budget, replicas)
            bill = budget.bill(account.hours, account.usd, account.usd_per_hour)
            if bill.spent and not spent_s:
                logger.warning("%s", bill.spent)
                spent_s = time.monotonic()
            try:
                unfinished = tell(redis_params, bill) if replicas["broker"] else 0
            except (BrokerError, redis.RedisError) as error:
                # What it has is on its disk. A broker that never comes back must not keep the bill growing.
                trouble, unfinished = str(error), 1
            waited_s = time.monotonic() - spent_s
            is_time = spent_s and waited_s > (PATIENCE_S if unfinished else FETCH_S)
            if is_time and budget.when_spent != "end" and not has_acted:
                act(kubernetes, budget.when_spent)
                has_acted = True  # once: who scales up again by hand has reasons
        except OSError as error:
            trouble = str(error)
        if trouble and trouble != told:
            logger.warning("%s; trying on", trouble)
        told = trouble
        stop.wait(TICK_S)


def count(kubernetes: Kubernetes, budget: Budget, replicas: Mapping[str, int]) -> Account:
    """Bring the account up to now, and return it; pods count from when they are wanted, also while they wait."""
    path, now_s = f"{_NAMESPACE}/configmaps/{ACCOUNT}", time.time()
    found = kubernetes.get(path)
    account = Account(counted_s=now_s) if found is None else account_in(found).until(now_s)
    account = msgspec.structs.replace(
        account,
        usd_per_hour=budget.per_hour(replicas["trainer"], replicas["actor"]),
        working=replicas["trainer"] + replicas["actor"] > 0,
    )
    data = {"data": {"account": msgspec.json.encode(account).decode()}}
    if found is None:
        kubernetes.create(f"{_NAMESPACE}/configmaps", {"metadata": {"name": ACCOUNT}, **data})
    else:
        kubernetes.patch(path, data)
    return account


def account_in(config_map: Mapping[str, Any]) -> Account:
    """Return the account that a config map holds. Raises `SrlError` where it holds none."""
    try:
        return msgspec.json.decode(config_map["data"]["account"], type=Account)
    except (KeyError, msgspec.MsgspecError) as error:
        raise SrlError(
            f"the config map {ACCOUNT} has no account ({error!r}); delete it to count from nothing"
        ) from error


def tell(redis_params: "RedisParameters", bill: Bill) -> int:
    """Show a bill at the broker, and end all tasks there if it is more than may be; returns how many are unfinished."""
    from srl.runner.distribution.broker import Broker
    from srl.runner.distribution.task_manager import TaskManager

    with closing(TaskManager(redis_params)) as manager, closing(Broker(redis_params)) as broker:
        broker.write_bill(msgspec.json.encode(bill).decode())
        unfinished = [status.task for status in manager.tasks() if not status.finished]
    for task in unfinished if bill.spent else ():
        with closing(TaskManager(redis_params, task)) as manager:
            if manager.end(f"{bill.spent}, so the run ends"):
                logger.warning("asked for the end of %s", task)
    return len(unfinished)


def act(kubernetes: Kubernetes, what: WhenSpent) -> None:
    """End all pods, or delete everything."""
    logger.warning("%s", {"delete": "deleting the namespace srl"}.get(what, "scaling all to zero"))
    if what == "delete":
        kubernetes.delete(_NAMESPACE)
        return
    for path in WORKLOADS.values():
        kubernetes.patch(f"{path}/scale", {"spec": {"replicas": 0}})


def _replicas(kubernetes: Kubernetes, path: str) -> int:
    found = kubernetes.get(path)
    return 0 if found is None else int(found["spec"]["replicas"])
