"""The dashboards' queries, evaluated by a real Prometheus under load and under faults.

`pytest -s` prints the panels that turn red, and when.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest

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
        yield running


def filled(query: Query) -> str:
    return query.filled("1m").replace("[6h:1m]", "[10m:5s]")


def red_panels(server: Prometheus) -> dict[str, list[str]]:
    """Maps the alert of each red panel of the dashboard "health" to the names and values shown."""
    found: dict[str, list[str]] = {}
    for query in HEALTH:
        for series in server.query(filled(query)):
            value = float(series["value"][1])
            if query.color(value) == "red":
                labels = " ".join(series["metric"].values())
                shown = f"{query.panel} {labels}".strip()
                found.setdefault(query.alerts[0], []).append(f"{shown}: {value:.3g}")
    return found


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
        assert red_panels(server) == {}
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
            assert alert not in red_panels(server)
            with fault:
                seconds = wait_for(
                    lambda alert=alert: alert in red_panels(server), SECONDS, LOOK_AGAIN_SECONDS
                )
                print(f"| {name} | {seconds:.0f} s | {'; '.join(red_panels(server)[alert])} |")
                if name == "a flood":
                    _who_and_since_when(server, began)


def _who_and_since_when(server: Prometheus, began: float) -> None:
    """The table of tenants has the flooding tenant alone, and when its refusals began."""
    (since,) = [query for query in QUERIES if "timestamp" in query.expr]
    ((tenant, shown),) = [
        (one["metric"]["tenant"], float(one["value"][1]) / 1000)
        for one in server.query(filled(since))
    ]
    assert tenant == "flood"
    assert began - 10 < shown < time.time()
    print(f"| who, since when | {tenant} | {shown - began:.0f} s after its begin |")


def test_every_query_answers_under_a_load_of_three_tenants_and_two_models(
    stack: Stack, second: Observed, server: Prometheus
) -> None:
    missing = [query for query in QUERIES if UNREGISTERED not in query.expr]

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
    for query in QUERIES:
        if query.is_exemplar:
            assert TRACE_ID in {one["trace_id"] for one in server.exemplars(filled(query))}, query
    models = {one["metric"]["model_name"] for one in server.query("vllm:num_requests_running")}
    assert models == {stack.model, "second"}
