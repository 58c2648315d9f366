"""Builds the drafter, which proposes draft tokens, and the draft model of the settings, if any."""

from dataclasses import replace
from pathlib import Path

from services.worker.backends.attention import AttentionShape
from services.worker.backends.device import dtype_name
from services.worker.backends.native import compiled
from services.worker.backends.native.suffix_decoding import MAX_RESPONSE_BYTES, NativeSuffixDecoding
from services.worker.backends.out_of_memory import memory_for
from services.worker.backends.suffix_decoding import SuffixRules
from services.worker.core.drafts.draft_source import ProposerSource, SuffixSource
from services.worker.core.drafts.drafter import Drafter
from services.worker.core.errors import NoSpeculation
from services.worker.core.fingerprint import model_fingerprint
from services.worker.models.config import read_model_config
from services.worker.models.model import LoadOptions
from services.worker.parts.rank_setup import RankSetup
from services.worker.parts.refusals import refuse_draft_model, refuse_speculation
from services.worker.platforms.interface import DraftModelParts, RunnerParts
from services.worker.speculation.config import parse_speculative_config
from services.worker.speculation.ngram import NgramProposer


def with_drafter(setup: RankSetup, parts: RunnerParts) -> RunnerParts:
    """Adds a drafter to `parts` if the settings enable speculation. Raises NoSpeculation if drafts
    are not possible, and ModelError if a draft model cannot be loaded.
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
        return replace(parts, draft_model=_load_draft_model(setup, parts, config.model))
    if config.suffix is not None:
        drafter = Drafter(_suffix_source(setup, config.suffix), most)
        num_bytes = MAX_RESPONSE_BYTES if config.suffix.max_cached_requests else 0
        return replace(parts, drafter=drafter, drafter_bytes=num_bytes)
    return replace(parts, drafter=Drafter(ProposerSource(NgramProposer(config)), most))


def _suffix_source(setup: RankSetup, rules: SuffixRules) -> SuffixSource:
    """Creates the draft source for suffix decoding: it finds earlier text that ends like a
    request's tokens, and drafts the tokens that followed. Its suffix trees are in the compiled
    library, on the CPU even if the model is on CUDA. Raises NoSpeculation if the library cannot be
    compiled.
    """
    try:
        library = compiled.load_compiled(
            compiled.default_cache_directory(), setup.checkpoint_reached
        )
    except compiled.NotCompiled as error:
        raise NoSpeculation(
            "speculative_config: method suffix needs the compiled kernels, which are not "
            f"available: {error}"
        ) from error
    return SuffixSource(NativeSuffixDecoding(library, rules))


def _load_draft_model(setup: RankSetup, parts: RunnerParts, directory: Path) -> DraftModelParts:
    """Loads a draft model, or this rank's part of it, and determines the shape of its KV cache.

    The draft model is divided among the ranks like the target model, and its data type follows from
    the same setting. Its maximum sequence length is the smaller of the two models' limits. Raises
    NoSpeculation if the draft model cannot draft for the target model in `parts`, ModelError if it
    cannot be loaded, and NotEnoughMemory.
    """
    refuse_draft_model(setup, parts, directory)
    checkpoint = setup.platform.open(directory)
    longest = read_model_config(directory).rope.max_model_len
    options = LoadOptions(
        min(longest, parts.loaded.max_model_len), setup.platform.dtype(setup.settings.dtype)
    )
    weights = f"the weights of the draft model ({checkpoint.num_bytes / 2**20:.0f} MiB)"
    with memory_for(weights, "use a machine with more memory, or a smaller draft model"):
        layer_read = setup.progress("loading layers of the draft model")
        loaded = setup.platform.load(
            checkpoint, options, layer_read, setup.ranks, setup.wait_for_ranks
        )
    group = parts.limits.windows.index(None)
    shape = AttentionShape(
        loaded.attention,
        parts.limits.block_sizes[group],
        num_blocks=0,
        dtype=loaded.dtype,
        device=setup.platform.torch_device,
        kv_cache_dtype=parts.shape.kv_cache_dtype,
    )
    fingerprint = model_fingerprint(
        *(checkpoint, shape.block_size, dtype_name(loaded.dtype), loaded.rope_length),
        bfloat16_order=parts.kernels.bfloat16_order,
    )
    return DraftModelParts(loaded, shape, group, fingerprint)
