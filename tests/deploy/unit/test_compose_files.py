"""The compose files agree with the services' settings, with the images, and with each other."""

import re
from typing import Any

import pytest
import yaml

from services.common.process.settings import env_prefix, parse_settings
from services.common.rpc.addresses import split_host_port
from services.download.settings import DownloadSettings
from services.gateway.settings import GatewaySettings
from services.kvpool.settings import KVPoolSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.backends.choices import DeviceSetting
from services.worker.options.simulated.faults import read_rules
from services.worker.profiles.profile import ComputedProfile, read_profile
from services.worker.settings import WorkerSettings
from tests.deploy.compose_files import DIRECTORY, ROOT, services_of
from tests.deploy.dockerfiles import environment_of

SETTINGS = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "kvpool": KVPoolSettings,
    "worker": WorkerSettings,
}
VARIANTS = {
    "compose": ("compose.yaml",),
    "two gateways": ("compose.yaml", "two-gateways.yaml"),
    "two models": ("compose.yaml", "two-models.yaml"),
    "secrets": ("compose.yaml", "secrets.yaml"),
    "small": ("small.yaml",),
    "replica": ("replica.yaml",),
    "download": ("download.yaml",),
    "gpu": ("compose.yaml", "gpu.yaml"),
    "small on a GPU": ("small.yaml", "gpu-small.yaml"),
    "replica on a GPU": ("replica.yaml", "gpu-small.yaml"),
    "simulated": ("compose.yaml", "simulated.yaml"),
    "small, simulated": ("small.yaml", "simulated-small.yaml"),
    "replica, simulated": ("replica.yaml", "simulated-small.yaml"),
}
VARIABLES = {"REPLICA": "2", "SECOND_MODEL": "../../models/demo"}
MOUNTED_SECRETS = "/run/secrets/"
SECRETS = {"api-keys": "sk-ann", "redis-url": "redis://:secret@redis:6379"}
OWN = [
    pytest.param(variant, name, id=f"{variant}: {name}")
    for variant, files in VARIANTS.items()
    for name, service in services_of(*files, **VARIABLES).items()
    if service["labels"]["stepwell.role"] in SETTINGS
]


def service_of(variant: str, name: str) -> dict[str, Any]:
    return services_of(*VARIANTS[variant], **VARIABLES)[name]


def role_of(service: dict[str, Any]) -> str:
    role: str = service["labels"]["stepwell.role"]
    return role


def image_of(service: dict[str, Any]) -> str:
    image: str = service["image"].partition("/")[2].partition(":")[0]
    return image


def settings_of(service: dict[str, Any]) -> Any:
    """The settings that the service loads from the variables of its image and its compose file."""
    role = role_of(service)
    environ = environment_of(image_of(service)) | {
        name: str(value) for name, value in service["environment"].items() if value is not None
    }
    for name in [name for name, value in environ.items() if value.startswith(MOUNTED_SECRETS)]:
        secret = environ.pop(name).removeprefix(MOUNTED_SECRETS)
        assert secret in service["secrets"]
        environ[name.removesuffix("_FILE")] = SECRETS[secret]
    for setting in ("MODEL", "FURTHER_MODELS"):
        name = f"{env_prefix(role)}{setting}"
        if name in environ:
            # A volume replaces an earlier one that is mounted at the same path.
            mounted = [text for text in service["volumes"] if f":{environ[name]}:ro" in text][-1]
            environ[name] = str((DIRECTORY / mounted.partition(":")[0]).resolve())
    return parse_settings(SETTINGS[role], role, [], environ)


@pytest.mark.parametrize(("variant", "name"), OWN)
def test_every_variable_is_a_setting_of_its_service(variant: str, name: str) -> None:
    service = service_of(variant, name)
    prefix = env_prefix(role_of(service))
    assert all(variable.startswith(prefix) for variable in service["environment"])
    settings_of(service)  # raises SettingError for an unknown or invalid variable


def test_a_download_is_what_the_services_mount() -> None:
    service = services_of("download.yaml", HF_MODEL="Qwen/Qwen3-0.6B@main")["download"]
    environ = {name: str(value) for name, value in service["environment"].items()}
    assert service["entrypoint"] == ["python3", "-m", "services.download"]
    settings = parse_settings(DownloadSettings, "download", [], environ)
    assert str(settings.model) == "Qwen/Qwen3-0.6B@main"
    assert "../../models:/models" in service["volumes"]
    assert str(settings.directory) == f"/models/{settings.model}"
    assert environ["HF_ENDPOINT"] == "https://huggingface.co"


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "simulated" in name])
def test_simulated_devices_have_the_profile_and_the_faults_of_the_environment(variant: str) -> None:
    variables = {"PROFILE": "l4", "DEVICE_FAULTS": "at step 9: hang 1 s; at step 10: fail"}
    services = services_of(*VARIANTS[variant], REPLICA="2", **variables)
    workers = [service for service in services.values() if role_of(service) == "worker"]
    assert len(workers) == (2 if variant == "simulated" else 1)
    for worker in workers:
        settings = settings_of(worker)
        assert settings.device is DeviceSetting.SIMULATED
        assert isinstance(read_profile(settings.profile), ComputedProfile)
        assert len(read_rules(settings.device_faults, 0, 0)) == 2
        assert settings.kv_cache_memory_bytes is None


