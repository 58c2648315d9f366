"""`stepwell up` passes valid and intended settings to each service."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from services.cli.processes.plan import Addresses, stages
from services.cli.settings import UpSettings, settings_of
from services.common.process.logs import LogFormat, LogLevel
from services.common.process.settings import env_prefix, parse_settings
from services.gateway.settings import GatewaySettings
from services.kvpool.settings import KVPoolSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.parallel.membership import Membership, find_membership
from services.worker.settings import WorkerSettings

SETTINGS: dict[str, type[Any]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "kvpool": KVPoolSettings,
    "worker": WorkerSettings,
}

EVERYTHING = {
    "served_model_name": "other",
    "enable_lora": True,
    "enable_tokenizer_info_endpoint": True,
    "lora_modules": ("sql=adapters/sql",),
    "lora_dir": Path(__file__).parent,
    "max_loras": 2,
    "max_lora_rank": 32,
    "max_cpu_loras": 3,
    "generation_config": "vllm",
    "chat_template_content_format": "openai",
    "sse_keep_alive_interval": 5.0,
    "override_generation_config": '{"top_k": 5}',
    "chat_template": "{{ messages }}",
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "reasoning_parser": "qwen3",
    "tool_call_parser": "hermes",
    "enable_auto_tool_choice": True,
    "routing_policy": "round-robin",
    "stream_interval": 4,
    "unknown_fields": "refuse",
    "redis_url": "redis://:secret@127.0.0.1:6379",
    "api_keys": ("one", "two"),
    "admin_key": "operator",
    "api_key_file": Path("/etc/stepwell/keys.json"),
    "api_keys_in_redis": True,
    "share_cache_between_tenants": True,
    "ui": False,
    "tls_cert_file": Path(__file__),
    "tls_key_file": Path(__file__),
    "tls_client_ca_file": Path(__file__),
    "profile": "l4",
    "device_faults": "every 1000th step: fail",
    "device": "cpu",
    "batch_invariant": True,
    "dtype": "float32",
    "runner": "pooling",
    "quantization": "int8",
    "kv_cache_dtype": "int8_per_token_head",
    "gpu_memory_utilization": 0.5,
    "num_threads": 3,
    "cpu_omp_threads_bind": "nobind",
    "kv_cache_memory_bytes": 1_000_000,
    "num_blocks": 50,
    "kv_offloading_size": 0.5,
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    "block_size": 32,
    "mamba_cache_mode": "none",
    "max_model_len": 128,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 77,
    "policy": "program",
    "program_idle_seconds": 60.0,
    "max_num_programs": 9,
    "retention_headroom": 0.2,
    "aging_interval": 3,
    "max_warm_admissions": 5,
    "enable_prefix_caching": False,
    "prefix_match_unit": 8,
    "vllm_grpc_client_stops": True,
    "kv_events_endpoint": "tcp://*:5557",
    "kv_events_replay_endpoint": "tcp://*:5558",
    "kv_events_topic": "kv@10.0.0.7@llama",
    "kv_events_encoding": "array",
    "otlp_endpoint": "http://127.0.0.1:4317",
    "trace_sample_ratio": 0.25,
    "trace_step_sample_ratio": 0.5,
    "log_level": LogLevel.ERROR,
    "log_format": LogFormat.JSON,
}


OF_TRACES = ("otlp_endpoint", "trace_sample_ratio", "trace_step_sample_ratio")
"""Settings of tracing whose defaults under `stepwell up` differ from a service's own."""


def received(
    tmp_path: Path, environ: dict[str, str], *, vllm_grpc_ports: tuple[int, ...] = (), **given: Any
) -> dict[str, Any]:
    """Maps each service to the settings that it loads from its environment under `stepwell up`."""
    addresses = Addresses("::1", 8000, 9000, Path("/run/stepwell"), vllm_grpc_ports=vllm_grpc_ports)
    plan = stages(UpSettings(model=tmp_path, **given), addresses, environ)
    specs = {spec.name: spec for stage in plan for spec in stage.specs}
    assert {name: spec.command[1:] for name, spec in specs.items()} == {
        name: ("-m", f"services.{name}") for name in SETTINGS
    }
    return {
        name: parse_settings(cls, name, [], specs[name].environ) for name, cls in SETTINGS.items()
    }


