"""The errors for a directory without supported weights or config.json. They name what is there."""

from pathlib import Path

from services.worker.models.config import read_architecture
from services.worker.models.errors import ModelFileError, UnsupportedModel

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that torch.save writes."""
_OTHER_FORMATS = (".h5", ".msgpack", ".onnx", ".ot", ".npz", ".mlmodel", ".pdparams")
_ADAPTER = "adapter_config.json"
_OTHER_DIRECTORIES = {
    "model_index.json": "a pipeline of diffusers, which generates images",
    "params.json": "a checkpoint in its authors' own format; use the checkpoint in Hugging Face's "
    "format, which the hub has for most models",
    "refs": "a folder of the hub's cache; name the model as OWNER/NAME",
    "snapshots": "a folder of the hub's cache; name the model as OWNER/NAME",
}
"""Describes directories without config.json, by the name of a file or folder in them."""
_OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state", "random_states", "scaler")
"""Prefixes of the names of pickle files that contain no weights."""


def no_weights(directory: Path, single: Path, index_file: str) -> ModelFileError | UnsupportedModel:
    """The error for a directory without the file `single`, an index, or a single GGUF file."""
    names = sorted(path.name for path in directory.iterdir())
    gguf = [name for name in names if name.endswith(".gguf")]
    shards = [name for name in names if name.endswith(".safetensors")]
    pickles = [
        name for name in names if name.endswith(_PICKLES) and not name.startswith(_OF_TRAINING)
    ]
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if gguf:
        return UnsupportedModel(
            directory, f"there are {len(gguf)} GGUF files: give the path of one, such as {gguf[0]}"
        )
    if _ADAPTER in names:
        return UnsupportedModel(directory, _about_adapters(directory))
    if shards:
        return ModelFileError(
            single, f"the file is missing, and no {index_file} names the tensors of {_list(shards)}"
        )
    if pickles:
        return UnsupportedModel(directory / pickles[0], _about_pickles(directory, pickles))
    if others:
        return UnsupportedModel(
            directory / others[0],
            "weights in this format are not supported, only safetensors and GGUF",
        )
    return ModelFileError(single, f"the file is missing, and so is {index_file}")


def no_configuration(directory: Path) -> ModelFileError | UnsupportedModel:
    """The error for a directory without config.json. It names the kind of directory if known."""
    names = {path.name for path in directory.iterdir()}
    if _ADAPTER in names:
        return UnsupportedModel(directory, _about_adapters(directory))
    what = next((what for name, what in _OTHER_DIRECTORIES.items() if name in names), None)
    problem = "the file is missing" if what is None else f"the file is missing: this is {what}"
    return ModelFileError(directory / "config.json", problem)


def _about_adapters(directory: Path) -> str:
    return (
        "this is an adapter: serve its base model with --enable-lora --lora-modules "
        f"NAME={directory}"
    )


def _about_pickles(directory: Path, pickles: list[str]) -> str:
    how = "convert them with the script of the model's authors"
    if pickles[0].startswith("pytorch_model"):
        name = read_architecture(directory)
        how = (
            f'convert them with: python -c "from transformers import {name} as Model; '
            f"Model.from_pretrained('{directory}', dtype='auto').save_pretrained('{directory}')\""
        )
    return (
        "the weights are pickles, which can run any code when they are loaded, and are therefore "
        f"not supported; {how}"
    )


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