@pytest.mark.parametrize(("variant", "name"), OWN)
def test_a_service_has_longer_to_stop_than_it_drains(variant: str, name: str) -> None:
    service = service_of(variant, name)
    settings = settings_of(service)
    longest = getattr(settings, "drain_delay_seconds", 0) + settings.drain_seconds
    assert int(service["stop_grace_period"].removesuffix("s")) >= 2 + longest


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        pytest.param(variant, name, id=f"{variant}: {name}")
        for variant, files in VARIANTS.items()
        for name in services_of(*files, **VARIABLES)
    ],
)
def test_every_container_is_confined(variant: str, name: str) -> None:
    service = service_of(variant, name)
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    ends = role_of(service) == "download"
    assert service["restart"] == ("no" if ends else "unless-stopped")
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")
    assert re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", service["image"]), "no version"
    # Process 1 cannot be killed from inside its container. With `init` it is not the service.
    if role_of(service) in (*SETTINGS, "redis"):
        assert service["init"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_that_are_mounted_exist(variant: str) -> None:
    for service in services_of(*VARIANTS[variant], **VARIABLES).values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DIRECTORY / source).exists(), source


@pytest.mark.parametrize("variant", VARIANTS)
def test_addresses_lead_to_services_of_the_same_network(variant: str) -> None:
    services = services_of(*VARIANTS[variant], **VARIABLES)
    names = set(services) | aliases(services)
    if variant.startswith("replica"):
        names |= {"redis", "otel-collector"}  # services of compose.yaml in the same network
    ports = {"redis": 6379, "otel-collector": 4317}
    for service in services.values():
        for variable, value in service.get("environment", {}).items():
            for host, port in re.findall(r"(?:^|[/:,])([a-z][\w-]*):(\d+)", str(value)):
                assert host in names, (variable, value)
                role = re.sub(r"^own-|-(\d+|second)$", "", host)
                if role in SETTINGS:
                    address = environment_of(role)[f"{env_prefix(role)}ADDRESS"]
                    assert int(port) == split_host_port(address)[1]
                else:
                    assert int(port) == ports[role]


