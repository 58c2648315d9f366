"""Fixtures with the Helm chart, rendered once for all tests, with several sets of values."""

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.rendered import Rendered

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "stepwell"
EXAMPLES = ROOT / "deploy" / "helm" / "examples"
NAMES = (
    *("small", "fleet", "tls-cert-manager", "tls-secrets", "tensor-parallel-gpu", "simulated"),
    *("openshift", "ingress", "gateway-api", "extended", "download", "download-shared"),
    *("scale-to-zero", "tensor-parallel-pod", "several-models", "further-model"),
    *("adjusted", "everything"),
)

Values = dict[str, Any]


def example(name: str, **changes: Any) -> Values:
    """The values of an example of the chart, with some top-level values replaced."""
    values: Values = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return values | changes


def groups_without_leader_worker_set() -> Values:
    """Values for worker groups of three ranks, as StatefulSets, with TLS to the scheduler."""
    return example(
        "tensor-parallel-gpu",
        tensorParallel={"size": 3, "leaderWorkerSet": "never"},
        tls={"internal": {"enabled": True, "certManager": {"enabled": True}}},
    )


def stages_of_ranks() -> Values:
    """Values for two pipeline stages of two ranks each, on the CPU, for a route to a pool of
    gateways, which are replaced at once, and without the objects that other releases have.
    """
    return example(
        "small",
        tensorParallel={"size": 2, "leaderWorkerSet": "never"},
        pipelineParallel={"size": 2},
        gateway={
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
            "strategy": {"type": "Recreate"},
        },
        inferencePool={"enabled": True, "endpointPicker": {"name": "picker"}},
        networkPolicy={"enabled": False},
        podDisruptionBudget={"enabled": False},
        serviceAccount={"create": False},
    )


def groups_that_download() -> Values:
    """Values for worker groups whose pods download the model into volumes of their own."""
    template = {"spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast"}}
    return example(
        "tensor-parallel-gpu",
        model={
            "volume": {"ephemeral": {"volumeClaimTemplate": template}},
            "download": {"source": "hf://Qwen/Qwen3-32B"},
        },
    )


def render_chart(sets: Mapping[str, Values]) -> dict[str, Rendered]:
    """Renders the chart for each set of values, all in one process. Skips the test if the chart
    cannot be rendered on this machine.
    """
    if find_spec("helm_python") is None:
        pytest.skip("helm-python-sdk, which renders the chart, is not installed here")
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("render_chart.py")), str(CHART)],
        input=json.dumps(sets),
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: Rendered(name, r, sets[name]) for name, r in json.loads(ran.stdout).items()}


@pytest.fixture(scope="session")
def releases() -> dict[str, Rendered]:
    """The chart with each example's values, and with worker groups without LeaderWorkerSet."""
    sets = {name: example(name) for name in NAMES}
    groups = {
        "groups": groups_without_leader_worker_set(),
        "stages": stages_of_ranks(),
        "downloading groups": groups_that_download(),
    }
    return render_chart(sets | groups)


@pytest.fixture(params=[*NAMES, "groups"])
def release(request: pytest.FixtureRequest, releases: dict[str, Rendered]) -> Rendered:
    return releases[request.param]
