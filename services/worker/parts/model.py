"""Loads the model, and determines the shape of its KV cache and the limits of its batch."""

from dataclasses import replace

from services.worker.backends.attention import AttentionShape
from services.worker.backends.out_of_memory import memory_for
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.kv import kv_groups
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.core.pooler import PromptPooler, vector_end
from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.model import LoadedModel, LoadOptions
from services.worker.models.pooling_config import PoolingConfig
from services.worker.parts.rank_setup import RankSetup
from services.worker.platforms.interface import RunnerParts


def load_parts(
    setup: RankSetup, checkpoint: Checkpoint, pooling: PoolingConfig | None
) -> tuple[RunnerParts, tuple[LayerGroup, ...]]:
    """Loads the model, or this rank's part of it. Returns the runner's parts, with a KV cache of 0
    blocks, and the KV-cache groups.
    """
    settings, kernels = setup.settings, setup.platform.kernels()
    options = LoadOptions(
        settings.max_model_len,
        setup.platform.dtype(settings.dtype),
        pooling,
        setup.membership.stage,
        setup.membership.pipeline_parallel_size,
        settings.quantization,
    )
    weights = f"the weights ({checkpoint.num_bytes / 2**20:.0f} MiB in their files)"
    with memory_for(weights, "use a machine with more memory, a smaller dtype, or more ranks"):
        layer_read = setup.progress("loading layers")
        loaded = setup.platform.load(
            checkpoint, options, layer_read, setup.ranks, setup.wait_for_ranks
        )
    kinds = kv_groups.layer_kinds(
        loaded.attention,
        settings.kv_cache_dtype,
        scales_blocks=setup.platform.scales_blocks
        and not loaded.states
        and settings.kv_offloading_size is None,
    )
    groups = kv_groups.group_layers(kinds, len(loaded.states), settings.mamba_cache_mode)
    shape = _cache_shape(setup, loaded, groups)
    limits = _batch_limits(setup, loaded, groups, shape.block_size)
    pooler = None
    if pooling is not None:
        end = vector_end(pooling, loaded.hidden_size, takes_whole_prompts=False)
        pooler = PromptPooler(end, loaded.model.compute_logits)
    return RunnerParts(loaded, kernels, shape, limits, pooler=pooler), groups


def _cache_shape(
    setup: RankSetup, loaded: LoadedModel, groups: tuple[LayerGroup, ...]
) -> AttentionShape:
    """Returns the shape of the KV cache, with 0 blocks for now. The block size is the setting's.
    Without a setting it is large enough for the states of recurrent layers.
    """
    shape = AttentionShape(
        loaded.own_attention,
        setup.platform.default_block_size,
        num_blocks=0,
        dtype=loaded.dtype,
        device=setup.platform.torch_device,
        groups=tuple(loaded.own_layers(group.layers) for group in groups if not group.holds_states),
        states=loaded.states,
        state_groups=tuple(group.layers for group in groups if group.holds_states),
        kv_cache_dtype=setup.settings.kv_cache_dtype,
        block_scales=kv_groups.block_scales(groups),
    )
    return replace(shape, block_size=setup.settings.block_size or shape.block_size_for_states)


def _batch_limits(
    setup: RankSetup, loaded: LoadedModel, groups: tuple[LayerGroup, ...], block_size: int
) -> BatchLimits:
    return BatchLimits(
        max_num_seqs=setup.settings.max_num_seqs,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=setup.settings.max_num_batched_tokens,
        vocab_size=loaded.vocab_size,
        block_size=block_size,
        num_blocks=0,
        windows=tuple(group.window for group in groups),
        state_block_sizes=kv_groups.state_block_sizes(groups, block_size, loaded.max_model_len),
        block_scales=kv_groups.block_scales(groups),
    )