def test_every_setting_that_is_passed_on_reaches_its_services(tmp_path: Path) -> None:
    assert set(EVERYTHING) == {name for service in SETTINGS for name in settings_of(service)}
    for service, settings in received(tmp_path, {}, **EVERYTHING).items():
        for name in settings_of(service):
            value = getattr(settings, name)
            if name == "otlp_endpoint":
                value = value.partition(",")[0]
            wanted = EVERYTHING[name]
            assert wanted in (value, getattr(value, "value", value)), (service, name)


def test_a_flag_replaces_the_file_of_a_secret(tmp_path: Path) -> None:
    environ = {"STEPWELL_GATEWAY_API_KEYS_FILE": "/run/secrets/keys"}
    assert received(tmp_path, environ, api_keys=("one",))["gateway"].api_keys == ("one",)


def test_the_services_find_each_other(tmp_path: Path) -> None:
    services = received(tmp_path, {})
    gateway, scheduler = services["gateway"], services["scheduler"]
    assert (gateway.http_address, gateway.address) == ("[::1]:8000", "[::1]:9000")
    assert gateway.health_address == "unix:/run/stepwell/gateway.sock"
    assert gateway.schedulers == (scheduler.address,) == ("unix:/run/stepwell/scheduler.sock",)
    assert scheduler.kvpool == services["kvpool"].address == "unix:/run/stepwell/kvpool.sock"
    assert scheduler.workers == (services["worker"].address,)
    assert gateway.model == services["worker"].model == tmp_path


def test_the_scheduler_serves_gateways_of_others_on_a_port_of_its_own(tmp_path: Path) -> None:
    """The scheduler gets the model's directory, from which vLLM's gateways fetch the tokenizer."""
    assert received(tmp_path, {})["scheduler"].vllm_grpc_address is None
    scheduler = received(tmp_path, {}, vllm_grpc_ports=(9100,))["scheduler"]
    assert (scheduler.vllm_grpc_address, scheduler.model) == ("[::1]:9100", tmp_path)


def test_each_replica_serves_gateways_of_others_on_a_port_of_its_own(tmp_path: Path) -> None:
    addresses = Addresses("::1", 8000, 9000, tmp_path, vllm_grpc_ports=(9100, 9101))
    plan = stages(UpSettings(model=tmp_path, replicas=2), addresses, {})
    served = [
        parse_settings(SchedulerSettings, "scheduler", [], spec.environ).vllm_grpc_address
        for stage in plan
        for spec in stage.specs
        if spec.name.startswith("scheduler")
    ]
    assert served == ["[::1]:9100", "[::1]:9101"]


def test_what_is_not_given_is_the_services_own_default(tmp_path: Path) -> None:
    for name, settings in received(tmp_path, {}).items():
        for field in dataclasses.fields(SETTINGS[name]):
            if field.name in settings_of(name) and field.name not in OF_TRACES:
                assert getattr(settings, field.name) == field.default, (name, field.name)


def test_without_a_collector_the_gateway_alone_keeps_traces(tmp_path: Path) -> None:
    services = received(tmp_path, {})
    gateway = services.pop("gateway")
    assert (gateway.trace_address, gateway.otlp_endpoint) == ("unix:/run/stepwell/traces.sock", "")
    assert (gateway.trace_sample_ratio, gateway.trace_store_max_per_minute) == (1, 12)
    assert gateway.trace_linger_seconds > 0, "it takes the spans of the others until they stop"
    for service in services.values():
        assert service.otlp_endpoint == gateway.trace_address
        assert service.trace_sample_ratio == 0  # the gateway alone decides what is traced
    assert services["scheduler"].trace_step_sample_ratio == 1


def test_a_ratio_takes_the_place_of_the_limit_of_a_minute(tmp_path: Path) -> None:
    services = received(tmp_path, {}, trace_sample_ratio=0.5)
    assert services["gateway"].trace_store_max_per_minute == 0
    assert {service.trace_sample_ratio for service in services.values()} == {0.5}


