"""Every flag that a page of docs/ names exists."""

import dataclasses
import re
from pathlib import Path

from services.cli.settings import UpSettings
from services.common.process.settings import flag_name
from services.download.settings import DownloadSettings
from services.gateway.settings import GatewaySettings
from services.kvpool.settings import KVPoolSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).parents[4]
PAGES = (
    "architecture.md",
    "deploying.md",
    "models.md",
    "observing.md",
    "failures.md",
    "kubernetes.md",
    "scaling.md",
    "performance.md",
    "cuda.md",
    "security.md",
    "simulated-device.md",
)
SETTINGS = (
    UpSettings,
    DownloadSettings,
    GatewaySettings,
    SchedulerSettings,
    KVPoolSettings,
    WorkerSettings,
)

# Flags that are no settings of services, but of docker, benchmarks, and `stepwell` commands.
OTHERS = {"--help", "--set", "--minutes", "--key", "--tenants", "--url"}
OTHERS |= {"--ca-file", "--cert-file", "--key-file"}
OTHERS |= {"--volumes", "--network", "--build", "--keep", "--roles", "--faults"}
OTHERS |= {"--rotate-key", "--upgrade-to"}
OTHERS |= {"--requests-per-minute", "--tokens-per-minute"}
OTHERS |= {"--weight", "--max-retained-share", "--priority-ceiling", "--expires-in-days"}
OTHERS |= {"--models", "--json"}
OTHERS |= {"--once", "--width", "--program", "--slowest", "--failed", "--attributes"}
OTHERS |= {"--link", "--every", "--seconds", "--streams", "--gateways", "--schemas", "--count"}
OTHERS |= {"--kills", "--seed", "--worker-urls", "--tier-tokens"}
OTHERS |= {"--client-cert-path", "--client-key-path", "--ca-cert-paths"}
OTHERS |= {"--enable-feature"}  # of Prometheus


def test_flags_named_in_the_documentation_exist() -> None:
    flags = {flag_name(field.name) for cls in SETTINGS for field in dataclasses.fields(cls)}
    flags |= {"--no-" + flag.removeprefix("--") for flag in flags} | OTHERS
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text()
        for span in re.findall(r"`([^`]*)`", text):
            named = set(re.findall(r"(?<!\S)--[a-z][\w-]+", span))
            assert named <= flags, (page, named - flags)