def aliases(services: dict[str, dict[str, Any]]) -> set[str]:
    return {
        alias
        for service in services.values()
        for network in service.get("networks", {}).values()
        for alias in network.get("aliases", ())
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_published_ports_are_those_that_the_gateway_listens_on(variant: str) -> None:
    services = services_of(*VARIANTS[variant], **VARIABLES)
    for name, service in services.items():
        if name == "gateway":
            settings = settings_of(service)
            inside = {int(port.rpartition(":")[2]) for port in service["ports"]}
            addresses = (settings.address, settings.http_address)
            assert inside == {split_host_port(address)[1] for address in addresses}
        elif role_of(service) in SETTINGS:
            assert "ports" not in service


def test_each_replica_has_a_name_and_parts_of_its_own() -> None:
    """Each replica has its own network, in which the alias of its pool or worker is unique."""
    services = services_of("compose.yaml")
    schedulers = {name: one for name, one in services.items() if role_of(one) == "scheduler"}
    assert len(schedulers) == settings_of(services["gateway"]).expected_replicas == 2
    for name, scheduler in schedulers.items():
        settings = settings_of(scheduler)
        replica = scheduler["labels"]["stepwell.replica"]
        assert settings.replica == f"replica-{replica}"
        assert settings.advertise_address == f"{name}:9001"
        (own,) = set(scheduler["networks"]) - {"default"}
        members = {n: one for n, one in services.items() if own in one.get("networks", {})}
        assert set(members) == {f"{role}-{replica}" for role in ("scheduler", "kvpool", "worker")}
        assert {one["labels"]["stepwell.replica"] for one in members.values()} == {replica}
        for address in (settings.kvpool, *settings.workers):
            alias = split_host_port(address)[0]
            (part,) = [n for n, one in members.items() if alias in aliases({n: one})]
            assert services[part]["networks"][own]["aliases"] == [alias]
            assert alias == f"own-{role_of(services[part])}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_scheduler_is_stopped_before_its_pool_and_worker(variant: str) -> None:
    services = services_of(*VARIANTS[variant], **VARIABLES)
    for scheduler in (one for one in services.values() if role_of(one) == "scheduler"):
        number = scheduler["labels"].get("stepwell.replica")
        parts = [
            name
            for name, one in services.items()
            if role_of(one) in ("kvpool", "worker")
            and one["labels"].get("stepwell.replica") == number
        ]
        assert sorted(scheduler["depends_on"]) == sorted(parts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gateways_drain_before_the_schedulers_stop(variant: str) -> None:
    """Compose stops services that depend on others first."""
    services = services_of(*VARIANTS[variant], **VARIABLES)
    schedulers = [name for name, one in services.items() if role_of(one) == "scheduler"]
    for gateway in (one for one in services.values() if role_of(one) == "gateway"):
        assert sorted(gateway["depends_on"]) == sorted(schedulers)


def test_the_proxy_ends_after_the_streams_of_its_gateways() -> None:
    services = services_of(*VARIANTS["two gateways"])
    assert services["proxy"]["stop_signal"] == "SIGUSR1"
    assert services["proxy"]["stop_grace_period"] == services["gateway"]["stop_grace_period"]


def test_a_file_has_every_secret() -> None:
    """The secrets' files have Redis' URL for each service, and the API keys for the gateway."""
    services = services_of("compose.yaml", "secrets.yaml")
    text = yaml.safe_load((DIRECTORY / "secrets.yaml").read_text())["secrets"]
    assert {name for one in services.values() for name in one.get("secrets", ())} == set(text)
    for service in services.values():
        if "STEPWELL" in str(service.get("environment")):
            settings = settings_of(service)
            urls = [settings.redis_url] if hasattr(settings, "redis_url") else []
            assert urls in ([], [SECRETS["redis-url"]])
    assert settings_of(services["gateway"]).api_keys == (SECRETS["api-keys"],)


@pytest.mark.parametrize("variant", VARIANTS)
def test_file_systems_in_memory_have_a_size(variant: str) -> None:
    for name, service in services_of(*VARIANTS[variant], **VARIABLES).items():
        assert service["tmpfs"], name
        assert all(re.search(r":size=\d+m$", one) for one in service["tmpfs"]), name


def test_prometheus_asks_where_metrics_are_served() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    services = services_of("compose.yaml", "two-gateways.yaml")
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for job, role in (("stepwell-replica", "scheduler"), ("stepwell-gateway", "gateway")):
        (found,) = jobs[job]["dns_sd_configs"]
        served = environment_of(role)[f"{env_prefix(role)}METRICS_ADDRESS"]
        assert found["port"] == split_host_port(served)[1]
        wanted = {name for name, one in services.items() if role_of(one) == role}
        named = {n for n, one in services.items() if {*found["names"]} & aliases({n: one})}
        assert named == wanted
    exporter = yaml.safe_load((ROOT / "deploy/otel/collector.yaml").read_text())["exporters"]
    port = split_host_port(exporter["prometheus"]["endpoint"])[1]
    assert jobs["otel-collector"]["static_configs"] == [{"targets": [f"otel-collector:{port}"]}]


def test_the_proxy_knows_every_gateway() -> None:
    services = services_of("compose.yaml", "two-gateways.yaml")
    gateways = {name for name, one in services.items() if role_of(one) == "gateway"}
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    backends = re.findall(r"^backend (\w+)$(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(backends) == 4
    for name, lines in backends:
        port = 8000 if name.endswith("http") else 9000
        servers = re.findall(r"^    server (\S+) (\S+)", lines, re.MULTILINE)
        assert servers == [(one, f"{one}:{port}") for one in sorted(gateways)], name


def test_the_collector_uses_what_it_configures() -> None:
    config = yaml.safe_load((ROOT / "deploy/otel/collector.yaml").read_text())
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipe in config["service"]["pipelines"].values() for name in pipe[kind]}
        assert used == set(config[kind])
    for pipe in config["service"]["pipelines"].values():
        assert (pipe["processors"][0], pipe["processors"][-1]) == ("memory_limiter", "batch")


def test_grafana_finds_its_dashboards_and_data() -> None:
    mounts = dict(
        volume.split(":")[:2][::-1] for volume in services_of("compose.yaml")["grafana"]["volumes"]
    )
    (provider,) = yaml.safe_load((DIRECTORY / "grafana/dashboards/stepwell.yaml").read_text())[
        "providers"
    ]
    assert mounts[provider["options"]["path"]] == "../grafana/dashboards"
    sources = yaml.safe_load((DIRECTORY / "grafana/datasources/stepwell.yaml").read_text())
    services = services_of("compose.yaml")
    for source in sources["datasources"]:
        assert source["url"].removeprefix("http://").partition(":")[0] in services


def test_images_are_tagged_with_the_version_of_the_project() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    for service in services_of("compose.yaml").values():
        if role_of(service) in SETTINGS:
            assert service["image"] == f"stepwell/{role_of(service)}:{version}"


def test_the_page_names_every_variable_of_the_files() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text()
    used = {
        name
        for path in DIRECTORY.glob("*.yaml")
        for name in re.findall(r"\$\{(\w+)", path.read_text())
    }
    assert {name for name in used if f"`{name}`" not in page} == set()


def test_the_page_names_every_file() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text()
    assert [path.name for path in DIRECTORY.glob("*.yaml") if path.name not in page] == []
