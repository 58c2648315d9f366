"""The services serve exactly the registered metrics."""

import re
import shutil
import subprocess

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.common.telemetry.metric_specs import edge
from services.common.telemetry.metric_specs.spec import Kind, MetricSpec, Source
from tests.e2e.stack import Stack
from tests.plain_http import http_get, http_post
from tools.reference_pages import ALL_SPECS, labels

# Metrics that need TLS, Redis, DNS, API keys, the policy `program`, or a client that stopped
# reading. The tests of these features cover them.
ABSENT = re.compile(
    r"vllm:(lora|spec_decode)_|stepwell_(tls|directory|cache_nodes|registration|discovery|tenant|idempotent_log|"
    r"program|pause_seconds|retained_|recomputed_|idempotent_sharing|idempotent_answers_(alone|fenced)|gateway_readers|gateway_queue|gateway_replicas_expected)"
)


def complete(stack: Stack, **changes: object) -> int:
    body = {"model": stack.model, "prompt": "one two three", "max_tokens": 8, "temperature": 0}
    answer = http_post(f"{stack.url}/v1/completions", json=body | changes, timeout=30)
    return answer.status_code


@pytest.fixture(scope="module")
def text(stack: Stack) -> str:
    """The text of the gateway's metrics, including the replica's metrics, after a few requests."""
    assert complete(stack, n=2, temperature=1) == 200
    assert complete(stack) == 200
    assert complete(stack, top_p=7) == 400
    return http_get(f"{stack.url}/metrics").text


def own_labels(family: Metric) -> set[frozenset[str]]:
    """The label sets of a metric's series, without labels of its type such as `le`."""
    return {
        frozenset(name for name in sample.labels if name not in ("le", "quantile"))
        for sample in family.samples
    }


def expected_labels(spec: MetricSpec) -> set[frozenset[str]]:
    """The registered labels, with `replica`, which the gateway adds to the metrics of replicas."""
    named = frozenset(labels(spec))
    match spec.source:
        case Source.GATEWAY:
            return {named}
        case Source.EVERY:
            of_replica = named | {"model_name", "engine", "replica"}
            return {named, of_replica, of_replica | {"rank"}}
        case _:
            return {named | {"replica"}}


def test_every_served_metric_is_listed_with_its_type_and_labels(text: str) -> None:
    families = list(text_string_to_metric_families(text))
    for family in families:
        spec = ALL_SPECS.get(family.name)
        assert spec is not None, f"{family.name} is not listed"
        assert family.type == spec.kind.value, family.name
        assert family.documentation == spec.text
        assert own_labels(family) == expected_labels(spec), family.name
        if spec.kind is Kind.HISTOGRAM:
            bounds = {float(s.labels["le"]) for s in family.samples if "le" in s.labels}
            assert bounds == {*spec.buckets, float("inf")}, family.name
    assert len(families) == len({family.name for family in families})


def test_every_listed_metric_is_served(text: str) -> None:
    served = {family.name for family in text_string_to_metric_families(text)}
    # The gateway serves INDEX_NODE_STATE only when its prefix index has a node.
    missing = set(ALL_SPECS) - served - {edge.INDEX_NODE_STATE.name}
    assert {name for name in missing if not ABSENT.match(name)} == set()
    assert {name for name in served if ABSENT.match(name)} == set()


def total(text: str, name: str, label: str = "") -> float:
    """The sum of a metric's series that have this label."""
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.M)
    return sum(float(value) for labelled, value in found if label in labelled)


def test_a_request_is_counted_at_the_replica_and_at_the_gateway(stack: Stack) -> None:
    before = http_get(f"{stack.url}/metrics").text
    assert complete(stack, max_tokens=9, ignore_eos=True) == 200
    after = http_get(f"{stack.url}/metrics").text
    for name in ("vllm:generation_tokens_total", "stepwell_gateway_generation_tokens_total"):
        assert total(after, name) >= total(before, name) + 9
    for name in ("vllm:request_success_total", "stepwell_gateway_answers_total"):
        ended = 'finished_reason="length"'
        assert total(after, name, ended) >= total(before, name, ended) + 1


def test_a_refusal_is_not_counted_as_work(stack: Stack) -> None:
    before = http_get(f"{stack.url}/metrics").text
    assert complete(stack, top_p=7) == 400
    after = http_get(f"{stack.url}/metrics").text
    refused = "vllm:admission_rejections_total"
    assert total(after, refused) == total(before, refused) + 1
    for name in ("vllm:request_success_total", "vllm:e2e_request_latency_seconds_count"):
        assert total(after, name) == total(before, name)


def test_promtool_reads_every_metric(text: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    # promtool exits with 3 if it has remarks on names.
    assert checked.returncode in (0, 3), checked.stderr
    remarks = [
        line for line in checked.stderr.splitlines() if not re.match("(vllm:|process_)", line)
    ]
    assert remarks == [], "its remarks are on vLLM's own names alone"
