"""For each alert, series that make the alert fire and similar series that do not.

Values are in promtool's notation: `a+bxn` is the value a, which then grows by b in each of n
minutes.
"""

from dataclasses import dataclass, field

MODEL = 'model_name="m"'
OF_REPLICA = 'instance="r:9101",model_name="m",engine="e"'


def buckets(name: str, bounds: dict[str, int]) -> dict[str, str]:
    """The series of a histogram. `bounds`: for each upper bound, the observations per minute."""
    return {
        f'{name}_bucket{{{OF_REPLICA},le="{bound}"}}': f"0+{count}x30"
        for bound, count in bounds.items()
    }


@dataclass(frozen=True)
class AlertStory:
    """Series for one alert. With the series `broken`, the alert fires at `minute` with the labels
    `fires`. With `calm` it does not fire. If the alert has a second cause, the series `also_broken`
    make it fire, too.
    """

    broken: dict[str, str]
    calm: dict[str, str]
    fires: dict[str, str] = field(default_factory=lambda: {"model_name": "m"})
    severity: str = "warning"
    minute: int = 20
    also_broken: dict[str, str] = field(default_factory=dict)


def _requests(*, errors: int) -> dict[str, str]:
    name = "vllm:request_success_total"
    return {
        f'{name}{{{OF_REPLICA},finished_reason="stop"}}': f"0+{1000 - errors}x30",
        f'{name}{{{OF_REPLICA},finished_reason="error"}}': f"0+{errors}x30",
    }


def _refusals(count: int, reason: str = "queue_full") -> dict[str, str]:
    return {
        f'stepwell_gateway_answers_total{{{MODEL},finished_reason="stop"}}': "0+90x30",
        f'vllm:admission_rejections_total{{{MODEL},reason="{reason}"}}': f"0+{count}x30",
    }


def _stalled(engine: str = "e", *, paused: int = 0, sessions: int = 0) -> dict[str, str]:
    """An engine with two waiting requests, some of which are sessions that wait for input."""
    labels = f'instance="{engine}:9101",model_name="m",engine="{engine}"'
    return {
        f"vllm:num_requests_running{{{labels}}}": "0x30",
        f"vllm:num_requests_waiting{{{labels}}}": "2x30",
        f'stepwell_client_sessions{{{labels},state="turn"}}': "0x30",
        f'stepwell_client_sessions{{{labels},state="waiting_for_chunk"}}': f"{sessions}x30",
        f"stepwell_step_seconds_count{{{labels}}}": "7x30",
        f'stepwell_engine_state{{{labels},state="paused"}}': f"{paused}x30",
    }


def _replicas(ready: int) -> dict[str, str]:
    return {
        f'stepwell_gateway_replicas_ready{{instance="g",{MODEL}}}': f"{ready}x30",
        f'stepwell_gateway_replicas{{instance="g",{MODEL}}}': "2x30",
    }


def _answers(errors: int) -> dict[str, str]:
    return {
        f'stepwell_gateway_http_responses_total{{job="g",instance="g",code="{code}"}}': f"0+{n}x30"
        for code, n in ((200, 100 - errors), (503, errors))
    }


def _starts(*times: int) -> dict[str, str]:
    return {
        f"process_start_time_seconds{{{_OF_WORKER}}}": _after_each_other(times),
        f"stepwell_build_info{{{_OF_WORKER}}}": "1x30",
    }


def _after_each_other(times: tuple[int, ...]) -> str:
    return " ".join(f"{time}x3" for time in times) + f" {times[-1]}x20"


def _tenant(refused: int, reason: str) -> dict[str, str]:
    series = {f'stepwell_tenant_refusals_total{{{_TENANT},reason="{reason}"}}': f"0+{refused}x30"}
    if refused < 100:
        series[f"stepwell_tenant_requests_total{{{_TENANT}}}"] = f"0+{100 - refused}x30"
    return series


def _lost_tokens(count: int) -> dict[str, str]:
    return {
        f"stepwell_preempted_tokens_total{{{OF_REPLICA}}}": f"0+{count}x30",
        f"vllm:iteration_tokens_total_sum{{{OF_REPLICA}}}": "0+1000x30",
    }


