"""Finds models by their names on the Hugging Face hub, in the local cache or by download. Cached
files are used without a request to the hub. Missing files are downloaded with the package
huggingface_hub, which reads the environment variables HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
HF_TOKEN and HF_ENDPOINT.
"""

import json
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.model_source.errors import ModelSourceError

_NAME = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*(?:@[\w./-]+)?")
_LINKS = ("https://huggingface.co/", "https://hf.co/", "hf.co/", "hf://")
_ANSWER_SECONDS = 5.0
_CONFIGURATION = re.compile(r"[^/]+\.(json|txt|model|jinja|tiktoken)|\d+_[A-Za-z]+/[^/]+\.json")
"""Matches files other than weights. sentence-transformers has folders such as 1_Pooling."""
_WEIGHTS = (
    re.compile(r"model(-\d+-of-\d+)?\.safetensors"),
    re.compile(r"[^/]+\.safetensors"),
    re.compile(r"[^/]+\.gguf"),
)
"""Name patterns of weights. Only the first pattern that matches any file is used."""
_INDEX = "model.safetensors.index.json"
_CACHE_FOLDER = "models--"


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub, with a branch, tag or commit. The revision None stands for main."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def command(self) -> str:
        revision = "" if self.revision is None else f" --revision {self.revision}"
        return f"hf download {self.repo}{revision}"


def parse_hub_name(text: str) -> HubName | None:
    """Parses a hub name or a link to a model of the hub. Returns None if it cannot be a name."""
    for link in _LINKS:
        text = text.removeprefix(link)
    if _NAME.fullmatch(text) is None or ".." in text or "--" in text:
        return None
    repo, _, revision = text.partition("@")
    return HubName(repo, revision or None)


def name_of_snapshot(directory: Path) -> str | None:
    """The hub name of a model in a cache directory. None if the directory is not in the cache."""
    folder = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not folder.startswith(_CACHE_FOLDER):
        return None
    return folder.removeprefix(_CACHE_FOLDER).replace("--", "/")


def find_snapshot(name: HubName, *, with_weights: bool) -> Path | None:
    """Returns the cache directory of a model, or None if needed files are missing. Weights are
    needed if `with_weights` is set. Raises ModelSourceError if huggingface_hub is not installed.
    """
    directory = _cached(name)
    return directory if directory and not _missing(directory, with_weights) else None


def fetch_snapshot(name: HubName, *, with_weights: bool) -> Path:
    """Downloads missing files and shows the progress on standard error. Raises ModelSourceError
    within seconds if the hub does not respond or rejects the request.
    """
    found = _ask(name, with_weights)
    files = needed_files([each.rfilename for each in found.siblings], with_weights=with_weights)
    if with_weights and not any(file.endswith((".safetensors", ".gguf")) for file in files):
        raise ModelSourceError(
            f"{name} has no safetensors files on the hub, and pickle files are not supported: "
            f"fetch the model with `{name.command}`, then start with the directory, whose error "
            "names the command that converts the files"
        )
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import

    print(f"fetching {name}: {len(files)} files", file=sys.stderr, flush=True)
    try:
        return Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=files))
    except Exception as error:
        raise ModelSourceError(_why(name, error, with_weights)) from error


def needed_files(names: Collection[str], *, with_weights: bool) -> list[str]:
    """Selects the files of a model that are read. The weights are the files with Hugging Face's
    names, or else all other safetensors files, or else the GGUF files.
    """
    chosen = [file for file in names if _CONFIGURATION.fullmatch(file)]
    for kind in _WEIGHTS if with_weights else ():
        weights = [file for file in names if kind.fullmatch(file)]
        if weights:
            return sorted({*chosen, *weights})
    return sorted(chosen)


def _ask(name: HubName, with_weights: bool) -> Any:
    try:
        from huggingface_hub import HfApi  # noqa: PLC0415 - slow to import

        return HfApi().model_info(name.repo, revision=name.revision, timeout=_ANSWER_SECONDS)
    except Exception as error:
        raise ModelSourceError(_why(name, error, with_weights)) from error


def _why(name: HubName, error: Exception, with_weights: bool) -> str:
    """Explains a failed download. Errors of huggingface_hub are recognized by their class names."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"{name} is gated: accept its terms at https://huggingface.co/{name.repo}, and set "
            "HF_TOKEN to a token of that account"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{name.repo} has no revision {name.revision} on the hub"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"the hub has no model {name.repo}; if it is private, set HF_TOKEN to a token that "
            "may read it"
        )
    held = "is not in the local cache of the hub"
    if (directory := _cached(name)) is not None:
        held = f"is incomplete in {directory}: {_missing(directory, with_weights)} is missing"
    answer = "the hub does not answer"
    if "OfflineModeIsEnabled" in kinds:
        answer = "HF_HUB_OFFLINE is set"
    elif "HfHubHTTPError" in kinds:
        answer = f"the hub answers: {' '.join(str(error).split())[:120]}"
    elif isinstance(error, OSError) and error.strerror and "HTTPError" not in kinds:
        answer = error.strerror
    return f"{name} {held}, and {answer}: fetch it with `{name.command}`"


def _cached(name: HubName) -> Path | None:
    """Returns the directory of a model's snapshot in the cache, or None. huggingface_hub's own
    function would find only snapshots with all files of the model.
    """
    try:
        from huggingface_hub import constants  # noqa: PLC0415 - not in every image
    except ImportError:
        raise ModelSourceError(
            f"{name}: names of the hub need the package huggingface_hub; give a directory"
        ) from None
    folder = Path(constants.HF_HUB_CACHE) / f"{_CACHE_FOLDER}{name.repo.replace('/', '--')}"
    revision = name.revision or "main"
    ref = folder / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _missing(directory: Path, with_weights: bool) -> str | None:
    if any(directory.glob("*.gguf")):
        return None
    if not (directory / "config.json").exists():
        return "config.json"
    if not with_weights:
        return None
    index = directory / _INDEX
    if index.exists():
        with suppress(ValueError, AttributeError):  # loading the weights reports a damaged index
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return next((file for file in files if not (directory / file).exists()), None)
    weights = (".safetensors", ".bin", ".pth", ".pt")
    has_any = any(path.name.endswith(weights) for path in directory.iterdir())
    return None if has_any else "model.safetensors"
