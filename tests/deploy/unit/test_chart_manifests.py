"""Every manifest of the Helm chart is valid by the JSON schema of its kind."""

import copy
from importlib.util import find_spec

import pytest

from tests.deploy.kubernetes_schemas import KubernetesSchemas
from tests.deploy.rendered import Object, Rendered

if find_spec("kubernetes_validate") is None:
    pytest.skip(
        "kubernetes-validate, which has the schemas, is not installed here", allow_module_level=True
    )

FIRST, LAST = "1.33", "1.37"
"""The lowest version of Kubernetes that Chart.yaml allows, and the newest one with schemas."""


@pytest.fixture(scope="module", params=[FIRST, LAST])
def schemas(request: pytest.FixtureRequest) -> KubernetesSchemas:
    return KubernetesSchemas(request.param)


def test_every_manifest_is_valid(releases: dict[str, Rendered], schemas: KubernetesSchemas) -> None:
    for name, release in releases.items():
        for one in release.objects:
            assert schemas.errors(one) == [], (name, one["kind"], one["metadata"]["name"])


MISSPELT = {
    "Deployment": ("spec", "template", "spec", "containers", 0, "readinessprobe"),
    "StatefulSet": ("spec", "template", "spec", "initContainers", 1, "restartpolicy"),
    "NetworkPolicy": ("spec", "podSelectors"),
    "LeaderWorkerSet": ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec", "container"),
    "ScaledObject": ("spec", "triggers", 0, "metadata", "tresholds"),
    "Certificate": ("spec", "dnsName"),
    "Issuer": ("spec", "selfsigned"),
    "ServiceMonitor": ("spec", "endpoints", 0, "ports"),
    "PrometheusRule": ("spec", "group"),
    "Ingress": ("spec", "rules", 0, "http", "path"),
    "HTTPRoute": ("spec", "rules", 0, "backendRef"),
    "GRPCRoute": ("spec", "rules", 0, "matches", 0, "path"),
    "BackendTLSPolicy": ("spec", "validation", "hostnames"),
    "InferencePool": ("spec", "endpointPickerRef", "portNumber"),
}


@pytest.mark.parametrize("kind", MISSPELT)
def test_a_misspelt_field_is_found(
    releases: dict[str, Rendered], schemas: KubernetesSchemas, kind: str
) -> None:
    *path, field = MISSPELT[kind]
    found = (one for release in releases.values() for one in release.of(kind))
    one = copy.deepcopy(next(found))
    _at(one, path)[field] = {}
    assert any(str(field) in error for error in schemas.errors(one))


def _at(one: Object, path: list[object]) -> Object:
    for step in path:
        one = one[step]  # type: ignore[index]
    return one
