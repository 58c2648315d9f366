"""A real Prometheus that scrapes every 1.5 seconds, with the rules of deploy/ sped up."""

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from tests.e2e.stack import ROOT, wait_for
from tests.plain_http import http_get
from tests.redis_servers import free_port

PROGRAM = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROGRAM is None, reason="prometheus is not installed (Debian's package prometheus)"
)
_SCRAPE_INTERVAL = "1500ms"
"""The scrape interval. It must exceed one second, because gateways and schedulers wait that long
for a process that does not answer, and Prometheus drops a scrape that takes longer than the
interval.
"""
_LOOK_AGAIN_SECONDS = 0.25
"""The time between two queries while a test waits. Rules are evaluated twice a second."""
RULES = ROOT / "deploy" / "prometheus" / "rules"
_WINDOWS = {"2m": "6s", "5m": "6s", "10m": "6s", "15m": "3m", "1h": "3m"}
"""Maps time ranges of the rules to shorter ones. Rules with the longest ranges count events, so
that their shortened ranges must still exceed the duration of a test.
"""
QUICK_SECONDS = 0.3
"""The threshold in seconds for the queue time and the time to the first token."""
_THRESHOLDS = {"> 10": f"> {QUICK_SECONDS}", "> 20": f"> {QUICK_SECONDS}"}


OTHER_JOB = "other"
"""The job of a program that is not a part of Stepwell."""


class Prometheus:
    """Queries a Prometheus over its HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The result of an instant query. Series with the value NaN are dropped."""
        answer = http_get(f"{self._url}/api/v1/query?{urlencode({'query': expr})}").json()
        assert answer["status"] == "success", (expr, answer)
        series: list[dict[str, Any]] = answer["data"]["result"]
        return [one for one in series if math.isfinite(float(one["value"][1]))]

    def exemplars(self, expr: str) -> list[dict[str, str]]:
        """The labels of the exemplars of the last minute, of all series that a query reads."""
        now = time.time()
        parameters = urlencode({"query": expr, "start": now - 60, "end": now})
        answer = http_get(f"{self._url}/api/v1/query_exemplars?{parameters}").json()
        return [one["labels"] for series in answer["data"] for one in series["exemplars"]]

    def firing(self) -> set[str]:
        alerts = http_get(f"{self._url}/api/v1/alerts").json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def until_firing(self, *names: str, seconds: float = 60) -> None:
        wait_for(lambda: set(names) <= self.firing(), seconds, _LOOK_AGAIN_SECONDS)

    def until_calm(self, *names: str) -> None:
        wait_for(lambda: not set(names) & self.firing(), 60, _LOOK_AGAIN_SECONDS)

    def is_ready(self) -> bool:
        try:
            return http_get(f"{self._url}/-/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


def quick_rules(directory: Path) -> None:
    """Writes the rules with shortened durations to a directory."""
    for path in RULES.glob("*.yml"):
        text = re.sub(r"(?m)^(\s+for: ).*$", r"\g<1>1s", path.read_text())
        text = re.sub(r"\[(\w+)\]", lambda found: f"[{_WINDOWS[found[1]]}]", text)
        for threshold, lower in _THRESHOLDS.items():
            text = re.sub(rf"(?m)(^ +expr: .*){threshold}$", rf"\g<1>{lower}", text)
        (directory / path.name).write_text(text)


@contextmanager
def prometheus(
    directory: Path, targets: Mapping[str, str], alertmanager: str | None = None
) -> Iterator[Prometheus]:
    """Runs a Prometheus inside the context. `targets` maps names of jobs to the scraped URLs.
    `alertmanager` is the address of the Alertmanager that gets the alerts.

    Prometheus also scrapes itself, as a program that resembles a service of Stepwell.
    """
    assert PROGRAM is not None
    quick_rules(directory)
    port = free_port()
    configuration: dict[str, Any] = {
        "global": {"scrape_interval": _SCRAPE_INTERVAL, "evaluation_interval": "500ms"},
        "rule_files": [str(path) for path in sorted(directory.glob("*.yml"))],
        "scrape_configs": [
            {
                "job_name": job,
                "scheme": httpx.URL(target).scheme,
                "tls_config": {"insecure_skip_verify": True},
                "static_configs": [{"targets": [httpx.URL(target).netloc.decode()]}],
            }
            for job, target in targets.items()
        ],
    }
    own = {"targets": [f"127.0.0.1:{port}"], "labels": {"service": "gateway"}}
    configuration["scrape_configs"].append({"job_name": OTHER_JOB, "static_configs": [own]})
    if alertmanager is not None:
        receiver = {"static_configs": [{"targets": [alertmanager]}]}
        configuration["alerting"] = {"alertmanagers": [receiver]}
    path = directory / "prometheus.json"  # Prometheus reads YAML, which includes JSON
    path.write_text(json.dumps(configuration))
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={path}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        running = Prometheus(f"http://127.0.0.1:{port}")
        wait_for(running.is_ready, 30)
        yield running
    finally:
        process.terminate()
        process.wait(20)
