"""Checks that a model directory can be served, before torch is imported and weights are read."""

from pathlib import Path

from services.worker.models.architecture import Architecture, native_architecture
from services.worker.models.config import read_architecture, read_model_config
from services.worker.models.errors import UnsupportedModel
from services.worker.models.files.json_file import read_json_object
from services.worker.models.files.other_weights import no_configuration
from services.worker.models.files.tensor_files import find_tensors
from services.worker.models.pooling_config import RunnerSetting, generates, read_pooling
from services.worker.models.shard import check_divisible, check_stages
from services.worker.models.suitability.transformers_rules import check_decoder, check_whole


def check_model(
    directory: Path,
    num_ranks: int = 1,
    num_stages: int = 1,
    runner: RunnerSetting = RunnerSetting.AUTO,
    *,
    needs_weights: bool = True,
) -> None:
    """Raises the errors of `check_configuration`. With `needs_weights`, also raises ModelError if
    weight files are missing, damaged or of another format.
    """
    if not (directory / "config.json").exists():
        raise no_configuration(directory)
    check_configuration(directory, num_ranks, num_stages, runner)
    if needs_weights:
        find_tensors(directory)


def check_configuration(
    directory: Path,
    num_ranks: int = 1,
    num_stages: int = 1,
    runner: RunnerSetting = RunnerSetting.AUTO,
) -> None:
    """Raises ModelError if the configuration is wrong, if the architecture is not supported, or if
    the model cannot be divided into `num_ranks` for tensor parallelism or into `num_stages`.
    """
    name, pooling = read_architecture(directory), read_pooling(directory, runner)
    path = directory / "config.json"
    if num_stages > 1 and pooling is not None:
        problem = "a pooling model cannot be divided into pipeline stages"
        raise UnsupportedModel(path, f"{problem}: pipeline_parallel_size must be 1")
    if pooling is not None and takes_whole_prompts(directory):
        check_whole(read_json_object(path), path)
    elif is_native(name, pools=pooling is not None):
        config = read_model_config(directory)
        check_divisible(config.num_heads, config.num_kv_heads, num_ranks, directory)
        check_stages(config.num_layers, num_stages, directory)
    else:
        check_decoder(read_json_object(path), path)
        if num_stages > 1:
            raise UnsupportedModel(
                path,
                f"architecture {name} has no native code in Stepwell, and models that transformers "
                "computes cannot be divided into pipeline stages: pipeline_parallel_size must be 1",
            )


def is_native(name: str, *, pools: bool = False) -> bool:
    """Whether an architecture has native code. If the model pools, its architecture may also be one
    without a head, or with a head for classes.
    """
    if pools:
        return native_architecture(name) is not None
    return name in {native.value for native in Architecture}


def takes_whole_prompts(directory: Path) -> bool:
    """Whether a pooling model is computed by the library transformers, one whole prompt at a time.

    This is true if config.json sets `use_bidirectional_attention`, or if the architecture is
    neither native nor a decoder with a language model's head. Raises ModelError, for example if
    config.json enables attention to later tokens in a native decoder.
    """
    path, name = directory / "config.json", read_architecture(directory)
    config = read_json_object(path)
    if config.get("use_bidirectional_attention"):
        return True
    if native_architecture(name) is not None:
        if config.get("is_causal") is False:
            raise UnsupportedModel(
                path, f"is_causal false: attention to later tokens is not supported for {name}"
            )
        return False
    return not generates(name)
