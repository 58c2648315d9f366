"""Creates the WorkerDescription, which tells the scheduler the model, limits and KV cache."""

from services.common.request.tokenizer_files import tokenizer_fingerprint
from services.worker.backends.device import dtype_name
from services.worker.core.kv.kv_cache import KVCacheSizing
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.core.worker import WorkerDescription
from services.worker.parts.rank_setup import RankSetup
from services.worker.platforms.interface import RunnerParts


def describe(
    setup: RankSetup,
    parts: RunnerParts,
    groups: tuple[LayerGroup, ...],
    sizing: KVCacheSizing,
    fingerprint: bytes,
    incarnation: str,
) -> WorkerDescription:
    """Describes a worker with a KV cache, whose final number of blocks is in `parts`."""
    settings, own = setup.settings, setup.membership
    loaded, shape, limits = parts.loaded, parts.shape, parts.limits
    dtype = dtype_name(loaded.dtype)
    return WorkerDescription(
        incarnation=incarnation,
        model_name=settings.model_name,
        fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(settings.model),
        max_model_len=limits.max_model_len,
        vocab_size=loaded.vocab_size,
        hidden_size=loaded.hidden_size,
        eos_token_ids=loaded.eos_token_ids,
        groups=groups,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        bytes_per_block=parts.bytes_per_block,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kv_cache_sizing=sizing.explanation,
        dtype=dtype,
        kv_cache_dtype=settings.kv_cache_dtype.value if shape.has_codes else dtype,
        kernels=parts.kernels.description,
        rank=own.rank,
        world_size=own.size,
        pipeline_parallel_size=own.pipeline_parallel_size,
        pooler=None if parts.pooler is None else parts.pooler.end.pooler,
        num_tier_blocks=limits.num_tier_blocks,
        max_loras=settings.max_loras if settings.enable_lora else 0,
        max_cpu_loras=settings.num_lora_slots,
        num_speculative_tokens=limits.num_speculative_tokens,
        num_speculative_rows=limits.num_speculative_rows,
    )
