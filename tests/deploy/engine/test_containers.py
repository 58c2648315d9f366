"""Runs the images and the compose files on a real Docker engine. This takes minutes:

make test ARGS="tests/deploy -m engine"
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from services.cli.deploy.check import until_healthy
from services.cli.deploy.compose import compose_program
from services.cli.deploy.fleet import GatewayFleet
from tests.deploy.compose_files import DIRECTORY, ROOT, services_of
from tests.deploy.engine.conftest import Up, docker_client
from tests.plain_http import http_get
from tests.waiting import wait_for

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

MEGABYTE = 1_000_000
LIMITS = {"gateway": 450, "scheduler": 200, "kvpool": 200, "worker": 1300}
"""The maximum size of each image in megabytes."""
PROMPT = "class Point:"


@contextmanager
def client_of(up: Up, api_key: str = "none", max_retries: int = 0) -> "Iterator[OpenAI]":
    from openai import OpenAI  # noqa: PLC0415 - every collection of the tests imports this module

    with OpenAI(base_url=f"{up.url}/v1", api_key=api_key, max_retries=max_retries) as client:
        yield client


def num_ready(up: Up) -> int:
    return len(GatewayFleet(up.url).running())


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("service", LIMITS)
def test_an_image_is_small(service: str) -> None:
    image = docker_client().images.get(services_of("services.yaml")[service]["image"])
    assert image.attrs["Size"] <= LIMITS[service] * MEGABYTE


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("service", ["gateway", "scheduler", "kvpool"])
def test_there_is_no_torch_where_no_tensor_is(service: str) -> None:
    image = services_of("services.yaml")[service]["image"]
    found = docker_client().containers.run(
        image,
        ["-c", "import importlib.util as u; print(u.find_spec('torch'))"],
        entrypoint="python3",
        remove=True,
    )
    assert found == b"None\n"


def test_the_openai_sdk_is_served(fleet: Up) -> None:
    with client_of(fleet) as client:
        asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 41, "temperature": 0}
        whole = client.completions.create(**asked)  # type: ignore[call-overload]
        parts = client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        assert whole.usage.completion_tokens == 41
        assert [model.id for model in client.models.list()] == ["demo"]


def test_both_replicas_have_registered_under_their_names(fleet: Up) -> None:
    assert GatewayFleet(fleet.url).running().keys() == {"scheduler-0", "scheduler-1"}


def test_services_run_without_root_capabilities_and_a_writable_root(fleet: Up) -> None:
    for container in fleet.containers():
        if container.labels["stepwell.role"] not in LIMITS:
            continue
        identity = container.exec_run(
            ["sh", "-c", "id -u; touch /written 2>&1; grep CapEff /proc/1/status"]
        )
        user, refusal, capabilities = identity.output.decode().splitlines()
        assert user == "10001"
        assert "Read-only file system" in refusal
        assert int(capabilities.split()[1], 16) == 0


def test_workers_compute_with_kernels_that_the_image_brought(fleet: Up) -> None:
    for container in fleet.containers():
        if container.labels["stepwell.role"] == "worker":
            logs = container.logs().decode()
            assert "kernels: native" in logs
            assert "compiling kernels" not in logs


def test_prometheus_has_the_metrics_of_every_service(fleet: Up) -> None:
    prometheus = fleet.url_of("prometheus", 9090)

    def values(query: str) -> dict[str, str]:
        answer = http_get(f"{prometheus}/api/v1/query?query={query}").json()
        return {
            one["metric"].get("instance", ""): one["value"][1] for one in answer["data"]["result"]
        }

    wait_for(lambda: list(values("up").values()) == ["1"] * 4)
    for job, number in (("stepwell-gateway", 1), ("stepwell-replica", 2), ("otel-collector", 1)):
        assert len(values(f"up{{job='{job}'}}")) == number
    # Each replica has one series. The gateway serves the metrics of all replicas.
    wait_for(lambda: len(values("vllm:num_requests_running")) == 2)


def test_prometheus_evaluates_every_rule(fleet: Up) -> None:
    prometheus = fleet.url_of("prometheus", 9090)
    written = [
        rule.get("alert") or rule["record"]
        for path in sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]

    def evaluated() -> list[str]:
        groups = http_get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
        return [
            rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "ok"
        ]

    wait_for(lambda: sorted(evaluated()) == sorted(written))


def test_grafana_is_given_the_dashboards_and_where_they_are(fleet: Up) -> None:
    (grafana,) = [one for one in fleet.containers() if one.labels["stepwell.role"] == "grafana"]

    def files_in(directory: str) -> set[str]:
        listed = grafana.exec_run(["ls", directory])
        assert listed.exit_code == 0
        return set(listed.output.decode().split())

    dashboards = (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")
    assert files_in("/etc/stepwell/dashboards") == {path.name for path in dashboards}
    assert files_in("/etc/grafana/provisioning/dashboards") == {"stepwell.yaml"}
    assert files_in("/etc/grafana/provisioning/datasources") == {"stepwell.yaml"}


def test_spans_reach_the_collector(fleet: Up) -> None:
    """The collector's stand-in counts the spans. If the real collector runs, Jaeger has them."""
    with client_of(fleet) as client:
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=4)
    prometheus, query = fleet.url_of("prometheus", 9090), "standin_received_spans_total"

    def received() -> bool:
        answer = http_get(f"{prometheus}/api/v1/query?query={query}").json()
        return any(float(one["value"][1]) > 0 for one in answer["data"]["result"])

    if os.environ.get("COLLECTOR_IMAGE", "").startswith("stepwell/standin"):
        wait_for(received)
    else:
        jaeger = fleet.url_of("jaeger", 16686)
        wait_for(lambda: "gateway" in http_get(f"{jaeger}/api/services").json()["data"])


