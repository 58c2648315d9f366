"""Loads a model directory. If the architecture has no native code, transformers loads the model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from services.worker.backends.kernels import Kernels
from services.worker.backends.ranks import ALONE, Ranks
from services.worker.models import config as model_config
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder, attention_layers
from services.worker.models.errors import UnsupportedModel
from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.files.json_file import read_json_object
from services.worker.models.lora.reader import LoraReader
from services.worker.models.mlp import is_static
from services.worker.models.model import LoadedModel, LoadOptions, log_loading, resolve_dtype
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.models.rope import RopeType
from services.worker.models.shard import Shard
from services.worker.models.stage import layers_of_stage
from services.worker.models.suitability.check import is_native
from services.worker.models.suitability.transformers_rules import check_decoder
from services.worker.models.weights import Progress, load_weights


def load_model(
    checkpoint: Checkpoint,
    options: LoadOptions,
    kernels: Kernels,
    progress: Progress,
    ranks: Ranks = ALONE,
    wait_for_ranks: Callable[[], None] = lambda: None,
) -> LoadedModel:
    """Reads configuration and weights. With several `ranks`, reads this rank's part of the weights.

    `wait_for_ranks` waits, without a deadline, until every rank has called it. It is called before
    the ranks compute something together, because some ranks may read longer than others. Raises
    ModelError if the model cannot be served.
    """
    directory = checkpoint.directory
    name = model_config.read_architecture(directory)
    if is_native(name, pools=options.pooling is not None):
        loaded = _load_natively(checkpoint, options, kernels, progress, ranks)
    elif options.quantization is not QuantizationSetting.AUTO:
        asked = f"quantization {options.quantization.value}"
        problem = f"{asked}: architecture {name} has no native code"
        raise UnsupportedModel(directory / "config.json", problem)
    else:
        check_decoder(read_json_object(directory / "config.json"), directory / "config.json")
        # Imported only for these models, because importing transformers takes seconds and a hundred
        # megabytes.
        from services.worker.models.from_transformers.model import load_transformers_model  # noqa: PLC0415

        loaded = load_transformers_model(checkpoint, options, kernels, ranks, wait_for_ranks)
        progress(1, 1)
    return without_idle_windows(loaded)


def without_idle_windows(loaded: LoadedModel) -> LoadedModel:
    """Returns the model without attention windows that are as long as its longest sequence or
    longer, because they have no effect.
    """
    attention = tuple(
        replace(x, window=None) if x.window and x.window >= loaded.max_model_len else x
        for x in loaded.attention
    )
    return replace(loaded, attention=attention)


def native_max_model_len(config: ModelConfig, options: LoadOptions, path: Path) -> int:
    """The maximum length of a sequence of a native model. `path` is its config.json. Raises
    ModelConfigError if `options.max_model_len` exceeds what the model supports.
    """
    longest, pooling = config.rope.max_model_len, options.pooling
    default = min(longest, config.rope.max_position_embeddings)
    if pooling is not None and pooling.max_seq_length is not None:
        default = min(default, pooling.max_seq_length)
    return model_config.resolve_max_model_len(options.max_model_len, default, longest, path)


def _load_natively(
    checkpoint: Checkpoint, options: LoadOptions, kernels: Kernels, progress: Progress, ranks: Ranks
) -> LoadedModel:
    directory = checkpoint.directory
    config, pooling = model_config.read_model_config(directory), options.pooling
    if pooling is not None:  # class scores are not capped
        config = replace(config, logits_softcap=None)
    max_model_len = native_max_model_len(config, options, directory / "config.json")
    dtype = resolve_dtype(options.dtype, config.checkpoint_dtype, has_bfloat16=kernels.has_bfloat16)
    log_loading(config.architecture.value, directory, dtype)
    stage = layers_of_stage(checkpoint, config.num_layers, options.stage, options.num_stages)
    weights = load_weights(
        *(config, checkpoint, dtype, kernels, progress, ranks, pooling, stage), options.quantization
    )
    own = Shard(ranks.rank, ranks.size).config(config)
    layers = config.layers[stage.start : stage.stop]
    return LoadedModel(
        model=Decoder(replace(own, layers=layers), weights, kernels, max_model_len),
        architecture=config.architecture.value,
        dtype=dtype,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        max_model_len=max_model_len,
        eos_token_ids=config.eos_token_ids,
        attention=attention_layers(own),
        rope_length=max_model_len if config.rope.rope_type is RopeType.DYNAMIC else 0,
        is_static=all(is_static(layer.mlp) for layer in weights.layers),
        stage=None if stage.is_whole else stage,
        lora=LoraReader(config, Shard(ranks.rank, ranks.size), stage, dtype, kernels),
    )
