from dataclasses import replace

from services.worker.backends.device import dtype_name
from services.worker.core.lockstep import Lockstep
from services.worker.core.pipeline import PipelineStage
from services.worker.parts.rank_setup import RankSetup
from services.worker.platform_choice import is_batch_invariant
from services.worker.platforms.interface import RunnerParts


def with_group(setup: RankSetup, parts: RunnerParts, fingerprint: bytes) -> RunnerParts:
    """`parts` with a Lockstep and a pipeline stage, if there are other ranks. Raises GroupBroken
    unless all ranks have the same model and settings.
    """
    group = setup.group
    if group is None:
        return parts
    group.require_same(_in_common(setup, parts, fingerprint))
    every, explain = setup.settings.check_ranks_every_steps, group.watch.explain
    own, loaded, stage = setup.membership, parts.loaded, None
    lockstep = Lockstep(setup.ranks, every, explain, own.rank)
    if group.link is not None:
        link, num_stages = group.link, own.pipeline_parallel_size
        stage = PipelineStage(own.stage, num_stages, link, loaded.hidden_size, loaded.dtype)
    return replace(parts, lockstep=lockstep, stage=stage)


def _in_common(setup: RankSetup, parts: RunnerParts, fingerprint: bytes) -> dict[str, str]:
    """The values that must be equal on all ranks, by name."""
    settings = setup.settings
    return {
        "kv_cache_dtype": settings.kv_cache_dtype.value,
        "the model": fingerprint.hex()[:16],
        "dtype": dtype_name(parts.loaded.dtype),
        "max_model_len": str(parts.loaded.max_model_len),
        "max_num_seqs": str(settings.max_num_seqs),
        "max_num_batched_tokens": str(settings.max_num_batched_tokens),
        "check_ranks_every_steps": str(settings.check_ranks_every_steps),
        "max_cpu_loras": str(settings.num_lora_places),
        "max_lora_rank": str(settings.max_lora_rank),
        "speculative_config": str(settings.speculative_config),
        "batch_invariant": str(is_batch_invariant(settings, parts.shape.device)),
        "what computes": type(parts.kernels).__name__,
    }
