"""Builds the drafter."""

from dataclasses import replace

from services.worker.backends.native.compiled import (
    NotCompiled,
    default_cache_directory,
    load_compiled,
)
from services.worker.backends.native.suffix_decoding import MAX_RESPONSE_BYTES, NativeSuffixDecoding
from services.worker.backends.suffix_decoding import SuffixRules
from services.worker.core.drafts.draft_source import ProposerSource
from services.worker.core.drafts.drafter import Drafter
from services.worker.core.drafts.suffix_source import SuffixSource
from services.worker.core.errors import NoSpeculation
from services.worker.parts.draft_model import load_draft_model
from services.worker.parts.rank_setup import RankSetup
from services.worker.parts.refusals import refuse_speculation
from services.worker.platforms.interface import RunnerParts
from services.worker.speculation.config import parse_speculative_config
from services.worker.speculation.ngram import NgramProposer


def with_drafter(setup: RankSetup, parts: RunnerParts) -> RunnerParts:
    """`parts` with a drafter, if the settings enable speculation. Raises NoSpeculation, and
    ModelError for a draft model.
    """
    if setup.settings.speculative_config is None:
        return parts
    refuse_speculation(setup, parts)
    config = parse_speculative_config(setup.settings.speculative_config)
    most, num_rows = config.num_speculative_tokens, config.num_rows
    if num_rows is None:
        num_rows = setup.platform.num_speculative_rows
    limits = replace(parts.limits, num_speculative_tokens=most, num_speculative_rows=num_rows)
    parts = replace(parts, limits=limits)
    if config.model is not None:
        return replace(parts, draft_model=load_draft_model(setup, parts, config.model))
    if config.suffix is not None:
        drafter = Drafter(_suffix_source(setup, config.suffix), most)
        num_bytes = MAX_RESPONSE_BYTES if config.suffix.max_cached_requests else 0
        return replace(parts, drafter=drafter, drafter_bytes=num_bytes)
    return replace(parts, drafter=Drafter(ProposerSource(NgramProposer(config)), most))


def _suffix_source(setup: RankSetup, rules: SuffixRules) -> SuffixSource:
    """Suffix trees in the compiled library. They run on the CPU, also with a model on CUDA. Raises
    NoSpeculation if the library cannot be compiled.
    """
    try:
        library = load_compiled(default_cache_directory(), setup.checkpoint_reached)
    except NotCompiled as error:
        raise NoSpeculation(
            f"speculative_config: suffix trees are compiled code, which there is none of: {error}"
        ) from error
    return SuffixSource(NativeSuffixDecoding(library, rules))
