"""Creates a directory in Hugging Face's format for a single GGUF file. Code that reads model
directories can then read GGUF files too. Configuration and tokenizer are built once for each file,
from its metadata alone. They are stored in $XDG_CACHE_HOME/stepwell/gguf, with a link to the file.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path

from services.common.model_source.errors import GgufError
from services.common.model_source.gguf_config import gguf_config, gguf_generation_config
from services.common.model_source.gguf_header import read_gguf_header
from services.common.model_source.gguf_tokenizer import gguf_tokenizer

SUFFIX = ".gguf"
_FORM = 2
"""The version of the generated files. It is increased when the code generates other contents."""
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def gguf_directory(file: Path) -> Path:
    """Returns the directory of a GGUF file and creates it if it does not exist. Raises GgufError
    for a file that is damaged, one part of several, or of an unsupported kind.
    """
    part = _PART.search(file.name)
    if part is not None and part[1] != "00001":
        raise GgufError(
            file,
            "the file is one of several parts of a model: join them with llama.cpp's "
            "llama-gguf-split --merge",
        )
    try:
        found = file.resolve(strict=True).stat()
    except OSError as error:
        raise GgufError(file, f"the file cannot be read: {error.strerror}") from error
    # The name is part of the key, because several links with different names may lead to one file.
    identity = f"{_FORM} {file.resolve()} {file.stem} {found.st_size} {found.st_mtime_ns}"
    key = sha256(identity.encode()).hexdigest()[:16]
    problem = ""
    for parent in chain([_cache()], _temporary()):
        directory = parent / key / file.stem
        try:
            return directory if (directory / "config.json").exists() else _make(directory, file)
        except OSError as error:
            problem = problem or error.strerror or ""
    raise GgufError(
        file, f"no directory for the file's configuration can be made in {_cache()}: {problem}"
    )


def single_gguf(directory: Path) -> Path | None:
    """Returns the only GGUF file of a directory without config.json. Otherwise returns None."""
    if (directory / "config.json").exists():
        return None
    files = list(directory.glob(f"*{SUFFIX}"))
    return files[0] if len(files) == 1 else None


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stepwell" / "gguf"


def _temporary() -> Iterator[Path]:
    """Yields a directory for users without a cache, unless another user has created it."""
    path = Path(tempfile.gettempdir()) / f"stepwell-gguf-{os.geteuid()}"
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        if path.lstat().st_uid == os.geteuid():
            yield path


def _make(directory: Path, file: Path) -> Path:
    """Creates the directory atomically, so that concurrent processes see all files or none."""
    header = read_gguf_header(file, with_texts=True)
    tokenizer, tokenizer_config = gguf_tokenizer(file, header)
    contents = {
        "config.json": gguf_config(file, header),
        "generation_config.json": gguf_generation_config(header),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    directory.parent.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent.parent))
    try:
        (made / file.stem).mkdir()
        for name, content in contents.items():
            text = json.dumps(content, ensure_ascii=False, indent=1)
            (made / file.stem / name).write_text(text, encoding="utf-8")
        (made / file.stem / f"model{SUFFIX}").symlink_to(file.resolve())
        made.rename(directory.parent)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not directory.is_dir():  # otherwise another process has created it
            raise
    return directory
