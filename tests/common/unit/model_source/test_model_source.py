"""A model is found by its directory or by its hub name, in the cache or by download."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from services.common.model_source.errors import ModelSourceError
from services.common.model_source.find import find_model, find_model_files, model_name
from services.common.model_source.hub import HubName, needed_files, parse_hub_name
from tests.hub_server import COMMIT, Hub, running

OTHER = "1" * 40
NAME = "Owner/Tiny-0.5B"
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]})
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "two"}})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face hub, and a hub that cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def fill(cache: Path, commit: str = COMMIT, ref: str = "main", **files: str) -> Path:
    """Writes a model to the cache in the format of huggingface_hub."""
    folder = cache / "models--Owner--Tiny-0.5B"
    snapshot = folder / "snapshots" / commit
    for directory in (folder / "refs", folder / "blobs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    for name, content in files.items():
        blob = folder / "blobs" / f"{commit[:4]}{name}"
        blob.write_text(content)
        (snapshot / name.replace("__", ".")).symlink_to(blob)
    return snapshot


def test_a_name_in_the_cache_is_its_snapshot(cache: Path) -> None:
    snapshot = fill(cache, config__json=CONFIG, model__safetensors="")
    older = fill(cache, OTHER, "v1", config__json=CONFIG, model__safetensors="")
    assert find_model(NAME) == snapshot
    assert find_model(f"https://huggingface.co/{NAME}") == snapshot
    assert find_model(f"{NAME}@v1") == find_model(f"{NAME}@{OTHER}") == older
    assert model_name(snapshot) == model_name(older) == NAME


def test_what_is_cached_without_weights_is_enough_where_none_are_read(cache: Path) -> None:
    snapshot = fill(cache, config__json=CONFIG)
    assert find_model_files(NAME) == snapshot
    with pytest.raises(ModelSourceError) as caught:
        find_model(NAME)
    assert str(caught.value) == (
        f"{NAME} is incomplete in {snapshot}: model.safetensors is missing, and the hub does not "
        f"answer: fetch it with `hf download {NAME}`"
    )


def test_a_shard_that_the_cache_lacks_is_named(cache: Path) -> None:
    files = {"model.safetensors.index.json": INDEX, "two": "", "config.json": CONFIG}
    fill(cache, **{name.replace(".", "__"): content for name, content in files.items()})
    with pytest.raises(ModelSourceError, match=r"model-00001-of-00002\.safetensors is missing"):
        find_model(NAME)


def test_a_name_that_is_not_in_the_cache_is_refused_with_the_command() -> None:
    with pytest.raises(ModelSourceError) as caught:
        find_model(f"{NAME}@v2")
    assert str(caught.value) == (
        f"{NAME}@v2 is not in the local cache of the hub, and the hub does not answer: fetch it "
        f"with `hf download {NAME} --revision v2`"
    )


def test_no_request_is_made_where_the_hub_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelSourceError, match="and HF_HUB_OFFLINE is set: fetch it with"):
        find_model(NAME)


@pytest.mark.parametrize("text", ["nothing", "models/mistyped", "./Owner/Tiny", "/nowhere/at/all"])
def test_a_path_that_is_not_there_is_no_name_of_the_hub(tmp_path: Path, text: str) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelSourceError, match=f"^there is no directory {Path(text)}$"):
        find_model(text)


def test_a_gguf_file_that_is_not_there_is_called_a_file() -> None:
    with pytest.raises(ModelSourceError, match=r"^there is no GGUF file /nowhere/model\.gguf$"):
        find_model("/nowhere/model.gguf")


def test_a_directory_goes_before_a_name(tmp_path: Path, cache: Path) -> None:
    fill(cache, config__json=CONFIG, model__safetensors="")
    (tmp_path / NAME).mkdir(parents=True)
    assert find_model(NAME) == Path(NAME)
    assert model_name(Path(NAME)) == "Tiny-0.5B"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("hf.co/Qwen/Qwen3-0.6B@main", HubName("Qwen/Qwen3-0.6B", "main")),
        ("gpt2", HubName("gpt2")),
        ("a/b/c", None),
        ("../a", None),
        ("~/a", None),
        ("a/b--c", None),
        ("a b/c", None),
    ],
)
def test_names_of_the_hub(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name


def test_only_what_is_read_is_fetched() -> None:
    names = [
        "README.md",
        "config.json",
        "consolidated.safetensors",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "onnx/model.onnx",
        "original/params.json",
        "pytorch_model.bin",
        "tokenizer.json",
        "1_Pooling/config.json",
        "chat_template.jinja",
    ]
    texts = [
        "1_Pooling/config.json",
        "chat_template.jinja",
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert needed_files(names, with_weights=False) == texts
    assert needed_files(names, with_weights=True) == sorted(
        [*texts, "model-00001-of-00001.safetensors"]
    )


def test_a_gguf_file_has_the_tokenizer() -> None:
    names = ["README.md", "tiny-q8_0.gguf", "params.json"]
    assert needed_files(names, with_weights=False) == ["params.json", "tiny-q8_0.gguf"]


HUB = {
    "config.json": CONFIG,
    "model.safetensors": "weights",
    "pytorch_model.bin": "a pickle",
    "tokenizer.json": "{}",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {name: text.encode() for name, text in HUB.items()}
    with running(Hub({NAME: files})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield hub


def test_what_the_cache_lacks_is_fetched_once(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    found = find_model(NAME)
    assert {file.name: file.read_text() for file in found.iterdir()} == {
        name: text for name, text in HUB.items() if name != "pytorch_model.bin"
    }
    assert f"fetching {NAME}: 3 files" in capfd.readouterr().err
    hub.refusal = (500, "")
    assert find_model(NAME) == found
    assert model_name(found) == NAME


@pytest.mark.parametrize("find", [find_model, find_model_files])
def test_of_several_gguf_files_none_is_fetched(hub: Hub, find: Callable[[str], Path]) -> None:
    """A model of the hub may have two dozen of them, with hundreds of gigabytes in total."""
    files = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "README.md")
    hub.models[NAME] = dict.fromkeys(files, b"weights")
    with pytest.raises(ModelSourceError) as caught:
        find(NAME)
    assert str(caught.value) == (
        f"{NAME} has 2 GGUF files on the hub, such as tiny-Q4_K_M.gguf: fetch one of them with "
        f"`hf download {NAME} tiny-Q4_K_M.gguf`, then start with its path"
    )
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.gguf"))


@pytest.mark.parametrize(
    ("status", "code", "problem"),
    [
        (403, "GatedRepo", "is gated: accept its terms at https://huggingface.co/"),
        (401, "RepoNotFound", "the hub has no model Owner/Tiny-0.5B; if it is private, set HF_"),
        (404, "RevisionNotFound", "Owner/Tiny-0.5B has no revision v9 on the hub"),
    ],
)
def test_a_refusal_of_the_hub_is_explained(hub: Hub, status: int, code: str, problem: str) -> None:
    hub.refusal = (status, code)
    with pytest.raises(ModelSourceError) as caught:
        find_model(f"{NAME}@v9")
    assert problem in str(caught.value)
