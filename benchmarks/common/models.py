"""The models that benchmarks serve: directories, and random models, written at their first use."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.console import log

RANDOM_MODELS = ("15m", "135m", "1.1b")


def find_model(name: str, num_tokens: int | None = None) -> Path:
    """The directory of a model. `name` is a directory, or the size of a random model.

    A random model is written at its first use. Its vocabulary has `num_tokens` tokens if this is
    given, otherwise the usual number for its size.
    """
    if name not in RANDOM_MODELS:
        return Path(name)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepwell"
    directory = cache / f"random-{name}"
    if num_tokens is not None:
        directory = cache / f"random-{name}-{num_tokens}"
    if not directory.is_dir():
        # Imported here, because it needs torch, which programs that only run clients may lack.
        from benchmarks.common.random_model import SIZES, write_model  # noqa: PLC0415

        log(f"writing a random model of {name} parameters to {directory}")
        unfinished = cache / f"{directory.name}.{os.getpid()}"
        shape = SIZES[name]
        write_model(replace(shape, vocab_size=num_tokens or shape.vocab_size), unfinished)
        unfinished.rename(directory)
    return directory


def read_config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def vocab_size(model: Path) -> int:
    return int(read_config(model)["vocab_size"])