def test_a_further_replica_joins_and_leaves(fleet: Up, up: Callable[..., Up]) -> None:
    replica = up("stepwell-test-2", "replica.yaml", REPLICA="2", FLEET="stepwell-test_default")
    wait_for(lambda: num_ready(fleet) == 3)
    assert "scheduler-2" in GatewayFleet(fleet.url).running()
    for container in replica.containers():
        container.stop()
    wait_for(lambda: num_ready(fleet) == 2)


def check(*arguments: str) -> list[str]:
    """Runs `stepwell deploy check`, which must succeed. Returns its lines about trials."""
    checked = subprocess.run(
        # On a busy machine, the health probes of a dozen containers alone take minutes.
        [sys.executable, "-m", "services.cli", "deploy", "check", "--heal-seconds=600", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(checked.stdout)
    assert checked.returncode == 0
    assert "healed every time, and no stream failed" in checked.stdout
    return re.findall(r"^.*same texts, healed in.*$", checked.stdout, re.MULTILINE)


@pytest.mark.usefixtures("fleet")
def test_broken_containers_heal_without_a_failed_stream() -> None:
    """Workers, pools, schedulers, replicas and Redis are killed, paused, disconnected, stopped."""
    roles = "--roles=worker,kvpool,scheduler,replica,redis"
    files = f"--file={DIRECTORY / 'compose.yaml'}"
    assert len(check("--keep", "--project-name=stepwell-test", files, roles)) == 20


@pytest.mark.usefixtures("published")
def test_a_key_is_rotated_while_clients_stream() -> None:
    files = f"--file={DIRECTORY / 'small.yaml'}"
    (line,) = check("--project-name=stepwell-test-keys", files, "--faults=", "--rotate-key")
    assert "rotate API key (gateway): " in line


def test_the_small_variant_serves(up: Callable[..., Up]) -> None:
    small = up("stepwell-test-small", "small.yaml")
    with client_of(small) as client:
        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": PROMPT}], max_tokens=8
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert num_ready(small) == 1


def test_two_models_have_one_address_and_do_not_disturb_each_other(up: Callable[..., Up]) -> None:
    running = up(
        "stepwell-test-models",
        *("compose.yaml", "two-models.yaml"),
        SECOND_MODEL=str(ROOT / "models" / "demo"),
    )
    with client_of(running, max_retries=5) as client:
        assert [model.id for model in client.models.list()] == ["demo", "second"]

        def text_of(name: str) -> str:
            answer = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=24, temperature=0
            )
            assert answer.model == name
            text: str = answer.choices[0].text
            return text

        texts = {name: text_of(name) for name in ("demo", "second")}
        prometheus = running.url_of("prometheus", 9090)

        def ready_by_model() -> dict[str, str]:
            query = {"query": "stepwell_gateway_replicas_ready"}
            found = http_get(f"{prometheus}/api/v1/query", params=query).json()["data"]["result"]
            return {series["metric"]["model_name"]: series["value"][1] for series in found}

        wait_for(lambda: ready_by_model() == {"demo": "2", "second": "1"})
        second = [
            container
            for container in running.containers()
            if container.labels.get("stepwell.replica") == "second"
        ]
        for container in second:
            container.kill()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(text_of, "second")
            for _ in range(10):
                assert text_of("demo") == texts["demo"]
            for container in second:
                container.start()
            assert waiting.result(timeout=300) == texts["second"]


def test_inspected_containers_show_no_secret(up: Callable[..., Up], tmp_path: Path) -> None:
    password = "hidden-password"
    (tmp_path / "api-keys").write_text("sk-hidden")
    (tmp_path / "redis.conf").write_text(f"requirepass {password}\n")
    (tmp_path / "redis-url").write_text(f"redis://:{password}@redis:6379")
    running = up("stepwell-test-secrets", "compose.yaml", "secrets.yaml", SECRETS=str(tmp_path))
    with client_of(running, "sk-hidden", max_retries=5) as client:
        # The gateway can find its replicas only in Redis, which requires the password.
        assert client.completions.create(model="demo", prompt=PROMPT, max_tokens=4).choices
    assert http_get(f"{running.url}/v1/models").status_code == 401
    assert "hidden" not in json.dumps([one.attrs for one in running.containers()])


def upgrade_commands() -> tuple[str, list[list[str]]]:
    """The new tag, and the arguments of each command, of the upgrade in docs/deploying.md."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    ((tag, files, block),) = re.findall(
        r'^    export TAG=(\S+) \\\n +FILES="(.*)"\n((?:    .*\n)+)', page, re.MULTILINE
    )
    lines = re.findall(r"docker compose \$FILES (?!pull)([^#\n]+)", block)
    return tag, [[*files.split(), *line.split()] for line in lines]


def make_images_of_another_protocol(tag: str) -> None:
    for service in LIMITS:
        image = services_of("services.yaml")[service]["image"]
        text = f"""
            FROM {image}
            USER 0
            RUN cd /site/services/common/rpc && rm __pycache__/protocol.* \\
                && sed -i 's/^PROTOCOL = .*/PROTOCOL = 99/' protocol.py
            USER 10001:10001
            """
        name = f"{image.rpartition(':')[0]}:{tag}"
        subprocess.run(["docker", "build", "--tag", name, "-"], input=text.encode(), check=True)


def test_an_upgrade_and_its_rollback_lose_no_stream(
    up: Callable[..., Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the commands of docs/deploying.md with images of another protocol, and again with the
    old ones. Clients that never send a request again must get each text whole.
    """
    both = up("stepwell-test", "compose.yaml", "two-gateways.yaml")
    (old,) = {one.tag for one in both.project.containers() if one.role in LIMITS}
    new, commands = upgrade_commands()
    make_images_of_another_protocol(new)
    over, texts = threading.Event(), []

    def stream() -> None:
        with client_of(both) as client:
            while not over.is_set():
                parts = client.completions.create(
                    model="demo", prompt=PROMPT, max_tokens=41, temperature=0, stream=True
                )
                texts.append("".join(part.choices[0].text for part in parts))

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(stream) for _ in range(3)]
        try:
            for tag in (new, old):
                monkeypatch.setenv("TAG", tag)
                for arguments in commands:
                    subprocess.run(
                        [*compose_program(), "--project-name", "stepwell-test", *arguments],
                        cwd=ROOT,
                        check=True,
                    )
                    if "stop" not in arguments:
                        until_healthy(both.project, 600)
                    done = len(texts)
                    wait_for(lambda: len(texts) > done + 3, 60)  # noqa: B023 - called at once
                tags = [one.tag for one in both.project.containers() if one.role in LIMITS]
                assert tags == [tag] * 8
                wait_for(lambda: num_ready(both) == 2, 60)
        finally:
            over.set()
        for client in clients:
            client.result()
    assert len(set(texts)) == 1


def test_streams_of_one_gateway_go_on_without_the_other(up: Callable[..., Up]) -> None:
    """A gateway is killed, paused, disconnected and stopped. Its clients send requests again."""
    up("stepwell-test", "compose.yaml", "two-gateways.yaml")
    files = [f"--file={DIRECTORY / name}" for name in ("compose.yaml", "two-gateways.yaml")]
    lines = check("--keep", "--project-name=stepwell-test", *files, "--roles=gateway")
    assert [line.split()[2] for line in lines] == ["kill", "pause", "disconnect", "stop"]
    # One of four streams at the least was at the other gateway.
    assert all(int(re.findall(r"(\d+) broke", line)[0]) <= 3 for line in lines)
