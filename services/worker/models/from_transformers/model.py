"""Loads decoders without native code: the library transformers reads them and runs their layers.

Before the worker starts to serve, a model is refused if it is not a decoder, if a layer has no
attention, if it does not use transformers' attention interface, or if its cached keys would change
later.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from services.worker.backends.attention import AttentionLayer
from services.worker.backends.device import dtype_name
from services.worker.backends.kernels import Kernels
from services.worker.backends.out_of_memory import is_out_of_memory
from services.worker.backends.ranks import Ranks
from services.worker.backends.torch.kernels import torch_has_bfloat16
from services.worker.models.config import check_eos_token_ids, resolve_max_model_len
from services.worker.models.errors import UnsupportedModel
from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.files.json_file import JsonReader, read_json_object
from services.worker.models.from_transformers import checkpoint as transformers_checkpoint
from services.worker.models.from_transformers.checkpoint import (
    max_position_embeddings,
    model_class,
    one_line,
    read_config,
)
from services.worker.models.from_transformers.decoder import ProbedLayers, TransformersDecoder
from services.worker.models.from_transformers.division import Division
from services.worker.models.from_transformers.linear import multiply_alike
from services.worker.models.from_transformers.probe import Refused
from services.worker.models.layer_config import SLIDING
from services.worker.models.model import LoadedModel, LoadOptions, log_loading, resolve_dtype
from services.worker.models.suitability.transformers_rules import check_decoder


def read_transformers_config(directory: Path) -> PretrainedConfig:
    """Returns the configuration as transformers reads it. Raises UnsupportedModel if transformers
    has no code for the model, or if the model is not a decoder.
    """
    return read_config(directory, check_decoder, "the model has no native code in Stepwell, and ")


def load_transformers_model(
    checkpoint: Checkpoint,
    options: LoadOptions,
    kernels: Kernels,
    ranks: Ranks,
    wait_for_ranks: Callable[[], None],
) -> LoadedModel:
    """Loads the decoder, or a rank's part of it, onto the checkpoint's device (see load_model)."""
    directory = checkpoint.directory
    config = read_transformers_config(directory)
    path = directory / "config.json"
    check_eos_token_ids(directory, JsonReader(path, read_json_object(path)), config.vocab_size)
    max_model_len = _max_model_len(config, options, path)
    stored = dtype_name(config.dtype) if isinstance(config.dtype, torch.dtype) else None
    dtype = resolve_dtype(options.dtype, stored, has_bfloat16=torch_has_bfloat16())
    log_loading(f"{(config.architectures or [''])[0]}, run by transformers,", directory, dtype)
    try:
        if ranks.size > 1 and _is_stateful(model_class(config)):
            raise Refused("has recurrent layers, whose states cannot be divided among ranks")
        division = Division(directory, ranks) if ranks.size > 1 else None
        model = transformers_checkpoint.load_checkpoint(checkpoint, config, dtype, division)
        model.to(checkpoint.device)
        _check_model(model)
        if kernels.padded_torch_rows(1) > 1:
            with torch.inference_mode():
                multiply_alike(model)
        wait_for_ranks()
        decoder = TransformersDecoder(model, kernels.padded_torch_rows)
        layers = _probe(decoder, model)
        if _is_stateful(model) and not layers.states:
            raise Refused("keeps a state from token to token outside of supported recurrent layers")
        _check_windows(model, layers.attention, max_model_len)
        if division is not None and division.heads is not None:
            heads = {(x.num_heads, x.num_kv_heads) for x in layers.attention.values()}
            if heads != {division.heads}:
                raise Refused(
                    "computes attention with another number of heads than its tensor-parallel "
                    "plan leaves to a rank"
                )
    except Refused as refusal:
        name = (config.architectures or ["the model"])[0]
        raise UnsupportedModel(
            path, f"{name} {refusal}, and has no native code in Stepwell"
        ) from refusal
    return LoadedModel(
        model=decoder,
        architecture=type(model).__name__,
        dtype=dtype,
        vocab_size=config.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=_intermediate_size(config),
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(config, model),
        attention=tuple(layers.attention.values()),
        states=layers.states,
        is_native=False,
    )


def _max_model_len(config: PretrainedConfig, options: LoadOptions, path: Path) -> int:
    default = longest = max_position_embeddings(config, path)
    if options.pooling is not None and options.pooling.max_seq_length is not None:
        default = min(longest, options.pooling.max_seq_length)
    return resolve_max_model_len(options.max_model_len, default, longest, path)


def _intermediate_size(config: PretrainedConfig) -> int:
    """The width of the widest MLP. Some configurations list one width for each layer."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(size) if isinstance(size, list | tuple) else int(size)


def _eos_token_ids(config: PretrainedConfig, model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model.generation_config, "eos_token_id", None)
    found = config.eos_token_id if generation is None else generation
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _is_stateful(model: object) -> bool:
    return bool(getattr(model, "_is_stateful", False))


def _check_model(model: PreTrainedModel) -> None:
    if any("alibi" in name for name in dir(model.base_model)):
        raise Refused("biases its attention by distance (ALiBi), which is not supported")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise Refused("has no argument position_ids, without which requests cannot share a batch")


@torch.inference_mode()
def _probe(decoder: TransformersDecoder, model: PreTrainedModel) -> ProbedLayers:
    try:
        return decoder.probe(model)
    except Refused:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Refused(f"fails on a test batch of a few tokens ({one_line(error)})") from error


def _check_windows(
    model: PreTrainedModel, layers: Mapping[int, AttentionLayer], max_model_len: int
) -> None:
    config = model.config
    types, problem = getattr(config, "layer_types", None), "does not pass the sliding windows"
    if types and any(
        (types[index] == SLIDING) != (layer.window is not None) for index, layer in layers.items()
    ):
        raise Refused(f"{problem} of its layers to attention")
    window = getattr(config, "sliding_window", None)
    if not types and window is not None and window < max_model_len:
        source = inspect.getsource(inspect.getmodule(type(model)) or type(model))
        only_masks = "create_sliding_window_causal_mask" in source
        if only_masks and all(layer.window is None for layer in layers.values()):
            raise Refused(
                f"{problem} of its layers to attention, so max_model_len may be at most {window}"
            )
    if getattr(config, "attention_chunk_size", None) is not None:
        raise Refused("uses chunked attention (attention_chunk_size), which is not supported")
