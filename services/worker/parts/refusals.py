"""Refuses combinations of settings and model that are incompatible."""

from pathlib import Path

from services.worker.backends.choices import KVCacheDtype
from services.worker.core.errors import NoSpeculation, NoTier
from services.worker.models.config import read_architecture, read_model_config
from services.worker.models.errors import UnsupportedModel
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.models.suitability.check import check_configuration, is_native
from services.worker.parts.rank_setup import RankSetup
from services.worker.platforms.interface import RunnerParts


def refuse_for_whole_prompts(setup: RankSetup) -> None:
    """Raises UnsupportedModel, NoSpeculation or NoTier for settings that are not supported with a
    model that processes whole prompts.
    """
    settings = setup.settings
    config = settings.model / "config.json"
    if setup.ranks.size > 1:
        raise UnsupportedModel(
            config,
            "an encoder cannot be divided among ranks: set --tensor-parallel-size and "
            "--pipeline-parallel-size to 1",
        )
    if settings.quantization is not QuantizationSetting.AUTO:
        asked = f"quantization {settings.quantization.value}"
        raise UnsupportedModel(
            config, f"{asked} is not supported for an encoder, because it has no native code"
        )
    if settings.kv_cache_dtype is not KVCacheDtype.AUTO:
        asked = f"kv_cache_dtype {settings.kv_cache_dtype.value}"
        raise UnsupportedModel(
            config, f"{asked} is not supported for an encoder, because it has no KV cache"
        )
    if settings.enable_lora:
        raise UnsupportedModel(config, "enable_lora: adapters are not supported for an encoder")
    if settings.speculative_config is not None:
        raise NoSpeculation(
            "speculative_config: this model computes vectors and generates no tokens"
        )
    if settings.kv_offloading_size is not None:
        raise NoTier("kv_offloading_size: this model computes whole prompts and has no KV cache")


def refuse_speculation(setup: RankSetup, parts: RunnerParts) -> None:
    """Raises NoSpeculation if the model or its parallelism does not support drafts."""
    if parts.pooler is not None:
        raise NoSpeculation(
            "speculative_config: this model computes vectors and generates no tokens"
        )
    if parts.limits.state_block_sizes:
        raise NoSpeculation(
            "speculative_config: a model with recurrent layers cannot verify drafts"
        )
    if setup.membership.pipeline_parallel_size > 1:
        raise NoSpeculation(
            "speculative_config: pipeline stages cannot verify drafts: set "
            "--pipeline-parallel-size to 1"
        )


def refuse_draft_model(setup: RankSetup, parts: RunnerParts, draft: Path) -> None:
    """Raises NoSpeculation or UnsupportedModel if the draft model in a directory is incompatible
    with the target model. Called before the draft model is loaded.
    """
    if not setup.platform.has_draft_models:
        raise NoSpeculation("speculative_config: a draft model is supported only with --device cpu")
    if None not in parts.limits.windows:
        raise NoSpeculation(
            "speculative_config: a draft model needs KV blocks of all tokens, but every layer of "
            "this model has a sliding window, which frees blocks"
        )
    name = read_architecture(draft)
    if not is_native(name):
        raise NoSpeculation(
            f"speculative_config: model {draft}: architecture {name} has no native code, which a "
            "draft model must have"
        )
    size, own = read_model_config(draft).vocab_size, parts.loaded.vocab_size
    if size != own:
        raise NoSpeculation(
            f"speculative_config: model {draft}: vocab_size is {size}, but the served model has "
            f"{own}"
        )
    check_configuration(draft, setup.ranks.size)


def without_tier(setup: RankSetup, parts: RunnerParts) -> RunnerParts:
    """Takes the place of `with_tier` in a worker without the option `tier`. Returns `parts`
    unchanged. Raises NoTier if the settings ask for a tier of host memory for KV blocks.
    """
    if setup.settings.kv_offloading_size is not None:
        raise NoTier("kv_offloading_size: this worker does not support offloaded blocks")
    return parts
