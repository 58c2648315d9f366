"""The model gets into the pods of the Helm chart: from a volume, or by a download into one."""

import json
import re
from pathlib import Path

import pytest
import yaml

from services.common.model_source.hub import HubName
from services.common.process.settings import parse_settings
from services.download.__main__ import CHART_VALUES, writing
from services.download.settings import DownloadSettings
from tests.deploy.conftest import CHART
from tests.deploy.network_policies import STRANGER, Policies
from tests.deploy.rendered import Container, Pod, Rendered

DOWNLOADING = ("download", "download-shared", "downloading groups")


def _download(pod: Pod) -> Container:
    """The pod's first container, which downloads."""
    return pod.containers()[0]


def _settings(container: Container) -> DownloadSettings:
    environ = {k: v for k, v in container.environment().items() if k.startswith("STEPWELL_")}
    return parse_settings(DownloadSettings, "download", container.spec.get("args", []), environ)


def _pods(release: Rendered) -> list[Pod]:
    return [pod for pod in release.pods() if pod.component in ("gateway", "replica", "rank")]


@pytest.mark.parametrize("name", DOWNLOADING)
def test_services_read_the_directory_of_the_download(
    releases: dict[str, Rendered], name: str
) -> None:
    for pod in _pods(releases[name]):
        download, *services = pod.containers()
        assert download.spec["name"] == "download"
        assert "restartPolicy" not in download.spec, "services start when it has ended"
        directory = str(_settings(download).directory)
        named = [
            value
            for service in services
            for variable, value in service.environment().items()
            if variable in ("STEPWELL_GATEWAY_MODEL", "STEPWELL_WORKER_MODEL")
        ]
        assert named == [directory]


def test_only_the_download_can_write_to_the_volume(releases: dict[str, Rendered]) -> None:
    for release in releases.values():
        for container in release.containers():
            for mount in container.spec["volumeMounts"]:
                if mount["name"].startswith("model"):
                    is_download = container.spec["name"].startswith("download")
                    assert mount.get("readOnly", False) is not is_download, container.name


def test_a_download_has_the_values_of_the_chart(releases: dict[str, Rendered]) -> None:
    shared = _download(releases["download-shared"].pod("replica"))
    environ, settings = shared.environment(), _settings(shared)
    assert str(settings.model) == "Qwen/Qwen3-8B@b968826d9c46dd6066d109eabc6255188de91218"
    assert str(settings.directory) == f"/models/{settings.model}"
    assert environ["HF_ENDPOINT"] == "https://hub.example.org:8080"
    assert environ["HF_HUB_DISABLE_XET"] == "1"
    assert shared.mounts()["/etc/ssl/hub"]["configMap"] == {"name": "hub-ca"}
    (token,) = [one for one in shared.spec["env"] if one["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "reader"}}
    assert shared.spec["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_gateway_has_no_weights_in_a_volume_of_its_own(releases: dict[str, Rendered]) -> None:
    weights = {
        (name, pod.component): _settings(_download(pod)).weights
        for name in DOWNLOADING
        for pod in _pods(releases[name])
    }
    assert weights == {
        ("download", "gateway"): False,
        ("download", "replica"): True,
        # The pods of a claim share one directory.
        ("download-shared", "gateway"): True,
        ("download-shared", "replica"): True,
        ("downloading groups", "gateway"): False,
        ("downloading groups", "replica"): True,
        ("downloading groups", "rank"): True,
    }


def test_a_gateway_downloads_the_files_of_further_models(releases: dict[str, Rendered]) -> None:
    release = releases["download-shared"]
    _, further, gateway = release.pod("gateway").containers()
    settings = _settings(further)
    assert (str(settings.model), settings.weights) == ("Qwen/Qwen3-Embedding-0.6B@main", False)
    (config,) = release.of("ConfigMap")
    (model,) = json.loads(config["data"]["models.json"])
    assert model["model"] == str(settings.directory)
    path = "/further-models/0"
    assert gateway.mounts()[path] == further.mounts()[path]
    assert further.mounts()[path]["emptyDir"] == {"sizeLimit": "1Gi"}
    assert further.environment()["HF_ENDPOINT"] == "https://hub.example.org:8080"


def test_a_node_must_have_room_for_the_volume_of_a_pod(releases: dict[str, Rendered]) -> None:
    replica, gateway = (releases["download"].pod(one) for one in ("replica", "gateway"))
    download = _download(replica)
    assert download.mounts()["/models"]["emptyDir"] == {"sizeLimit": "4Gi"}
    assert download.spec["resources"]["requests"]["ephemeral-storage"] == "4Gi"
    assert _settings(download).size_limit == 4 * 2**30
    assert _download(gateway).mounts()["/models"]["emptyDir"] == {"sizeLimit": "1Gi"}
    assert _settings(_download(gateway)).size_limit == 2**30
    shared = _download(releases["download-shared"].pod("replica"))
    assert "ephemeral-storage" not in shared.spec["resources"]["requests"]


def test_all_pods_share_the_claim(releases: dict[str, Rendered]) -> None:
    release = releases["download-shared"]
    (claim,) = release.of("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany", "ReadWriteOnce"]
    assert claim["spec"]["selector"] == {"matchLabels": {"example.org/volume": "models"}}
    assert claim["spec"]["storageClassName"] == "nfs"
    assert claim["spec"]["resources"] == {"requests": {"storage": "50Gi"}}
    assert claim["metadata"]["annotations"] == {"example.org/backup": "false"}
    for pod in _pods(release):
        volume = _download(pod).mounts()["/models"]
        assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}


def test_policies_let_a_download_reach_its_hub(releases: dict[str, Rendered]) -> None:
    for name, port in (("download", 443), ("download-shared", 8080), ("small", None)):
        policies = Policies(releases[name])
        for pod in _pods(releases[name]):
            reached = [
                p for p in (443, 8080) if policies.let_through(dict(pod.labels), STRANGER, p)
            ]
            assert reached == ([] if port is None else [port]), (name, pod.component)


def test_the_values_that_errors_name_are_in_the_chart() -> None:
    settings = DownloadSettings(model=HubName("a/b"), directory=Path("/models/a"))
    text = " ".join(CHART_VALUES.values()) + writing(OSError(13, ""), settings)
    for path in re.findall(r"\b(?:model|networkPolicy|podSecurityContext)\.[\w.]+\w", text):
        value = yaml.safe_load((CHART / "values.yaml").read_text())
        for key in path.split("."):
            value = value[key]