@pytest.mark.parametrize(
    ("environ", "given"),
    [
        ({}, {"otlp_endpoint": "http://collector:4317"}),
        ({f"{env_prefix('scheduler')}OTLP_ENDPOINT": "http://collector:4317"}, {}),
    ],
)
def test_with_a_collector_the_gateway_keeps_traces_too(
    tmp_path: Path, environ: dict[str, str], given: dict[str, Any]
) -> None:
    services = received(tmp_path, environ, **given)
    kept_at = "unix:/run/stepwell/traces.sock"
    gateway, scheduler = services["gateway"], services["scheduler"]
    assert (gateway.trace_address, gateway.otlp_endpoint) == (
        kept_at,
        given.get("otlp_endpoint", ""),
    )
    assert scheduler.otlp_endpoint == f"http://collector:4317,{kept_at}"
    assert scheduler.trace_step_sample_ratio == 0.01


def test_without_traces_nothing_is_kept(tmp_path: Path) -> None:
    services = received(tmp_path, {}, trace_sample_ratio=0.0)
    assert services["gateway"].trace_address is None
    assert services["kvpool"].otlp_endpoint == ""


def test_variables_of_the_services_pass_through(tmp_path: Path) -> None:
    environ = {
        f"{env_prefix('scheduler')}MAX_NUM_WAITING": "3",
        f"{env_prefix('worker')}MAX_NUM_SEQS": "4",
    }
    services = received(tmp_path, environ)
    assert services["scheduler"].max_num_waiting == 3
    assert services["worker"].max_num_seqs == 4
    assert received(tmp_path, environ, max_num_seqs=9)["worker"].max_num_seqs == 9


def test_requests_wait_as_long_as_a_restart_takes(tmp_path: Path) -> None:
    name = f"{env_prefix('gateway')}RESUBMIT_TIMEOUT_SECONDS"
    waits = [received(tmp_path, environ)["gateway"] for environ in ({}, {name: "5"})]
    assert [one.resubmit_timeout_seconds for one in waits] == [600, 5]


def test_ranks_of_a_divided_model_find_each_other(tmp_path: Path) -> None:
    addresses = Addresses("::1", 8000, 9000, Path("/run/stepwell"), master_ports=(7000,))
    plan = stages(UpSettings(model=tmp_path, tensor_parallel_size=2), addresses, {"RANK": "5"})
    specs = {spec.name: spec for stage in plan for spec in stage.specs}
    ranks = [specs[f"worker-{rank}"] for rank in range(2)]
    assert [spec.team for spec in ranks] == ["worker", "worker"]
    workers = [parse_settings(WorkerSettings, "worker", [], spec.environ) for spec in ranks]
    for rank, worker in enumerate(workers):
        expected = Membership(rank, 2, "127.0.0.1", 7000)
        assert find_membership(worker, ranks[rank].environ) == expected
    scheduler = parse_settings(SchedulerSettings, "scheduler", [], specs["scheduler"].environ)
    assert scheduler.workers == tuple(worker.address for worker in workers)


def test_only_rank_0_tells_probes_about_its_health(tmp_path: Path) -> None:
    """All ranks would write the same file and listen at the same address."""
    addresses = Addresses("::1", 8000, 9000, Path("/run/stepwell"), master_ports=(7000,))
    environ = {
        "STEPWELL_WORKER_HEALTH_FILE": "/run/health",
        "STEPWELL_WORKER_HEALTH_ADDRESS": "[::1]:9300",
        "PATH": "/usr/bin",
    }
    plan = stages(UpSettings(model=tmp_path, tensor_parallel_size=2), addresses, environ)
    environs = {spec.name: spec.environ for stage in plan for spec in stage.specs}
    assert environs["worker-0"].items() >= environ.items()
    assert environs["worker-1"].items() & environ.items() == {("PATH", "/usr/bin")}


def test_the_workers_of_all_stages_are_one_group(tmp_path: Path) -> None:
    addresses = Addresses("::1", 8000, 9000, Path("/run/stepwell"), master_ports=(7000,))
    settings = UpSettings(model=tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2)
    plan = stages(settings, addresses, {"WORLD_SIZE": "7"})
    specs = {spec.name: spec for stage in plan for spec in stage.specs}
    ranks = [specs[f"worker-{rank}"] for rank in range(4)]
    workers = [parse_settings(WorkerSettings, "worker", [], spec.environ) for spec in ranks]
    for rank, worker in enumerate(workers):
        expected = Membership(rank, 4, "127.0.0.1", 7000, 2)
        assert find_membership(worker, ranks[rank].environ) == expected
    scheduler = parse_settings(SchedulerSettings, "scheduler", [], specs["scheduler"].environ)
    assert scheduler.workers == tuple(worker.address for worker in workers)


