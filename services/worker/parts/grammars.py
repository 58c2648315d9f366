"""Builds the cache of compiled grammars."""

from functools import partial
from pathlib import Path

from services.worker.platforms.interface import Parts
from services.worker.sampling.grammar import Grammars, model_compiler


def make_grammars(model: Path, parts: Parts) -> Grammars | None:
    """The grammars of a rank; None if it does not sample. `model`: the directory with the
    tokenizer.
    """
    if parts.pooler is not None or not (parts.stage is None or parts.stage.is_last):
        return None
    loaded = parts.loaded
    return Grammars(partial(model_compiler, model, loaded.vocab_size, loaded.eos_token_ids))
