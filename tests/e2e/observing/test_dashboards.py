"""The dashboards' queries, evaluated by a real Prometheus under load and under faults.

`pytest -s` prints the panels before and under each fault.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.deploy.prometheus import dashboards
from tests.deploy.prometheus.dashboards import HEALTH, QUERIES, Query
from tests.e2e.conftest import TinyModel
from tests.e2e.observing.observed import TRACE_ID, Observed, observed, sending
from tests.e2e.prometheus_server import OTHER_JOB, Prometheus, needs_prometheus, prometheus
from tests.e2e.stack import Stack, wait_for
from tests.redis_servers import needs_redis

pytestmark = [needs_prometheus, needs_redis, pytest.mark.timeout(300)]
SECONDS = 60.0
LOOK_AGAIN_SECONDS = 0.5
UNREGISTERED = "stepwell_registration_failures_total"
"""A metric that a scheduler of `stepwell up` lacks, because it does not register in Redis."""


@pytest.fixture(scope="module")
def second(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with observed(tiny_model.directory, tmp_path_factory.mktemp("observed")) as running:
        yield running


@pytest.fixture(scope="module")
def server(
    stack: Stack, second: Observed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    targets = {"stepwell": stack.url, "stepwell-second": second.metrics_url}
    with prometheus(tmp_path_factory.mktemp("prometheus"), targets) as running:
        wait_for(lambda: len(running.query("up == 1")) == 1 + len(targets), SECONDS)
        yield running


def filled(query: Query) -> str:
    return query.filled("1m").replace("[6h:1m]", "[10m:5s]")


@dataclass(frozen=True)
class Shown:
    """A value of a panel of the dashboard "health", with its labels and its colour."""

    alert: str
    labels: str
    value: float
    color: str

    def __str__(self) -> str:
        return f"{self.labels} {self.value:.3g} {self.color}".strip()


def health(server: Prometheus) -> list[Shown]:
    return [
        Shown(
            query.alerts[0],
            " ".join(series["metric"].values()),
            float(series["value"][1]),
            query.color(float(series["value"][1])),
        )
        for query in HEALTH
        for series in server.query(filled(query))
    ]


def red_alerts(server: Prometheus) -> set[str]:
    return {one.alert for one in health(server) if one.color == "red"}


def panel(server: Prometheus, alert: str) -> str:
    """The rendered panel of an alert."""
    return ", ".join(str(one) for one in health(server) if one.alert == alert)


@contextmanager
def lost_replica(second: Observed) -> Iterator[None]:
    second.stack.hit("scheduler", signal.SIGSTOP)
    try:
        yield
    finally:
        second.stack.hit("scheduler", signal.SIGCONT)


@contextmanager
def expiring_certificate(second: Observed) -> Iterator[None]:
    second.certify(days=6)
    try:
        yield
    finally:
        second.certify(days=20)


def test_a_flood_a_full_cache_a_lost_replica_and_an_expiring_certificate_turn_red(
    second: Observed, server: Prometheus
) -> None:
    with second.load("ann", 1), second.load("flood", 1):
        wait_for(lambda: server.query("rate(stepwell_tenant_requests_total[1m]) > 0"), SECONDS)
        assert red_alerts(server) == set()
        began = time.time()
        faults: dict[str, tuple[str, AbstractContextManager[None]]] = {
            "a flood": ("StepwellTenantRefused", second.flood()),
            "a full KV cache": (
                "StepwellKVCacheFull",
                second.load("bob", 4, max_tokens=230, ignore_eos=True),
            ),
            "an expiring certificate": (
                "StepwellCertificateExpires",
                expiring_certificate(second),
            ),
            "a lost replica": ("StepwellFewerReplicas", lost_replica(second)),
        }
        for name, (alert, fault) in faults.items():
            with _red_within_a_minute(server, name, alert, fault):
                if name == "a flood":
                    _who_and_since_when(server, began)


@contextmanager
def _red_within_a_minute(
    server: Prometheus, name: str, alert: str, fault: AbstractContextManager[None]
) -> Iterator[None]:
    """Begins the fault when the alert's panel is green. The context begins when it is red."""

    def is_red() -> bool:
        return alert in red_alerts(server)

    wait_for(lambda: not is_red(), SECONDS, LOOK_AGAIN_SECONDS)
    before = panel(server, alert)
    with fault:
        seconds = wait_for(is_red, SECONDS, LOOK_AGAIN_SECONDS)
        after = panel(server, alert)
        print(f"\n| {name} | {alert} | {before} | {after} | {seconds:.0f} s |", end="")
        yield


def _who_and_since_when(server: Prometheus, began: float) -> None:
    """The table of tenants has the flooding tenant alone, and when its refusals began."""
    (since,) = [query for query in QUERIES if "timestamp" in query.expr]
    wait_for(lambda: server.query(filled(since)), SECONDS, LOOK_AGAIN_SECONDS)
    (found,) = server.query(filled(since))
    tenant, shown = found["metric"]["tenant"], float(found["value"][1]) / 1000
    assert tenant == "flood"
    assert began - 10 < shown < time.time()
    print(f"\nThe table of tenants: {tenant}, since {shown - began:+.0f} s", end="")


def test_every_query_answers_under_a_load_of_three_tenants_and_two_models(
    stack: Stack, second: Observed, server: Prometheus
) -> None:
    asked = [query for query in QUERIES if UNREGISTERED not in query.expr]
    missing = list(asked)

    def all_have_data() -> bool:
        for query in list(missing):
            found = server.query(filled(query))
            assert OTHER_JOB not in {one["metric"].get("job") for one in found}, query
            if found:
                missing.remove(query)
        return not missing

    plain = {"prompt": "one two", "max_tokens": 8}
    with ExitStack() as scope:
        scope.enter_context(sending(stack, 1, plain | {"n": 2}, {}))
        scope.enter_context(sending(stack, 1, plain | {"top_p": 7}, {}))
        for tenant in ("ann", "bob"):
            scope.enter_context(second.load(tenant, 1))
        scope.enter_context(second.flood())
        try:
            wait_for(all_have_data, SECONDS, LOOK_AGAIN_SECONDS)
        except AssertionError:
            pytest.fail(f"no data: {[(query.panel, filled(query)) for query in missing]}")
    for annotation in dashboards.annotations_of(dashboards.DASHBOARDS[0]):
        found = server.query(dashboards.filled(annotation["expr"]))
        assert OTHER_JOB not in {one["metric"].get("job") for one in found}, annotation
    for query in QUERIES:
        if query.is_exemplar:
            assert TRACE_ID in {one["trace_id"] for one in server.exemplars(filled(query))}, query
    print(f"\n{len(asked)} of {len(QUERIES)} queries were asked, and had data", end="")
    models = {one["metric"]["model_name"] for one in server.query("vllm:num_requests_running")}
    assert models == {stack.model, "second"}
