"""Reads LoRA adapters on disk: the adapters of --lora-modules, and adapters that operators load
from --lora-dir.
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from services.common.errors import InvalidArgument, NotFound, PermissionDenied
from services.common.process.settings import SettingError
from services.common.request.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, adapter_digest
from services.gateway.core.lora_modules import LoraModules

_MAX_SHOWN_CHARACTERS = 300


def read_adapter(name: str, directory: Path) -> Adapter:
    """Returns the adapter in a directory. The adapter's digest is computed from its files. Raises
    NotFound if a file cannot be read.
    """
    try:
        return Adapter(adapter_digest(directory), name, str(directory))
    except OSError as error:
        raise NotFound(
            f"lora_path: {error.filename} cannot be read: {error.strerror}",
            field="lora_path",
            reason="ADAPTER_NOT_FOUND",
        ) from error


def within(allowed: Path, path: str) -> Path:
    """Resolves the directory of an adapter. A relative path is relative to `allowed`.

    Raises PermissionDenied if the directory or one of its files is outside of `allowed`, for
    example because of a link. Raises InvalidArgument if the path is invalid, for example because it
    contains a null character or is a link to itself.
    """
    root = allowed.resolve()
    try:
        directory = _resolved(root / path)
        places = [_resolved(directory / name) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"lora_path: {path[:200]!r} is not the path of a directory: {error}"
        raise InvalidArgument(problem[:600], field="lora_path") from error
    for place in (directory, *places):
        if not place.is_relative_to(root):
            raise PermissionDenied(
                f"lora_path: {path[:200]!r} is outside of --lora-dir", field="lora_path"
            )
    return directory


def _resolved(path: Path) -> Path:
    """Returns the path without links. Raises OSError or RuntimeError if it is a link to itself,
    even in Python 3.13, where `resolve` alone does not raise.
    """
    resolved = path.resolve()
    if resolved.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return resolved


def lora_modules(model_name: str, named: Iterable[str]) -> LoraModules:
    """Reads the adapters of --lora-modules. Each entry has the form name=path. Raises SettingError
    if an adapter cannot be read.
    """
    modules = LoraModules(model_name)
    for entry in named:
        name, _, path = entry.partition("=")
        try:
            modules.add(read_adapter(name, Path(path).resolve()))
        except Exception as error:
            raise SettingError(f"--lora-modules {_shown(entry)}: {error}") from error
    return modules


def _shown(entry: str) -> str:
    cut = entry[:_MAX_SHOWN_CHARACTERS] + "…" * (len(entry) > _MAX_SHOWN_CHARACTERS)
    return cut if cut.isprintable() else repr(cut)
