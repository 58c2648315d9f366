"""Builds a worker for a model that processes whole prompts."""

from services.common.request.tokenizer_files import tokenizer_fingerprint
from services.worker.backends.device import dtype_name
from services.worker.backends.out_of_memory import memory_for
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.fingerprint import model_fingerprint
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.core.pooler import vector_end
from services.worker.core.whole_runner import WholeRunner
from services.worker.core.worker import Worker, WorkerDescription
from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.model import LoadOptions
from services.worker.models.pooling_config import PoolingConfig
from services.worker.models.whole_model import load_whole_model
from services.worker.parts.rank_setup import RankSetup
from services.worker.platforms.prompt_shapes import PromptShape, run_prompts

_WARM_UP_TOKENS = 256
_GROUPS = (LayerGroup(None, ()),)
"""One KV-cache group without layers. The scheduler allocates its blocks, which store nothing."""


def build_whole(
    setup: RankSetup, checkpoint: Checkpoint, pooling: PoolingConfig, incarnation: str
) -> Worker:
    """Loads the model and computes a warm-up prompt. Raises ModelError and NotEnoughMemory.

    A prompt is computed within one step, so a step's token budget is at least the model's maximum
    length.
    """
    with memory_for("the weights", "use a machine with more memory, or a smaller dtype"):
        return _build(setup, checkpoint, pooling, incarnation)


def _build(
    setup: RankSetup, checkpoint: Checkpoint, pooling: PoolingConfig, incarnation: str
) -> Worker:
    settings, platform = setup.settings, setup.platform
    options = LoadOptions(settings.max_model_len, platform.dtype(settings.dtype), pooling)
    block_size = settings.block_size or platform.default_block_size
    loaded = load_whole_model(checkpoint, options)
    end = vector_end(loaded.pooling, loaded.hidden_size, takes_whole_prompts=True)
    blocks_each = -(-loaded.max_model_len // block_size)
    limits = BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=max(settings.max_num_batched_tokens, loaded.max_model_len),
        vocab_size=loaded.vocab_size,
        block_size=block_size,
        num_blocks=settings.max_num_seqs * blocks_each + 1,
    )
    runner = WholeRunner(loaded, end, limits)
    run_prompts(runner, limits, PromptShape(1, min(_WARM_UP_TOKENS, limits.max_model_len)))
    dtype = dtype_name(loaded.dtype)
    description = WorkerDescription(
        incarnation=incarnation,
        model_name=settings.model_name,
        fingerprint=model_fingerprint(
            checkpoint, block_size, dtype, groups=_GROUPS, pooling=loaded.pooling
        ),
        tokenizer_fingerprint=tokenizer_fingerprint(settings.model),
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        hidden_size=loaded.hidden_size,
        eos_token_ids=(),
        groups=_GROUPS,
        block_size=block_size,
        num_blocks=limits.num_blocks,
        bytes_per_block=0,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kv_cache_sizing="no cache: prompts are computed whole",
        dtype=dtype,
        kv_cache_dtype=dtype,
        kernels="torch, each prompt alone",
        pooler=end.pooler,
    )
    return Worker(runner, description)
