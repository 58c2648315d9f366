"""Models are downloaded into a directory that pods share: atomically, verified, once."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from services.common.model_source.errors import HubCause, HubError, ModelSourceError
from services.common.model_source.find import find_model, find_model_files
from services.common.process.settings import SettingError, parse_settings
from services.download import progress
from services.download.__main__ import sentence, writing
from services.download.download import download
from services.download.settings import DownloadSettings
from tests.hub_server import Hub, running
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
NAME = "Owner/Tiny-0.5B"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_DEMO = ROOT / "models" / "demo"
_INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
MODEL = {
    "config.json": (_DEMO / "config.json").read_bytes(),
    "tokenizer.json": (_DEMO / "tokenizer.json").read_bytes(),
    "model.safetensors.index.json": json.dumps(_INDEX).encode(),
    **{shard: random.Random(shard).randbytes(200_000) for shard in SHARDS},
    "pytorch_model.bin": b"a pickle",
}
FILES = {name: content for name, content in MODEL.items() if name != "pytorch_model.bin"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model. Downloads within the test's process use it, too."""
    with running(Hub({NAME: MODEL})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def settings(directory: Path, *flags: str, name: str = NAME) -> DownloadSettings:
    given = ["--model", f"hf://{name}", "--directory", str(directory), *flags]
    return parse_settings(DownloadSettings, "download", given, {})


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def start(hub: Hub, directory: Path, **variables: str) -> subprocess.Popen[str]:
    """Starts the program as a container does."""
    environ = {
        "HF_ENDPOINT": hub.url,
        "STEPWELL_DOWNLOAD_MODEL": f"hf://{NAME}@main",
        "STEPWELL_DOWNLOAD_DIRECTORY": str(directory),
        "STEPWELL_DOWNLOAD_LOG_FORMAT": "json",
        "HOME": str(directory.parent / "home"),
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "services.download"],
        env={**os.environ, **environ},
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_the_directory_has_what_services_read(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "Owner" / "Tiny"
    download(settings(target))
    assert contents(target) == FILES
    assert find_model(str(target)) == target
    assert [path.name for path in target.parent.iterdir()] == ["Tiny.lock", "Tiny"]
    hub.requests.clear()
    hub.refusal = (500, "")
    download(settings(target))
    assert hub.requests == [], "a pod that starts again depends on no hub"


@pytest.mark.usefixtures("hub")
def test_a_gateway_needs_no_weights(tmp_path: Path) -> None:
    download(settings(tmp_path / "tiny", "--no-weights"))
    assert contents(tmp_path / "tiny").keys() == FILES.keys() - set(SHARDS)
    assert find_model_files(str(tmp_path / "tiny"))
    with pytest.raises(ModelSourceError, match=r"exists, but lacks model-00001-of-00002\.safe"):
        download(settings(tmp_path / "tiny"))


def test_a_broken_connection_continues_within_the_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # ten megabytes otherwise
    hub.cut = {SHARDS[0]: 150_000}
    download(settings(tmp_path / "tiny"))
    assert contents(tmp_path / "tiny") == FILES
    assert hub.downloads(SHARDS[0]) == [None, "bytes=150000-"]


def test_a_killed_download_keeps_its_complete_files(hub: Hub, tmp_path: Path) -> None:
    target, partial = tmp_path / "tiny", tmp_path / "tiny.partial"
    hub.stuck = {SHARDS[1]}
    with start(hub, target) as process:
        assert hub.half_sent.wait(60)
        while len(contents(partial).keys() & {f"{_commit(partial)}/{n}" for n in FILES}) < 4:
            assert process.poll() is None
        process.kill()
    assert not target.exists()
    assert any(name.endswith(".incomplete") for name in contents(partial))
    hub.stuck.clear()
    hub.released.set()
    download(settings(target))
    assert contents(target) == FILES
    assert not partial.exists()
    assert [len(hub.downloads(name)) for name in (*SHARDS, "config.json")] == [1, 2, 1]


def _commit(partial: Path) -> str:
    return next((path.name for path in partial.iterdir()), "")


def test_of_several_processes_one_downloads(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    hub.stuck = {SHARDS[0]}
    with start(hub, target) as first:
        assert hub.half_sent.wait(60)
        with start(hub, target) as second:
            assert second.stderr is not None
            line = json.loads(second.stderr.readline())
            assert line["message"].startswith("waiting while another process downloads into")
            hub.stuck.clear()
            hub.released.set()
            assert first.wait(60) == second.wait(60) == 0
            assert "has Owner/Tiny-0.5B@main already" in second.stderr.read()
    assert contents(target) == FILES
    assert hub.downloads(SHARDS[1]) == [None]
    assert all(path.startswith(("/api/models/", f"/{NAME}/")) for _, path, _ in hub.requests)


def test_the_program_ends_with_the_value_to_change(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_right"
    with start(hub, tmp_path / "tiny", HF_TOKEN="hf_wrong") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(
        rf"stepwell download: {NAME}@main cannot be downloaded from {hub.url}: the hub answers "
        r"401 Unauthorized: Invalid credentials .*\(in the Helm chart: "
        r"model\.download\.tokenSecret\)\n",
        errors,
    ), errors
    assert not list(tmp_path.glob("tiny.partial/*"))


@pytest.mark.parametrize(
    ("refusal", "name", "cause", "text"),
    [
        ((403, "GatedRepo"), NAME, HubCause.GATED, "is gated: accept its terms at"),
        ((401, "RepoNotFound"), NAME, HubCause.NO_MODEL, "if it is private, set HF_TOKEN"),
        (None, "Owner/Other", HubCause.NO_MODEL, "the hub has no model Owner/Other"),
        (None, f"{NAME}@v9", HubCause.NO_REVISION, "has no revision v9 on the hub"),
        ((503, ""), NAME, HubCause.REFUSED, "the hub answers 503 Service"),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence(
    hub: Hub,
    tmp_path: Path,
    refusal: tuple[int, str] | None,
    name: str,
    cause: HubCause,
    text: str,
) -> None:
    hub.refusal = refusal
    wanted = settings(tmp_path / "tiny", name=name)
    with pytest.raises(HubError) as caught:
        download(wanted)
    assert caught.value.cause is cause
    assert text in sentence(caught.value, wanted)


def test_a_hub_that_cannot_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    wanted = settings(tmp_path / "tiny")
    with pytest.raises(HubError) as caught:
        download(wanted)
    assert sentence(caught.value, wanted).startswith(
        f"{NAME} cannot be downloaded from http://127.0.0.1:9: the hub does not answer (in the "
        "Helm chart: model.download.endpoint,"
    )


def test_damaged_files_are_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    wanted = settings(tmp_path / "tiny")
    hub.damaged = {SHARDS[1], "config.json"}
    with pytest.raises(HubError, match=rf"config\.json, {SHARDS[1]} did not have the checksum"):
        download(wanted)
    assert not (tmp_path / "tiny").exists()
    hub.damaged.clear()
    download(wanted)
    assert contents(tmp_path / "tiny") == FILES
    assert [len(hub.downloads(shard)) for shard in SHARDS] == [1, 2]


@pytest.mark.usefixtures("hub")
def test_leftovers_that_are_no_directories_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "tiny.partial").mkdir()
    (tmp_path / "tiny.partial" / ".nfs01").touch()
    (tmp_path / "tiny.partial" / "link").symlink_to(tmp_path)
    download(settings(tmp_path / "tiny"))
    assert contents(tmp_path / "tiny") == FILES


def test_a_model_that_is_too_large_is_not_begun(hub: Hub, tmp_path: Path) -> None:
    wanted = settings(tmp_path / "tiny", "--size-limit", "300k")
    with pytest.raises(HubError) as caught:
        download(wanted)
    assert caught.value.cause is HubCause.NO_SPACE
    assert "and only 300.0 kB are allowed (in the Helm chart: model.claim.size" in sentence(
        caught.value, wanted
    )
    assert hub.downloads(SHARDS[0]) == []


def test_a_volume_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "file" / "tiny")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError) as caught:
        download(wanted)
    assert f"File exists: '{tmp_path / 'file'}'" in writing(caught.value, wanted)
    assert "Helm" not in writing(caught.value, wanted)
    full = OSError(28, "No space left on device")
    assert "model.claim.size" in writing(full, wanted)
    assert "model.volume" in writing(OSError(30, "Read-only file system"), wanted)
    assert "podSecurityContext.fsGroup" in writing(PermissionError(13, "denied"), wanted)


def test_the_log_shows_how_much_of_the_model_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "_INTERVAL_SECONDS", 0.01)
    caplog.set_level("INFO")
    with progress.Progress(tmp_path, 3_000_000):
        (tmp_path / "model.safetensors").write_bytes(bytes(1_500_000))
        wait_for(lambda: "1.5 MB of 3.0 MB" in caplog.text)
    lines = len(caplog.records)
    time.sleep(0.03)
    assert len(caplog.records) == lines, "the end of the download ends the log"
    assert re.fullmatch(r"1\.5 MB of 3\.0 MB, \S+ \S+ a second", caplog.messages[-1])


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("40Gi", 40 * 2**30), ("1.5k", 1500), ("7Ki", 7168), ("2T", 2 * 10**12), ("12", 12)],
)
def test_amounts_have_the_suffixes_of_kubernetes(text: str, num_bytes: int, tmp_path: Path) -> None:
    assert settings(tmp_path, "--size-limit", text).size_limit == num_bytes


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="must be an amount of bytes such as 40Gi"):
        settings(tmp_path, "--size-limit", "40 GB")
    with pytest.raises(SettingError, match="must be a name such as hf://"):
        settings(tmp_path, name="s3://bucket/model")