def test_two_replicas_share_a_gateway_and_the_machine(tmp_path: Path) -> None:
    addresses = Addresses("::1", 8000, 9000, Path("/run/stepwell"))
    url = "redis://127.0.0.1:6379"
    plan = stages(UpSettings(model=tmp_path, replicas=2, redis_url=url), addresses, {})
    assert [[spec.name for spec in stage.specs] for stage in plan] == [
        ["gateway"],
        ["scheduler-0", "scheduler-1"],
        ["kvpool-0", "worker-0", "kvpool-1", "worker-1"],
    ]
    specs = {spec.name: spec for stage in plan for spec in stage.specs}

    def settings_of_child(name: str) -> Any:
        service = name.partition("-")[0]
        assert specs[name].command[1:] == ("-m", f"services.{service}")
        return parse_settings(SETTINGS[service], service, [], specs[name].environ)

    gateway = settings_of_child("gateway")
    schedulers = [settings_of_child(f"scheduler-{index}") for index in range(2)]
    assert gateway.schedulers == tuple(scheduler.address for scheduler in schedulers)
    for index, scheduler in enumerate(schedulers):
        pool, worker = (settings_of_child(f"{name}-{index}") for name in ("kvpool", "worker"))
        assert scheduler.replica == f"replica-{index}"
        assert scheduler.kvpool == pool.address == f"unix:/run/stepwell/kvpool-{index}.sock"
        assert scheduler.workers == (worker.address,)
        assert gateway.redis_url == pool.redis_url == url
        assert (worker.local_replica, worker.num_local_replicas) == (index, 2)
    teams = [spec.team or spec.name for spec in specs.values()]
    assert len(set(teams)) == len(specs)


def test_ranks_of_each_replica_are_a_group_and_a_team_of_their_own(tmp_path: Path) -> None:
    addresses = Addresses("::1", 8000, 9000, Path("/run/stepwell"), master_ports=(7000, 7001))
    settings = UpSettings(model=tmp_path, replicas=2, tensor_parallel_size=2)
    specs = {spec.name: spec for stage in stages(settings, addresses, {}) for spec in stage.specs}
    for replica in range(2):
        for rank in range(2):
            spec = specs[f"worker-{replica}-{rank}"]
            worker = parse_settings(WorkerSettings, "worker", [], spec.environ)
            expected = Membership(rank, 2, "127.0.0.1", 7000 + replica)
            assert find_membership(worker, spec.environ) == expected
            assert spec.team == f"worker-{replica}"


def test_only_workers_go_after_others(tmp_path: Path) -> None:
    addresses = Addresses("127.0.0.1", 8000, 9000, tmp_path)
    settings = UpSettings(model=tmp_path, replicas=2, worker_niceness=5)
    niceness = {
        spec.name: spec.niceness
        for stage in stages(settings, addresses, {})
        for spec in stage.specs
    }
    assert {name for name, number in niceness.items() if number} == {"worker-0", "worker-1"}
    assert niceness["worker-0"] == 5


@pytest.mark.parametrize("secret", ["one", "two"])
def test_keys_are_no_arguments_that_others_could_read(tmp_path: Path, secret: str) -> None:
    addresses = Addresses("127.0.0.1", 8000, 9000, tmp_path)
    plan = stages(UpSettings(model=tmp_path, api_keys=("one", "two")), addresses, {})
    assert not any(secret in spec.command for stage in plan for spec in stage.specs)


def test_all_of_it_stops_within_ten_seconds(tmp_path: Path) -> None:
    addresses = Addresses("127.0.0.1", 8000, 9000, tmp_path)
    plan = stages(UpSettings(model=tmp_path), addresses, {})
    assert [[spec.name for spec in stage.specs] for stage in plan] == [
        ["gateway"],
        ["scheduler"],
        ["kvpool", "worker"],
    ]
    assert sum(stage.stop_seconds for stage in plan) < 10
