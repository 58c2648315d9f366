"""Several models behind one address: the release with the gateways, and one of a further model."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.models.further_models import further_models
from services.gateway.settings import GatewaySettings
from tests.deploy.conftest import example, render_chart
from tests.deploy.network_policies import Policies
from tests.deploy.rendered import Rendered

INSTANCE = "app.kubernetes.io/instance"


def models_file(release: Rendered) -> list[dict[str, Any]]:
    (config,) = release.of("ConfigMap")
    models: list[dict[str, Any]] = json.loads(config["data"]["models.json"])
    return models


def test_the_gateway_reads_the_list_of_models(
    releases: dict[str, Rendered], tmp_path: Path
) -> None:
    release = releases["several-models"]
    (gateway,) = release.pod("gateway").containers()
    mounts = gateway.mounts()
    models = models_file(release)
    for model in models:
        assert any(model["model"].startswith(f"{path}") for path in mounts)
        model["model"] = str(tmp_path)
    file = tmp_path / "models.json"
    file.write_text(json.dumps(models))
    first = GatewaySettings(
        model=tmp_path, served_model_name="demo", further_models=file, redis_url="redis://redis"
    )
    coder, embedder = further_models(first)
    assert (coder.model_name, coder.tool_call_parser) == ("coder", "hermes")
    assert (coder.expected_replicas, coder.resubmit_timeout_seconds) == (0, 1020)
    assert (embedder.model_name, embedder.tool_call_parser) == ("embedder", "")
    # Otherwise StepwellFewerReplicas would fire whenever its autoscaler removes a replica.
    assert embedder.expected_replicas == 1


def test_its_models_are_where_the_volumes_are_mounted(releases: dict[str, Rendered]) -> None:
    release = releases["several-models"]
    mounts = release.pod("gateway").containers()[0].mounts()
    coder, embedder = (model["model"] for model in models_file(release))
    assert (coder, embedder) == ("/models/coder", "/further-models/1")
    assert "image" in mounts[embedder]


def test_gateways_reach_the_replicas_of_the_other_release_and_no_others(
    releases: dict[str, Rendered],
) -> None:
    """All releases are rendered with the name `demo`."""
    main, further = releases["several-models"], releases["further-model"]
    gateway, replica = dict(main.pod("gateway").labels), dict(further.pod("replica").labels)
    for name, is_reached in (("coder", True), ("embedder", True), ("other", False)):
        target = replica | {INSTANCE: name}
        assert Policies(main).let_through(gateway, target, 9001) == is_reached
        assert not Policies(main).let_through(gateway, target, 9011)
    for name, is_allowed in (("llm", True), ("demo", False), ("other", False)):
        source = gateway | {INSTANCE: name}
        assert Policies(further).let_through(source, replica, 9001) == is_allowed


def test_a_changed_list_replaces_the_gateways() -> None:
    values = example("several-models")
    changed = example("several-models")
    changed["gateway"]["furtherModels"][0]["settings"] = {"tool_call_parser": "mistral"}
    rendered = render_chart({"before": values, "after": changed})
    before, after = (
        release.of("Deployment")[0]["spec"]["template"]["metadata"]["annotations"]
        for release in rendered.values()
    )
    assert before != after


REDIS = {"existingSecret": "redis"}
FURTHER = {"release": "coder", "name": "coder"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"gateway": {"ofRelease": "llm"}, "redis": {}}, "need redis.existingSecret"),
        ({"gateway": {"furtherModels": [FURTHER]}, "redis": {}}, "need redis.existingSecret"),
        (
            {"gateway": {"ofRelease": "llm"}, "redis": {"internal": {"enabled": True}}},
            "excludes redis.internal.enabled",
        ),
        (
            {"gateway": {"ofRelease": "llm", "furtherModels": [FURTHER]}, "redis": REDIS},
            "excludes gateway.furtherModels",
        ),
        (
            {"gateway": {"furtherModels": [{**FURTHER, "name": "demo"}]}, "redis": REDIS},
            "each name must differ",
        ),
        ({"gateway": {"furtherModels": [{"name": "a"}]}, "redis": REDIS}, "release"),
        (
            {"gateway": {"furtherModels": [{**FURTHER, "settings": {"ui": True}}]}, "redis": REDIS},
            "ui",
        ),
    ],
)
def test_contradictory_values_are_refused(changes: dict[str, Any], complaint: str) -> None:
    release = render_chart({"one": example("small", **changes)})["one"]
    assert complaint in (release.refused or "")