_TENANT = f'{MODEL},tenant="acme"'
_OF_WORKER = f'{OF_REPLICA},service="worker",rank="0"'
_ENGINE = {"model_name": "m", "engine": "e"}
_REPLICA = _ENGINE | {"instance": "r:9101"}
_RECOVERIES = f'stepwell_recoveries_total{{{OF_REPLICA},lost="workers"}}'
_STARTING = 'stepwell_engine_state{instance="r:9101",engine="e",state="starting"}'
_DROPPED = 'stepwell_trace_spans_dropped_total{job="stepwell",instance="g",service="gateway"'
_OF_CERTIFICATE = '{job="stepwell",instance="g",service="gateway",certificate="public"}'
_CERTIFICATE = f"stepwell_tls_certificate_seconds_left{_OF_CERTIFICATE}"
_USABLE = f"stepwell_tls_files_usable{_OF_CERTIFICATE}"

STORIES = {
    "StepwellTargetDown": AlertStory(
        {'up{job="stepwell-replica",instance="r:9101"}': "1x5 0x30"},
        {
            'up{job="stepwell-replica",instance="r:9101"}': "1x30",
            # Other programs of a cluster have similar names.
            'up{job="kube-scheduler"}': "0x30",
            'up{job="prometheus-pushgateway"}': "0x30",
        },
        {"job": "stepwell-replica", "instance": "r:9101"},
        "critical",
    ),
    "StepwellStartSlow": AlertStory(
        {_STARTING: "1x30"},
        # The model is loaded after ten minutes.
        {
            _STARTING: "1x10 _x20",
            f'stepwell_engine_state{{{OF_REPLICA},state="idle"}}': "_x10 1x20",
        },
        {"instance": "r:9101", "engine": "e", "state": "starting"},
        minute=25,
    ),
    "StepwellNoReplicaReady": AlertStory(
        _replicas(0) | {f'stepwell_gateway_replicas_expected{{instance="g",{MODEL}}}': "1x30"},
        _replicas(0) | {f'stepwell_gateway_replicas_expected{{instance="g",{MODEL}}}': "0x30"},
        severity="critical",
        also_broken=_replicas(0),
    ),
    "StepwellReplicaNotReady": AlertStory(_replicas(1), _replicas(2)),
    "StepwellFewerReplicas": AlertStory(
        _replicas(1) | {f'stepwell_gateway_replicas_expected{{instance="g",{MODEL}}}': "2x30"},
        {
            # An autoscaler has removed a replica, down to the expected number.
            f'stepwell_gateway_replicas_ready{{instance="g",{MODEL}}}': "3x10 2x30",
            f'stepwell_gateway_replicas_expected{{instance="g",{MODEL}}}': "2x40",
        },
        # No number of replicas is configured. The lost replica is no longer in the registry.
        also_broken={
            f'stepwell_gateway_replicas_ready{{instance="g",{MODEL}}}': "2x10 1x30",
            # Another gateway still reaches all replicas.
            f'stepwell_gateway_replicas_ready{{instance="h",{MODEL}}}': "2x40",
        },
    ),
    "StepwellRestartLoop": AlertStory(
        _starts(1, 2, 3, 4),
        # Another program also restarts.
        _starts(1, 1, 2, 3)
        | {'process_start_time_seconds{instance="o"}': _after_each_other((1, 2, 3, 4))},
        _REPLICA | {"service": "worker", "rank": "0"},
        minute=16,
    ),
    "StepwellServerErrors": AlertStory(
        _answers(6), _answers(4), {"job": "g", "instance": "g"}, "critical"
    ),
    "StepwellKVCacheFull": AlertStory(
        {f"vllm:kv_cache_usage_perc{{{OF_REPLICA}}}": "0.97x30"},
        {f"vllm:kv_cache_usage_perc{{{OF_REPLICA}}}": "0.97x9 0.5 0.97x9 0.5x30"},
        _REPLICA,
    ),
    "StepwellSpansDropped": AlertStory(
        {f'{_DROPPED},reason="outage"}}': "0x10 0+5x30"},
        {f'{_DROPPED},reason="outage"}}': "7x30"},
        {"job": "stepwell", "instance": "g", "service": "gateway"},
    ),
    "StepwellCertificateReloadFails": AlertStory(
        {_USABLE: "1x10 0x100"},
        # The operator has copied the files one by one, or has restored the previous ones.
        {_USABLE: "1x10 0 1x100"},
        {"job": "stepwell", "instance": "g", "service": "gateway", "certificate": "public"},
        # It does not end before the files can be used.
        minute=90,
    ),
    "StepwellEngineStalled": AlertStory(
        _stalled(sessions=1),
        _stalled(paused=1) | _stalled("f", sessions=2),
        _ENGINE | {"instance": "e:9101"},
        "critical",
    ),
    "StepwellRecoveries": AlertStory(
        {_RECOVERIES: "0x6 1 2 3x30"}, {_RECOVERIES: "0x6 1 2x30"}, _ENGINE | {"lost": "workers"}
    ),
    "StepwellQueueTimeHigh": AlertStory(
        buckets("vllm:request_queue_time_seconds", {"10.0": 90, "15.0": 100, "+Inf": 100}),
        buckets("vllm:request_queue_time_seconds", {"10.0": 100, "15.0": 100, "+Inf": 100}),
    ),
    "StepwellTimeToFirstTokenHigh": AlertStory(
        buckets("vllm:time_to_first_token_seconds", {"20.0": 90, "40.0": 100, "+Inf": 100}),
        buckets("vllm:time_to_first_token_seconds", {"20.0": 100, "40.0": 100, "+Inf": 100}),
    ),
    "StepwellRequestsRefused": AlertStory(
        _refusals(10),
        _refusals(10, "invalid_argument"),
        # A gateway that has not answered a request yet has no counter of answers.
        also_broken={
            name: values
            for name, values in _refusals(10, "no_replica_ready").items()
            if "answers" not in name
        },
    ),
    "StepwellTenantRefused": AlertStory(
        _tenant(60, "requests_rate_limit_exceeded"),
        _tenant(60, "invalid_argument"),
        {"tenant": "acme"},
        # None of its requests is answered.
        also_broken=_tenant(100, "tenant_queue_full"),
    ),
    "StepwellRequestsFail": AlertStory(
        _requests(errors=11), _requests(errors=9), severity="critical"
    ),
    "StepwellCorruptedRequests": AlertStory(
        {f"vllm:corrupted_requests_total{{{OF_REPLICA}}}": "0x15 1x30"},
        {f"vllm:corrupted_requests_total{{{OF_REPLICA}}}": "1x30"},
        _ENGINE,
        "critical",
    ),
    "StepwellPreemptionsCostly": AlertStory(_lost_tokens(200), _lost_tokens(50)),
    "StepwellPaused": AlertStory(
        {f'stepwell_engine_state{{{OF_REPLICA},state="paused"}}': "1x30"},
        {
            f'stepwell_engine_state{{{OF_REPLICA},state="paused"}}': "0x30",
            f'stepwell_engine_state{{{OF_REPLICA},state="idle"}}': "1x30",
        },
        _REPLICA | {"state": "paused"},
    ),
    "StepwellPrefixIndexNotExact": AlertStory(
        {
            'stepwell_prefix_index_state{instance="g",state="degraded"}': "1x5 0x30",
            'stepwell_prefix_index_state{instance="g",state="fallback"}': "0x5 1x30",
        },
        {
            'stepwell_prefix_index_state{instance="g",state="exact"}': "1x5 0x30",
            'stepwell_prefix_index_state{instance="g",state="fallback"}': "0x35",
            # A single replica leaves the prefix index unused, which is no reason for an alert.
            'stepwell_prefix_index_state{instance="g",state="unused"}': "0x5 1x30",
        },
        {"instance": "g"},
    ),
    "StepwellRedisUnreachable": AlertStory(
        {'stepwell_discovery_up{instance="g",source="redis"}': "1x5 0x30"},
        {
            'stepwell_discovery_up{instance="g",source="redis"}': "1x30",
            'stepwell_discovery_up{instance="g",source="dns:a:1"}': "0x30",
            'stepwell_registration_up{instance="r:9101"}': "1x30",
        },
        {"instance": "g", "source": "redis"},
    ),
    "StepwellCertificateExpires": AlertStory(
        {_CERTIFICATE: "604000x30"},
        {_CERTIFICATE: "605000x30"},
        {"job": "stepwell", "instance": "g", "service": "gateway", "certificate": "public"},
    ),
}
CALM_ONLY_BY_DURATION = {"StepwellKVCacheFull"}
"""Alerts that do not fire in the calm system only because its state is too short."""
