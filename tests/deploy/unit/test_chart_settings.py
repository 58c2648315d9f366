"""The services accept the settings that the Helm chart passes to them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.common.process.settings import env_prefix, parse_settings
from services.gateway.settings import GatewaySettings
from services.scheduler.adapters.gateways.registration import Registration
from services.scheduler.settings import SchedulerSettings
from services.worker.parallel.membership import find_membership
from services.worker.settings import WorkerSettings
from tests.deploy.conftest import CHART
from tests.deploy.rendered import Container, Object, Rendered
from tests.deploy.service_settings import SETTINGS, json_schemas

SECRET_FILES = {
    **dict.fromkeys(("tls.crt", "tls.key", "ca.crt", "keys.json"), ""),
    **{"plain": "sk-a,sk-b", "url": "redis://user:secret@redis.example.org:6379"},
}

LEFT_OUT: dict[str, set[str]] = {
    # Operators' calls are served at a Unix socket, where no key is needed. Spans are sent to a
    # collector, because each of several gateways would store only a part of them. preStopSeconds
    # delays the drain.
    "gateway": {
        *("admin_key", "trace_address", "trace_store_max_per_minute"),
        *("trace_linger_seconds", "drain_delay_seconds"),
    },
    "scheduler": set(),
    # A pool listens only at a Unix socket, and its scheduler serves its metrics.
    "kvpool": {
        "metrics_address",
        *("internal_tls_cert_file", "internal_tls_key_file", "internal_tls_ca_file"),
        "internal_tls_allowed_names",
    },
    "worker": set(),
}
"""The settings of each service that no value of the chart can set."""
DEFAULTS = {"resubmit_timeout_seconds"}
"""Settings that the chart sets if `settings` does not."""


def test_every_variable_is_a_setting_with_a_value_that_it_takes(
    release: Rendered, tmp_path: Path
) -> None:
    containers = list(_services(release))
    assert {container.service for container in containers} == release.services
    for number, container in enumerate(containers):
        service = container.service
        assert service is not None
        environ = _with_files(container, tmp_path / str(number))
        known = {env_prefix(service) + name.upper() for name in json_schemas(service)}
        secrets = {f"{env_prefix(service)}{name}_FILE" for name in ("REDIS_URL", "API_KEYS")}
        assert _ours(environ) <= known | secrets, container.name
        settings = parse_settings(
            SETTINGS[service], service, container.spec.get("args", []), environ
        )
        assert "$(" not in repr(settings), container.name
        _check_as_the_service_does(settings, environ)


def _check_as_the_service_does(settings: object, environ: Mapping[str, str]) -> None:
    """Raises SettingError for settings that contradict each other."""
    if isinstance(settings, GatewaySettings):
        settings.require_admin_key()
        settings.require_tool_call_parser()
        assert settings.known_schedulers or settings.redis_url
    if isinstance(settings, SchedulerSettings):
        Registration(settings)
    if isinstance(settings, WorkerSettings):
        find_membership(settings, environ)


def test_ranks_are_numbered_and_listed_in_their_order(releases: dict[str, Rendered]) -> None:
    for name, size, stages in (("tensor-parallel-gpu", 2, 1), ("groups", 3, 1), ("stages", 4, 2)):
        replica, rank = releases[name].pod("replica"), releases[name].pod("rank")
        scheduler = replica.containers()[-1].environment()
        workers = scheduler["STEPWELL_SCHEDULER_WORKERS"].split(",")
        assert len(workers) == size, name
        assert workers[0] == "unix:/run/stepwell/worker.sock"
        first, second = (
            find_membership(_worker_settings(container), container.environment())
            for container in (replica.containers()[1], rank.containers()[0])
        )
        assert (first.rank, first.master_addr) == (0, "10.0.0.7")
        assert (second.rank, second.size, first.size) == (1, size, size)
        assert (first.pipeline_parallel_size, first.tensor_parallel_size) == (
            stages,
            size // stages,
        )
        assert f"-1.{_subdomain(name)}.llm.svc:9003" in workers[1], workers


def test_ranks_of_one_pod_listen_where_the_scheduler_calls_them(
    releases: dict[str, Rendered],
) -> None:
    pod = releases["tensor-parallel-pod"].pod("replica")
    assert pod.owner["kind"] == "StatefulSet"
    _, worker, scheduler = pod.containers()
    called = scheduler.environment()["STEPWELL_SCHEDULER_WORKERS"].split(",")
    listens = worker.environment()["STEPWELL_WORKER_ADDRESS"]
    assert called == [listens.replace("{rank}", str(rank)) for rank in range(4)]
    own = find_membership(_worker_settings(worker), {"RANK": "0"})
    assert (own.size, own.master_addr) == (4, "127.0.0.1")
    assert worker.spec["resources"]["limits"]["nvidia.com/gpu"] == own.size
    shared = worker.mounts()["/dev/shm"]
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert "/etc/stepwell/internal-tls" not in worker.mounts()


def _subdomain(name: str) -> str:
    return "demo-stepwell-replica" if name == "tensor-parallel-gpu" else "demo-stepwell-ranks"


def _worker_settings(container: Container) -> WorkerSettings:
    environ = {
        name: value
        for name, value in container.environment().items()
        if not name.endswith(("_MODEL", "_FILE"))
    }
    return parse_settings(WorkerSettings, "worker", ["--model", str(Path.cwd())], environ)


@pytest.mark.parametrize("service", SETTINGS)
def test_the_schema_has_the_settings_that_the_chart_does_not_set(
    releases: dict[str, Rendered], service: str
) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    offered = schema["properties"][service]["properties"]["settings"]["properties"]
    declared = json_schemas(service)
    wrong = {name: kind for name, kind in offered.items() if declared.get(name) != kind}
    assert wrong == {}, "not in the service's settings, or of another type"
    set_by_chart = _set_by_chart(releases, service) - DEFAULTS
    assert offered.keys() & (set_by_chart | LEFT_OUT[service]) == set()
    missing = declared.keys() - offered.keys() - set_by_chart - LEFT_OUT[service]
    assert missing == set(), f"add them below {service}.settings in {CHART / 'values.schema.json'}"


def _set_by_chart(releases: dict[str, Rendered], service: str) -> set[str]:
    """The settings of a service that a template of the chart sets, without those that come from
    `settings` in the values.
    """
    names: set[str] = set()
    for release in releases.values():
        given = release.values.get(service, {}).get("settings", {})
        for container in _services(release):
            if container.service == service:
                variables = _ours(container.environment())
                own = {name.removeprefix(env_prefix(service)).lower() for name in variables}
                own |= {name.removesuffix("_file") for name in own} & {"redis_url", "api_keys"}
                names |= own - given.keys()
    return names


def test_settings_of_the_values_reach_their_service_as_written(
    releases: dict[str, Rendered],
) -> None:
    """The values are large numbers (which templates read as floats), a list and a boolean."""
    fleet, everything = releases["fleet"], releases["everything"]
    worker = next(c for c in _services(fleet) if c.service == "worker").environment()
    assert worker["STEPWELL_WORKER_KV_CACHE_MEMORY_BYTES"] == str(16 * 2**30)
    gateway = everything.pod("gateway").containers()[0].environment()
    assert gateway["STEPWELL_GATEWAY_EXPECTED_REPLICAS"] == "2"  # the autoscaler's minimum
    assert gateway["STEPWELL_GATEWAY_MAX_BODY_BYTES"] == str(8 * 2**20)
    assert gateway["STEPWELL_GATEWAY_ALLOWED_HOSTS"] == "llm.example.org,stepwell-gateway.llm.svc"
    scheduler = everything.pod("replica").containers()[-1].environment()
    assert scheduler["STEPWELL_SCHEDULER_VLLM_GRPC_CLIENT_STOPS"] == "true"


def _services(release: Rendered) -> Iterator[Container]:
    return (container for container in release.containers() if container.service is not None)


def _ours(environ: Mapping[str, str]) -> set[str]:
    return {name for name in environ if name.startswith("STEPWELL_")}


def _with_files(container: Container, root: Path) -> dict[str, str]:
    """The container's variables, with paths in volumes replaced by paths in the folder `root`."""
    mounts = container.mounts()
    for path, volume in mounts.items():
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for name, text in SECRET_FILES.items() if "secret" in volume else ():
            (root / path.lstrip("/") / name).write_text(text)
    environ = container.environment()
    for name, value in environ.items():
        if any(value == path or value.startswith(path + "/") for path in mounts):
            environ[name] = str(root / value.lstrip("/"))
            if name.endswith("_MODEL"):
                Path(environ[name]).mkdir(parents=True, exist_ok=True)
            elif value.endswith(".json"):
                Path(environ[name]).touch()
    return environ


def test_a_variable_that_is_no_setting_is_found(releases: dict[str, Rendered]) -> None:
    container = next(_services(releases["small"]))
    misspelt: Object = {"name": "STEPWELL_GATEWAY_MODELS", "value": "demo"}
    changed: dict[str, Any] = {**container.spec, "env": [*container.spec["env"], misspelt]}
    environ = Container(container.pod, changed).environment()
    known = {env_prefix("gateway") + name.upper() for name in json_schemas("gateway")}
    assert _ours(environ) - known == {"STEPWELL_GATEWAY_MODELS"}
