"""Alertmanager's configuration, with a real Prometheus and a real Alertmanager."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.deploy.compose_files import ROOT, services_of
from tests.e2e.prometheus_server import needs_prometheus, prometheus
from tests.redis_servers import free_port
from tests.waiting import wait_for

CONFIGURATION = ROOT / "deploy" / "prometheus" / "alertmanager.yml"
PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
needs_alertmanager = pytest.mark.skipif(
    PROGRAM is None,
    reason="Alertmanager is not installed (Debian's package prometheus-alertmanager)",
)


def test_the_services_of_compose_listen_where_they_are_called() -> None:
    services = services_of("compose.yaml")
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (manager,) = config["alerting"]["alertmanagers"]
    assert manager["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    assert services["alertmanager"]["ports"] == ["127.0.0.1:9093:9093"]
    (receiver,) = yaml.safe_load(CONFIGURATION.read_text())["receivers"]
    port = services["notifications"]["entrypoint"][-1]
    assert receiver["webhook_configs"] == [{"url": f"http://notifications:{port}"}]


@contextmanager
def running(*command: str, output: Path) -> Iterator[None]:
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


@needs_prometheus
@needs_alertmanager
def test_an_alert_becomes_a_line_of_the_receiver(tmp_path: Path) -> None:
    """The configuration, with the receiver's address on this machine and shorter waits."""
    port, receiver = free_port(), free_port()
    config = yaml.safe_load(CONFIGURATION.read_text())
    config["route"] |= {"group_wait": "0s"}
    config["receivers"][0]["webhook_configs"][0]["url"] = f"http://127.0.0.1:{receiver}"
    (tmp_path / "alertmanager.yaml").write_text(yaml.safe_dump(config))
    command, *arguments = services_of("compose.yaml")["notifications"]["entrypoint"]
    assert (command, arguments) == ("python3", ["/notifications.py", "9094"])
    lines = tmp_path / "notifications"
    assert PROGRAM is not None
    with (
        running(
            *(sys.executable, str(ROOT / "deploy/prometheus/notifications.py")),
            f"127.0.0.1:{receiver}",
            output=lines,
        ),
        running(
            *(PROGRAM, f"--config.file={tmp_path / 'alertmanager.yaml'}"),
            f"--storage.path={tmp_path / 'alertmanager'}",
            *(f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="),
            output=tmp_path / "alertmanager.log",
        ),
        prometheus(
            tmp_path, {"stepwell-gone": f"http://127.0.0.1:{free_port()}"}, f"127.0.0.1:{port}"
        ),
    ):
        wait_for(lambda: lines.read_text().endswith("\n"), 30)
    (notified,) = [json.loads(line) for line in lines.read_text().splitlines()]
    assert (notified["status"], notified["receiver"]) == ("firing", "notifications")
    (alert,) = notified["alerts"]
    assert alert["labels"]["alertname"] == "StepwellTargetDown"
    assert alert["annotations"]["runbook_url"].endswith("/failures.md#stepwelltargetdown")
