"""promtool evaluates the queries of the chart's KEDA triggers, with stored series.

KEDA starts the first replica while a query's value is above its `activationThreshold`, and stops
the last one when all values were not above it for `cooldownPeriod`. It reads an empty result as 0.
"""

from pathlib import Path
from typing import Any

import yaml

from tests.deploy.prometheus.test_rules import needs_promtool, promtool
from tests.deploy.rendered import Rendered

OWN = 'namespace="llm",model_name="llama",pod="demo-stepwell-gateway-6c5d8f9b7-{}"'
OTHER = 'namespace="llm",model_name="llama",pod="demo-stepwell-gateway-small-6c5d8f9b7-x7k2p"'
FURTHER = 'namespace="llm",model_name="coder",pod="demo-stepwell-gateway-6c5d8f9b7-x7k2p"'
REPLICA = 'namespace="llm",pod="demo-stepwell-replica-{}"'
SERIES = {
    # Three requests from minute 5 to 9, at two gateways. The answers come at minute 10.
    f"stepwell_gateway_requests_in_flight{{{OWN.format('x7k2p')}}}": "0x4 2x4 0x20",
    f"stepwell_gateway_requests_in_flight{{{OWN.format('q9wzs')}}}": "0x4 1x4 0x20",
    f"stepwell_gateway_requests_in_flight{{{OTHER}}}": "7x30",
    f"stepwell_gateway_requests_in_flight{{{FURTHER}}}": "2x30",
    f"stepwell_gateway_answers_total{{{OWN.format('x7k2p')}}}": "4x9 7x20",
    f"stepwell_gateway_answers_total{{{OTHER}}}": "0+5x30",
    # A replica from minute 8 to 20.
    f"stepwell_queue_estimate_seconds{{{REPLICA.format(0)}}}": "_x8 1.5x1 0x10 stale",
    f"vllm:num_requests_running{{{REPLICA.format(0)}}}": "_x8 3x1 0x10 stale",
}
EXPECTED = {
    # minute: values of queue-seconds, running-requests, requests-in-flight, recent-answers
    2: (None, None, 0, 0),
    6: (None, None, 3, 0),
    9: (1.5, 3, 3, 0),
    11: (0, 0, 0, 1),
    14: (0, 0, 0, 0),
    25: (None, None, 0, 0),
}


@needs_promtool
def test_a_request_at_a_gateway_starts_the_first_replica_and_answers_keep_it(
    releases: dict[str, Rendered], tmp_path: Path
) -> None:
    (scaled,) = releases["scale-to-zero"].of("ScaledObject")
    triggers = [one for one in scaled["spec"]["triggers"] if one["type"] == "prometheus"]
    assert [one["name"] for one in triggers] == [
        *("queue-seconds", "running-requests", "requests-in-flight", "recent-answers"),
    ]
    samples = [
        _sample(trigger["metadata"]["query"], minute, values[number])
        for minute, values in EXPECTED.items()
        for number, trigger in enumerate(triggers)
    ]
    (further,) = releases["further-model"].of("ScaledObject")
    query = further["spec"]["triggers"][2]["metadata"]["query"]
    samples.append(_sample(query, 2, 2))  # at the gateways of another release
    path = tmp_path / "scaling.yml"
    series = [{"series": name, "values": values} for name, values in SERIES.items()]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": samples}
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    promtool("test", "rules", str(path))


def _sample(query: str, minute: int, value: float | None) -> dict[str, Any]:
    expected = [] if value is None else [{"labels": "{}", "value": value}]
    return {"expr": query, "eval_time": f"{minute}m", "exp_samples": expected}


def test_a_request_waits_until_the_first_replica_can_have_loaded_the_model(
    releases: dict[str, Rendered],
) -> None:
    release = releases["scale-to-zero"]
    (gateway,) = release.pod("gateway").containers()
    environ = gateway.environment()
    assert environ["STEPWELL_GATEWAY_RESUBMIT_TIMEOUT_SECONDS"] == "720"  # 600 to load
    assert environ["STEPWELL_GATEWAY_EXPECTED_REPLICAS"] == "0"  # so no alert fires
    (scaled,) = release.of("ScaledObject")
    assert scaled["spec"]["minReplicaCount"] == 0
    assert "replicas" not in release.of("StatefulSet")[0]["spec"]
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == {"scaleDown": {"stabilizationWindowSeconds": 900}}
    assert scaled["spec"]["triggers"][-1]["type"] == "cron"
