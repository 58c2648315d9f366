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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.model_source.errors import HubCause, HubError, ModelSourceError

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
_SELF_EXPLAINING = frozenset(
    {HubCause.GATED, HubCause.NO_MODEL, HubCause.NO_REVISION, HubCause.NO_WEIGHTS}
)
"""The causes whose message needs no addition about the local cache."""
_REJECTED = (401, 403)
_ERRORS = (
    (
        "GatedRepoError",
        HubCause.GATED,
        "{name} is gated: accept its terms at https://huggingface.co/{repo}, and set HF_TOKEN to a "
        "token of that account",
    ),
    (
        "RevisionNotFoundError",
        HubCause.NO_REVISION,
        "{repo} has no revision {revision} on the hub",
    ),
    (
        "RepositoryNotFoundError",
        HubCause.NO_MODEL,
        "the hub has no model {repo}; if it is private, set HF_TOKEN to a token that may read it",
    ),
    ("OfflineModeIsEnabled", HubCause.OFFLINE, "HF_HUB_OFFLINE is set"),
)
"""Classes of errors of huggingface_hub, their causes and their messages."""


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
    if directory is None or missing_file(directory, with_weights=with_weights) is not None:
        return None
    return directory


def fetch_snapshot(name: HubName, *, with_weights: bool) -> Path:
    """Downloads missing files and shows the progress on standard error. Raises ModelSourceError
    within seconds if the hub does not respond or rejects the request.
    """
    try:
        found = ask_hub(name)
        files = files_to_fetch(name, found, with_weights=with_weights)
        print(f"fetching {name}: {len(files)} files", file=sys.stderr, flush=True)
        return fetch_files(name, files)
    except HubError as error:
        if error.cause in _SELF_EXPLAINING:
            raise
        held = "is not in the local cache of the hub"
        if (directory := _cached(name)) is not None:
            missing = missing_file(directory, with_weights=with_weights)
            held = f"is incomplete in {directory}: {missing} is missing"
        raise ModelSourceError(
            f"{name} {held}, and {error}: fetch it with `{name.command}`"
        ) from error


def ask_hub(name: HubName) -> Any:
    """Returns the hub's description of a model: the commit `sha`, and the files `siblings` with
    their sizes and checksums. Raises HubError within seconds if the hub does not respond.
    """
    try:
        from huggingface_hub import HfApi  # noqa: PLC0415 - slow to import

        return HfApi().model_info(
            name.repo, revision=name.revision, timeout=_ANSWER_SECONDS, files_metadata=True
        )
    except Exception as error:
        raise _explained(name, error) from error


def files_to_fetch(name: HubName, found: Any, *, with_weights: bool) -> list[str]:
    """Selects files of the description that `ask_hub` returned. Raises HubError if there are no
    weights that can be read, or several GGUF files, which mostly are the same model with different
    quantizations.
    """
    files = needed_files([each.rfilename for each in found.siblings], with_weights=with_weights)
    gguf = [file for file in files if file.endswith(".gguf")]
    if len(gguf) > 1:
        raise HubError(
            HubCause.NO_WEIGHTS,
            f"{name} has {len(gguf)} GGUF files on the hub, such as {gguf[0]}: fetch one of them "
            f"with `hf download {name.repo} {gguf[0]}`, then start with its path",
        )
    if with_weights and not any(file.endswith((".safetensors", ".gguf")) for file in files):
        raise HubError(
            HubCause.NO_WEIGHTS,
            f"{name} has no safetensors files on the hub, and pickle files are not supported: "
            f"fetch the model with `{name.command}`, then start with the directory, whose error "
            "names the command that converts the files",
        )
    return files


def fetch_files(name: HubName, files: list[str], directory: Path | None = None) -> Path:
    """Downloads files that are missing in `directory`, by default in the cache, and returns the
    directory with them. Each file is written under another name until it is complete. Raises
    HubError.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import

    try:
        return Path(
            snapshot_download(
                name.repo, revision=name.revision, allow_patterns=files, local_dir=directory
            )
        )
    except Exception as error:
        raise _explained(name, error) from error


def needed_files(names: Collection[str], *, with_weights: bool) -> list[str]:
    """Selects the files of a model that are read. The weights are the files with Hugging Face's
    names, or else all other safetensors files, or else the GGUF files. Without config.json, the
    configuration and the tokenizer are in a GGUF file.
    """
    chosen = [file for file in names if _CONFIGURATION.fullmatch(file)]
    for kind in _WEIGHTS if with_weights or "config.json" not in names else ():
        weights = [file for file in names if kind.fullmatch(file)]
        if weights:
            return sorted({*chosen, *weights})
    return sorted(chosen)


def _explained(name: HubName, error: Exception) -> HubError:
    """Explains a failed request. Errors of huggingface_hub are recognized by their class names."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "LocalEntryNotFoundError" in kinds and isinstance(error.__cause__, Exception):
        return _explained(name, error.__cause__)
    for kind, cause, sentence in _ERRORS:
        if kind in kinds:
            return HubError(cause, sentence.format(name=name, **asdict(name)))
    if "HfHubHTTPError" in kinds:
        return _http_error(error)
    if isinstance(error, OSError) and error.strerror and "HTTPError" not in kinds:
        return HubError(HubCause.WRITING, error.strerror)
    return HubError(HubCause.UNREACHABLE, "the hub does not answer")


def _http_error(error: Any) -> HubError:
    status, why = error.response.status_code, error.response.reason_phrase
    if error.server_message:
        why = f"{why}: {' '.join(error.server_message.split())[:120]}"
    cause = HubCause.TOKEN if status in _REJECTED else HubCause.REFUSED
    return HubError(cause, f"the hub answers {status} {why}")


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


def missing_file(directory: Path, *, with_weights: bool) -> str | None:
    """The name of a file that a model's directory lacks. None if it is complete."""
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
