"""The Helm chart's values: the objects that they render, and the values that are refused."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import CHART, EXAMPLES, NAMES, ROOT, example, render_chart
from tests.deploy.rendered import Rendered

FURTHER_OBJECTS = {"ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"}
"""They can be turned off, as in `stages`."""
FURTHER = {
    "small": {"StatefulSet", "Pod"},
    "fleet": {"StatefulSet", "Pod", "ScaledObject"},
    "tls-cert-manager": {
        *("StatefulSet", "Certificate", "Issuer", "HTTPRoute", "BackendTLSPolicy"),
    },
    "tls-secrets": {"StatefulSet"},
    "tensor-parallel-gpu": {"LeaderWorkerSet", "Pod"},
    "simulated": {"StatefulSet", "Pod"},
    "tensor-parallel-pod": {"StatefulSet", "Pod", "ScaledObject", "Certificate", "Issuer"},
    "scale-to-zero": {"StatefulSet", "Pod", "ScaledObject", "ServiceMonitor"},
    "several-models": {"StatefulSet", "Pod", "ConfigMap"},
    "further-model": {"StatefulSet", "ScaledObject"},
    "openshift": {"StatefulSet", "Pod"},
    "download": {"StatefulSet", "Pod"},
    "download-shared": {"StatefulSet", "Pod", "PersistentVolumeClaim", "ConfigMap"},
    "ingress": {"StatefulSet", "Pod", "Ingress"},
    "gateway-api": {"StatefulSet", "Pod", "HTTPRoute", "GRPCRoute"},
    "extended": {"StatefulSet", "Pod", "ConfigMap", "Certificate"},
    "adjusted": {
        *("StatefulSet", "Certificate", "Issuer", "HorizontalPodAutoscaler"),
        *("PersistentVolumeClaim", "ServiceMonitor", "Pod"),
    },
    "everything": {
        *("StatefulSet", "Pod", "HorizontalPodAutoscaler", "InferencePool"),
        *("ServiceMonitor", "PrometheusRule", "PersistentVolumeClaim", "ConfigMap"),
    },
    "groups": {"StatefulSet", "Pod", "Certificate", "Issuer"},
    "downloading groups": {"LeaderWorkerSet", "Pod"},
    "stages": {"StatefulSet", "Pod", "HTTPRoute", "InferencePool"},
}

REFUSED = {
    "no model": ({"model": {"volume": None}}, "must be given: a volume with"),
    "replicas without Redis": ({"replicas": {"count": 2}}, "need redis.existingSecret"),
    "scaling without Redis": (
        {"replicas": {"autoscaling": {"kind": "hpa"}}},
        "need redis.existingSecret",
    ),
    "two Redis": (
        {"redis": {"existingSecret": "a", "internal": {"enabled": True}}},
        "exclude each other",
    ),
    "keys in no Redis": ({"gateway": {"apiKeys": {"inRedis": True}}}, "gateway.apiKeys.inRedis"),
    "a key of no secret": ({"gateway": {"apiKeys": {"key": "plain"}}}, "existingSecret needs"),
    "KEDA without Prometheus": (
        {"replicas": {"autoscaling": {"kind": "keda"}}, "redis": {"existingSecret": "a"}},
        "prometheusAddress",
    ),
    "a first replica that nothing starts": (
        {
            "replicas": {"autoscaling": {"kind": "hpa", "minReplicas": 0}},
            "redis": {"existingSecret": "a"},
        },
        "minReplicas 0 needs kind keda",
    ),
    "scaled groups": (
        {
            "replicas": {"autoscaling": {"kind": "hpa"}},
            "redis": {"existingSecret": "a"},
            "tensorParallel": {"size": 2, "leaderWorkerSet": "never"},
        },
        "needs LeaderWorkerSets",
    ),
    "fewer at most than at least": (
        {"gateway": {"autoscaling": {"minReplicas": 9}}},
        "minReplicas must not be above",
    ),
    "no certificate between services": ({"tls": {"internal": {"enabled": True}}}, "certManager"),
    "no certificate for clients": ({"tls": {"public": {"enabled": True}}}, "tls.public.enabled"),
    "no issuer for clients": (
        {"tls": {"public": {"enabled": True, "certManager": {"enabled": True}}}},
        "issuerRef must name",
    ),
    "no picker": ({"inferencePool": {"enabled": True}}, "endpointPicker.name"),
    "a pool of nothing": (
        {
            "inferencePool": {
                "enabled": True,
                "target": "replicas",
                "endpointPicker": {"name": "epp"},
            }
        },
        "needs scheduler.vllmGrpc",
    ),
    "an unknown value": ({"replica": {"count": 1}}, "replica"),
    "an unknown value inside": ({"gateway": {"replica": 1}}, "replica"),
    "an unknown setting": ({"worker": {"settings": {"max_num_sequences": 1}}}, "max_num_sequences"),
    "a setting that is no number": ({"worker": {"settings": {"max_num_seqs": "many"}}}, "integer"),
    "a setting that the chart sets": (
        {"gateway": {"settings": {"redis_url": "redis://a"}}},
        "redis_url",
    ),
    "a setting as a variable": (
        {"gateway": {"extraEnv": [{"name": "STEPWELL_GATEWAY_ADMIN_KEY", "value": "a"}]}},
        "gateway.extraEnv: STEPWELL_GATEWAY_ADMIN_KEY is a setting: it belongs below",
    ),
    "a GPU without a GPU": ({"worker": {"settings": {"device": "cuda"}}}, "needs a GPU among"),
    "GPUs of which one is used": (
        {"tensorParallel": {"size": 8}, "worker": {"resources": {"limits": {"nvidia.com/gpu": 8}}}},
        "nvidia.com/gpu must be 1, not 8",
    ),
    "ranks without GPUs": (
        {
            "tensorParallel": {"size": 8, "onePod": True},
            "worker": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        },
        "nvidia.com/gpu must be 8, not 1",
    ),
    "updates that a LeaderWorkerSet has not": (
        {
            "tensorParallel": {"size": 2, "leaderWorkerSet": "always"},
            "replicas": {"updateStrategy": {"type": "OnDelete"}},
        },
        "a LeaderWorkerSet has RollingUpdate only",
    ),
    "updates that a StatefulSet has not": (
        {"replicas": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}},
        "a StatefulSet has no such field",
    ),
    "nodes that are never emptied": (
        {"podDisruptionBudget": {"maxUnavailable": "0%"}},
        "would keep every node",
    ),
    "a name that begins with a digit": ({"fullnameOverride": "7b"}, "set fullnameOverride"),
    "a name in capitals": ({"fullnameOverride": "Llama"}, "set fullnameOverride"),
    "keys that vanish": (
        {"gateway": {"apiKeys": {"inRedis": True}}, "redis": {"internal": {"enabled": True}}},
        "needs redis.internal.persistence.enabled",
    ),
    "memory in bytes": (
        {"redis": {"internal": {"enabled": True, "resources": {"limits": {"memory": "9e8"}}}}},
        "must be given in Mi or Gi",
    ),
    "a route without a Gateway": (
        {"gateway": {"grpcRoute": {"enabled": True}}},
        "needs gateway.grpcRoute.parentRefs",
    ),
    "a path without a slash": (
        {"gateway": {"ingress": {"hosts": [{"paths": [{"path": "v1"}]}]}}},
        "'v1' does not match pattern",
    ),
    "a port of nodes in the cluster": (
        {"gateway": {"service": {"httpNodePort": 30080}}},
        "gateway.service.httpNodePort needs another gateway.service.type than ClusterIP",
    ),
    "a label that selects pods": (
        {"commonLabels": {"app.kubernetes.io/name": "llm"}},
        "app.kubernetes.io/name",
    ),
    "a volume and a claim": ({"model": {"claim": {"enabled": True}}}, "exclude each other"),
    "a download into a volume that is read-only": (
        {"model": {"download": {"source": "hf://Qwen/Qwen3-8B"}}},
        "needs a volume that can be written",
    ),
    "a download from elsewhere": ({"model": {"download": {"source": "s3://a/b"}}}, "source"),
    "a further model in two places": (
        {
            "redis": {"existingSecret": "a"},
            "gateway": {
                "furtherModels": [{"release": "a", "name": "b", "source": "hf://a/b", "path": "b"}]
            },
        },
        "furtherModels/0/path",
    ),
    "a token in the manifest": (
        {"model": {"download": {"extraEnv": [{"name": "HF_TOKEN", "value": "hf_a"}]}}},
        "HF_TOKEN has its own value below model.download",
    ),
    "two volumes": ({"model": {"volume": {"nfs": {}, "hostPath": {}}}}, "volume"),
}


def test_every_example_is_rendered(releases: dict[str, Rendered]) -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(NAMES)
    for name, release in releases.items():
        assert release.refused is None, (name, release.refused)
        assert release.lint == [], name
        common = set() if name == "stages" else FURTHER_OBJECTS
        gateways = {"Deployment"} if "gateway" in release.services else set()
        assert release.kinds() == {"Service"} | gateways | common | FURTHER[name], name


def test_every_value_is_in_an_example_with_another_value_than_its_default(
    releases: dict[str, Rendered],
) -> None:
    values = yaml.load((CHART / "values.yaml").read_text(), yaml.CSafeLoader)
    del values["containerSecurityContext"]  # its defaults are the secure values, as are these:
    for secure in ("runAsNonRoot", "seccompProfile"):
        del values["podSecurityContext"][secure]
    given = [dict(_leaves(release.values)) for release in releases.values()]
    left = {
        path
        for path, default in _leaves(values)
        if all(
            one == default or not (inner == path or inner.startswith(f"{path}."))
            for leaves in given
            for inner, one in leaves.items()
        )
    }
    assert left == set()


@pytest.mark.parametrize("name", ["adjusted", "download-shared"])
def test_every_value_of_an_example_is_in_its_manifests(
    releases: dict[str, Rendered], name: str
) -> None:
    release = releases[name]
    text = "\n".join(release.texts.values())
    values = {
        str(one)
        for _, value in _leaves(release.values)
        for one in (value if isinstance(value, list) else [value])
        if isinstance(one, str | int) and not isinstance(one, bool)
    }
    assert len(values) > 15
    missing = {one for one in values if not re.search(rf"(?<!\w){re.escape(one)}(?!\w)", text)}
    assert missing - {"external"} == set(), "a kind of autoscaling without objects"


def _leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values of all values that are no maps. An empty map or list counts as None."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}")
    else:
        yield path, None if values in ({}, []) else values


def test_values_that_cannot_work_are_refused_with_the_reason() -> None:
    small = example("small")
    sets = {name: _merged(small, changes) for name, (changes, _) in REFUSED.items()}
    for name, release in render_chart(sets).items():
        assert release.refused is not None, name
        assert REFUSED[name][1] in release.refused, (name, release.refused)


def test_long_names_differ_when_they_are_cut() -> None:
    small, common = example("small"), "the-language-models-of-the-search-team-in-"
    names = [f"{common}{place}" for place in ("paris", "rome")]
    sets = {name: small | {"fullnameOverride": name} for name in (*names, "a" * 36)}
    found = {
        name: {one["metadata"]["name"] for one in release.objects}
        for name, release in render_chart(sets).items()
    }
    assert not found[names[0]] & found[names[1]]
    assert max(len(one) for name in names for one in found[name]) <= 63
    assert "a" * 36 + "-gateway" in found["a" * 36]


def test_redis_refuses_writes_before_its_container_is_killed() -> None:
    limits = {"512Mi": "384mb", "2Gi": "1536mb", "100M": "75mb"}
    sets = {
        limit: example("small")
        | {"redis": {"internal": {"enabled": True, "resources": {"limits": {"memory": limit}}}}}
        for limit in limits
    }
    for limit, release in render_chart(sets).items():
        (redis,) = [one for one in release.of("Deployment") if "redis" in one["metadata"]["name"]]
        arguments = redis["spec"]["template"]["spec"]["containers"][0]["args"]
        assert arguments[arguments.index("--maxmemory") + 1] == limits[limit]


@pytest.mark.parametrize("name", NAMES)
def test_notes_name_objects_that_exist(releases: dict[str, Rendered], name: str) -> None:
    release = releases[name]
    named = re.findall(r"(deployment|service)/([\w-]+)", release.notes)
    existing = {(one["kind"].lower(), one["metadata"]["name"]) for one in release.objects}
    assert named
    assert set(named) <= existing
    assert ("helm test demo" in release.notes) == ("Pod" in release.kinds())
    hosts = [rule["host"] for one in release.of("Ingress") for rule in one["spec"]["rules"]]
    routes = release.of("HTTPRoute") + release.of("GRPCRoute")
    hosts += [host for one in routes for host in one["spec"]["hostnames"]]
    assert set(hosts) == set(re.findall(r"by gateway\.\w+: (.+)", release.notes))


def test_notes_do_not_warn_that_keys_in_a_volume_are_lost() -> None:
    redis = {"internal": {"enabled": True, "persistence": {"enabled": True}}}
    values = example("small", gateway={"apiKeys": {"inRedis": True}}, redis=redis)
    (release,) = render_chart({"keys": values}).values()
    assert release.of("PersistentVolumeClaim")
    assert "has no password" in release.notes
    assert "lost" not in release.notes


def test_the_versions_are_those_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]


def test_the_schema_has_every_value_and_closes_every_map_of_the_chart() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = set(_missing(values, schema, schema, ""))
    assert missing == {".global is open"}  # other charts of a parent chart have values there too


@pytest.mark.parametrize("page", ["kubernetes.md", "other-charts.md"])
def test_the_values_that_a_page_names_exist(page: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    named = set(re.findall(r"`([a-zA-Z]+\.[\w.]+)`", (ROOT / "docs" / page).read_text()))
    ours = {name for name in named if name.partition(".")[0] in schema["properties"]}
    assert len(ours) > 10
    assert {name for name in ours if not _is_value(name.split("."), schema, schema)} == set()


def _is_value(path: list[str], schema: Any, root: Any) -> bool:
    """Whether the schema has a value with this path, or any fields at some place of the path."""
    if "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    if not path or "properties" not in schema:
        return True
    inner = schema["properties"].get(path[0])
    return inner is not None and _is_value(path[1:], inner, root)


def test_the_rules_of_the_chart_are_those_of_prometheus(releases: dict[str, Rendered]) -> None:
    (rules,) = releases["everything"].of("PrometheusRule")
    files = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(_linked(file))["groups"]]
    assert groups
    assert rules["spec"]["groups"] == groups


def test_the_dashboards_of_the_chart_are_those_of_grafana(releases: dict[str, Rendered]) -> None:
    found = {}
    for config_map in releases["everything"].of("ConfigMap"):
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "llm"
        assert config_map["metadata"]["annotations"]["grafana_folder"] == "LLM"
        found |= config_map["data"]
    files = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
    assert files
    assert {name: json.loads(text) for name, text in found.items()} == {
        file.name: json.loads(_linked(file)) for file in files
    }


def _linked(path: Path) -> str:
    """The content of a file, with the runbook's address of the example."""
    return path.read_text().replace(
        "http://127.0.0.1:9090/user/failures.md", "https://docs.example.com/stepwell/failures.md"
    )


def _missing(values: Any, schema: Any, root: Any, path: str) -> list[str]:
    """Paths of values that the schema does not contain, and of maps that allow further keys."""
    if "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    if not isinstance(values, dict) or "properties" not in schema:
        return []
    found = [] if schema.get("additionalProperties") is False else [path + " is open"]
    for key, value in values.items():
        known = schema["properties"].get(key)
        inside = (
            [f"{path}.{key}"] if known is None else _missing(value, known, root, f"{path}.{key}")
        )
        found += inside
    return found


def _merged(values: Any, changes: Any) -> Any:
    """Values merged with changes by the rules of Helm, where null deletes a value."""
    if not isinstance(changes, dict) or not isinstance(values, dict):
        return changes
    merged = {**values}
    for key, change in changes.items():
        merged[key] = _merged(values.get(key), change)
    return merged
