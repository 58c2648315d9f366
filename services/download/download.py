"""Downloads a model into a directory that several processes may share."""

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from services.common.model_source.errors import HubCause, HubError, ModelSourceError
from services.common.model_source.hub import (
    HubName,
    ask_hub,
    fetch_files,
    files_to_fetch,
    missing_file,
)
from services.download.progress import Progress, amount
from services.download.settings import DownloadSettings
from services.download.shared_lock import locked

_log = logging.getLogger(__name__)
_LIBRARY_FILES = ".cache"
"""The folder in which huggingface_hub writes incomplete files."""


def download(settings: DownloadSettings) -> None:
    """Downloads the model unless its directory exists. Raises ModelSourceError or OSError.

    1. Only the process that locks `<directory>.lock` continues. Others wait.
    2. Files are downloaded into `<directory>.partial/<commit>`. Complete files in it are kept.
    3. Each file is compared with the hub's checksum.
    4. The folder is renamed to `<directory>`. It therefore has all files or does not exist.
    """
    target = settings.directory.absolute()
    if _is_complete(target, settings):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f"{target.name}.lock")):
        if _is_complete(target, settings):
            return
        started = time.monotonic()
        partial = target.with_name(f"{target.name}.partial")
        folder, num_bytes = _fill(partial, settings)
        shutil.rmtree(folder / _LIBRARY_FILES, ignore_errors=True)
        os.sync()  # otherwise a node that fails could leave empty files in a complete directory
        folder.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
        seconds = time.monotonic() - started
        _log.info("%s: %s in %.0f s", target, amount(num_bytes), seconds)


def _is_complete(target: Path, settings: DownloadSettings) -> bool:
    if not target.exists():
        return False
    missing = missing_file(target, with_weights=settings.weights)
    if missing is not None:
        raise ModelSourceError(
            f"{target} exists, but lacks {missing}: delete the directory, or name another one"
        )
    _log.info("%s has %s already", target, settings.model)
    return True


def _fill(partial: Path, settings: DownloadSettings) -> tuple[Path, int]:
    """Downloads the files into a folder of `partial`. Returns the folder and its size in bytes."""
    found = ask_hub(settings.model)
    names = files_to_fetch(settings.model, found, with_weights=settings.weights)
    files = [file for file in found.siblings if file.rfilename in set(names)]
    folder = partial / found.sha
    _delete_leftovers(partial, folder)
    total = sum(file.size or 0 for file in files)
    _require_space(folder, total, settings)
    _log.info(
        "%s: %d files, %s, commit %s", settings.model, len(files), amount(total), found.sha[:12]
    )
    with Progress(folder, total):
        fetch_files(HubName(settings.model.repo, found.sha), names, folder)
    _log.info("comparing the files with the hub's checksums")
    _verify(folder, files)
    return folder, total


def _delete_leftovers(partial: Path, folder: Path) -> None:
    """Deletes files of other commits, and incomplete files, which the library does not continue."""
    folder.mkdir(parents=True, exist_ok=True)
    for other in partial.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    for file in (folder / _LIBRARY_FILES).rglob("*.incomplete"):
        file.unlink()


def _require_space(folder: Path, total: int, settings: DownloadSettings) -> None:
    if settings.size_limit is not None and total > settings.size_limit:
        raise HubError(
            HubCause.NO_SPACE,
            f"{settings.model} has {amount(total)}, and only {amount(settings.size_limit)} are "
            "allowed",
        )
    missing = total - sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise HubError(
            HubCause.NO_SPACE,
            f"{settings.model} needs {amount(missing)}, and the volume has {amount(free)} free",
        )


def _verify(folder: Path, files: Sequence[Any]) -> None:
    """Deletes damaged files and raises HubError if there are any."""
    with ThreadPoolExecutor() as pool:
        right = list(pool.map(lambda file: _has_checksum(folder / file.rfilename, file), files))
    damaged = [file.rfilename for file, is_right in zip(files, right, strict=True) if not is_right]
    for name in damaged:
        (folder / name).unlink()
    if damaged:
        raise HubError(
            HubCause.DAMAGED,
            f"{', '.join(damaged)} did not have the checksum that the hub lists, and will be "
            "downloaded again",
        )


def _has_checksum(path: Path, file: Any) -> bool:
    """Compares a file with its SHA-256 or, for small files, with its SHA-1 in git. A mirror may
    list neither.
    """
    if file.lfs is not None:
        with path.open("rb") as stream:
            return bool(hashlib.file_digest(stream, "sha256").hexdigest() == file.lfs.sha256)
    if file.blob_id is None:
        return True
    content = path.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return bool(git.hexdigest() == file.blob_id)
