"""Loads a draft model in addition to the target model."""

from pathlib import Path

from services.worker.backends.attention import AttentionShape
from services.worker.backends.device import dtype_name
from services.worker.backends.out_of_memory import memory_for
from services.worker.core.fingerprint import model_fingerprint
from services.worker.models.config import read_model_config
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.load import load_model
from services.worker.models.model import LoadOptions
from services.worker.parts.progress import progress_logger
from services.worker.parts.rank_setup import RankSetup
from services.worker.parts.refusals import refuse_draft_model
from services.worker.platforms.interface import DraftModelParts, RunnerParts


def load_draft_model(setup: RankSetup, parts: RunnerParts, directory: Path) -> DraftModelParts:
    """The draft model in a directory, or this rank's part of it, with the shape of its cache.

    It is divided among the ranks like the target model, and the same setting determines its data
    type. Its maximum sequence length is the target model's limit or its own limit, whichever is
    shorter. Raises NoSpeculation if the draft model cannot draft for the model of `parts`,
    ModelError and NotEnoughMemory.
    """
    refuse_draft_model(setup, parts, directory)
    checkpoint = open_checkpoint(directory, setup.platform.torch_device)
    longest = read_model_config(directory).rope.max_model_len
    options = LoadOptions(
        min(longest, parts.loaded.max_model_len), setup.platform.dtype(setup.settings.dtype)
    )
    weights = f"the weights of the draft model ({checkpoint.num_bytes / 2**20:.0f} MiB)"
    with memory_for(weights, "use a machine with more, or a smaller draft model"):
        layer_read = progress_logger("loading layers of the draft model", setup.checkpoint_reached)
        loaded = load_model(checkpoint, options, parts.kernels, layer_read, setup.ranks)
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
        checkpoint, shape.block_size, dtype_name(loaded.dtype), loaded.rope_length
    )
    return DraftModelParts(loaded, shape, group, fingerprint)
