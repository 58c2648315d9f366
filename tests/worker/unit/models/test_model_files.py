"""A wrong or damaged model directory is refused with one sentence that names the file."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.worker.backends.torch.kernels import TorchKernels
from services.worker.models.config import DtypeSetting, read_model_config, resolve_max_model_len
from services.worker.models.errors import (
    ModelConfigError,
    ModelError,
    ModelFileError,
    ModelTensorError,
    UnsupportedModel,
)
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.load import load_model
from services.worker.models.model import LoadOptions
from tests.tiny_models import edit_config, save_tiny_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, "llama")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, "llama", shard_bytes=60_000)
    return tmp_path


def load(directory: Path) -> None:
    options = LoadOptions(None, DtypeSetting.FLOAT32)
    load_model(open_checkpoint(directory), options, TorchKernels(), lambda *_: None)


def refusal(directory: Path, kind: type[ModelError]) -> str:
    """The error message for the directory. It is one line that begins with a file's path."""
    with pytest.raises(kind) as caught:
        load(directory)
    sentence = caught.value.message
    assert "\n" not in sentence
    assert sentence.startswith(f"{directory}/")
    return sentence.removeprefix(f"{directory}/")


def test_sound_directory_loads_with_progress_by_layer(directory: Path) -> None:
    seen = []
    loaded = load_model(
        open_checkpoint(directory),
        LoadOptions(None, DtypeSetting.AUTO),
        TorchKernels(),
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]
    assert (loaded.dtype, loaded.max_model_len) == (torch.float32, 512)


def test_a_missing_config_is_named(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert refusal(directory, ModelFileError) == "config.json: the file is missing"


def test_a_config_that_is_no_json_is_named(directory: Path) -> None:
    (directory / "config.json").write_text('{"architectures": [')
    assert refusal(directory, ModelFileError).startswith(
        "config.json: the file is not valid JSON: "
    )


def test_config_that_is_no_object(directory: Path) -> None:
    (directory / "config.json").write_text("[]")
    assert refusal(directory, ModelFileError) == (
        "config.json: the file must hold a JSON object, not list"
    )


def test_an_architecture_that_is_no_decoder_is_refused(directory: Path) -> None:
    edit_config(directory, architectures=["GPT2LMHeadModel"])
    assert refusal(directory, UnsupportedModel) == (
        "config.json: architecture GPT2LMHeadModel is not a decoder that can be served"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": "large"}, "hidden_size must be a whole number of 1 or more, not 'large'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 70_000}, "num_hidden_layers must be 65536 or less, not 70000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantized weights"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config: weights quantized by 'bitsandbytes' are not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "rope_type 'longrope' is not supported",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"architectures": []}, "architectures must name one architecture"),
    ],
)
def test_wrong_value_in_config(directory: Path, changes: dict[str, object], problem: str) -> None:
    edit_config(directory, **changes)
    assert refusal(directory, ModelConfigError).startswith(f"config.json: {problem}")


def test_length_beyond_the_model_is_refused(directory: Path) -> None:
    config = read_model_config(directory)
    with pytest.raises(ModelConfigError, match=r"max_model_len is 513, but .* 512 tokens"):
        resolve_max_model_len(513, 512, config.rope.max_model_len, directory / "config.json")


def test_missing_weights_are_named_with_both_forms(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert refusal(directory, ModelFileError) == (
        "model.safetensors: the file is missing, and so is model.safetensors.index.json"
    )


def test_weights_that_are_cut_short_are_refused_with_their_sizes(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    assert refusal(directory, ModelFileError) == (
        f"model.safetensors: the file is incomplete: its header describes {len(content)} "
        f"bytes, but the file has {len(content) - 1000}"
    )


@pytest.mark.parametrize("size", [0, 5, 200])
def test_weights_cut_within_the_header(directory: Path, size: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert refusal(directory, ModelFileError) == (
        f"model.safetensors: the file is incomplete: it ends after {size} bytes"
    )


def test_a_file_of_another_format_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"x" * 100)
    assert refusal(directory, ModelFileError).startswith(
        "model.safetensors: the header is not valid JSON"
    )


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"[" * 100_000, "the header is not valid JSON"),
        (
            b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
            "the header is not a valid header of a safetensors file",
        ),
    ],
)
def test_a_header_with_endless_values_is_refused(
    directory: Path, header: bytes, problem: str
) -> None:
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (directory / "model.safetensors").write_bytes(content)
    assert refusal(directory, ModelFileError).startswith(f"model.safetensors: {problem}")


def change_tensors(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.pop("model.norm.weight"))
    assert refusal(directory, ModelTensorError) == (
        "model.safetensors: tensor model.norm.weight is missing"
    )


def test_many_missing_tensors_are_summed_up(directory: Path) -> None:
    def drop_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            del tensors[name]

    change_tensors(directory, drop_layer)
    assert refusal(directory, ModelTensorError) == (
        "model.safetensors: tensors model.layers.1.input_layernorm.weight, "
        "model.layers.1.mlp.down_proj.weight and 7 more are missing"
    )


def test_a_tensor_that_is_not_the_architectures_is_refused(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.update(surplus=torch.zeros(3)))
    assert refusal(directory, ModelTensorError) == (
        "model.safetensors: tensor surplus is not part of this architecture"
    )


@pytest.mark.parametrize("differs", [True, False])
def test_a_stored_head_that_differs_from_the_tied_embedding_is_used(
    tmp_path: Path, differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama_tied")
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding.flip(0).contiguous() if differs else embedding.clone()
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    options = LoadOptions(None, DtypeSetting.FLOAT32)
    loaded = load_model(open_checkpoint(tmp_path), options, TorchKernels(), lambda *_: None)
    token_ids = torch.tensor([[5, 9, 200]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    states = theirs.base_model(token_ids).last_hidden_state[0].detach()
    expected = theirs(token_ids).logits[0].detach()
    torch.testing.assert_close(loaded.model.compute_logits(states), expected, atol=1e-4, rtol=1e-4)
    assert any("tie_word_embeddings is true" in told for told in caplog.messages) is differs


def test_a_wrong_shape_is_refused_with_both_shapes(directory: Path) -> None:
    edit_config(directory, intermediate_size=64)
    assert refusal(directory, ModelTensorError) == (
        "model.safetensors: tensor model.layers.0.mlp.gate_proj.weight has shape [96, 48], "
        "but config.json describes [64, 48]"
    )


def test_a_data_type_that_is_not_read_is_refused(directory: Path) -> None:
    change_tensors(
        directory,
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int32)}),
    )
    assert refusal(directory, ModelTensorError) == (
        "model.safetensors: tensor model.norm.weight has data type I32, which is not supported"
    )


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert refusal(sharded, ModelFileError) == f"{shard.name}: the file is missing"


def test_an_index_that_is_no_json_is_named(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{")
    assert refusal(sharded, ModelFileError).startswith(
        "model.safetensors.index.json: the file is not valid JSON"
    )


def test_index_that_names_a_tensor_the_shard_lacks(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, shard = next(iter(index["weight_map"].items()))
    other = next(file for file in index["weight_map"].values() if file != shard)
    index["weight_map"][name] = other
    path.write_text(json.dumps(index))
    assert refusal(sharded, ModelTensorError) == f"{other}: tensor {name} is missing"


def test_index_that_leads_out_of_the_directory(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    assert re.search("'../elsewhere.safetensors', which is no", refusal(sharded, ModelFileError))


def add_tensors(file: Path, **tensors: torch.Tensor) -> None:
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["llama", "opt"], ids=["native", "by transformers"])
@pytest.mark.parametrize("stale_in", [0, -1], ids=["in the first shard", "in the last shard"])
def test_the_index_says_which_of_two_tensors_of_a_name_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, stale_in: int
) -> None:
    model = save_tiny_model(tmp_path, kind, shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    stale = sorted(tmp_path.glob("model-*.safetensors"))[stale_in]
    copies = {
        name: torch.full_like(tensor, 7.0)
        for name, tensor in model.state_dict().items()
        if index.get(name, stale.name) != stale.name
    }
    add_tensors(stale, **copies, unlisted=torch.ones(1), other=torch.ones(1))
    options = LoadOptions(None, DtypeSetting.FLOAT32)
    checkpoint = open_checkpoint(tmp_path)
    assert {name: tensor.file.name for name, tensor in checkpoint.tensors.items()} == index
    assert [record.getMessage() for record in caplog.records] == [
        f"only the tensors in the index {tmp_path}/model.safetensors.index.json are read: tensors "
        "other, unlisted are not listed in the index"
    ]
    loaded = load_model(checkpoint, options, TorchKernels(), lambda *_: None)
    expected = model.get_input_embeddings().weight
    assert loaded.model.embed(torch.arange(5)).equal(expected[:5].detach())


def test_an_index_goes_before_a_stray_single_file(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"stale": torch.ones(1)}, sharded / "model.safetensors")
    load(sharded)
    assert [record.getMessage() for record in caplog.records] == [
        f"only the tensors in the index {sharded}/model.safetensors.index.json are read: the index "
        "does not list model.safetensors"
    ]
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    shard.unlink()
    assert refusal(sharded, ModelFileError) == (
        f"{shard.name}: the file is missing; to read model.safetensors instead, remove "
        "model.safetensors.index.json"
    )


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (("pytorch_model.bin", "training_args.bin"), "pytorch_model.bin: the weights are pickles"),
        (
            (
                "pytorch_model-00001-of-00002.bin",
                "pytorch_model-00002-of-00002.bin",
                "pytorch_model.bin.index.json",
            ),
            "pytorch_model-00001-of-00002.bin: the weights are pickles",
        ),
        (("consolidated.00.pth", "params.json"), "consolidated.00.pth: the weights are pickles"),
        (("tf_model.h5",), "tf_model.h5: weights in this format are not supported"),
        (
            ("model-00001-of-00002.safetensors",),
            "model.safetensors: the file is missing, and no model.safetensors.index.json names the "
            "tensors of model-00001-of-00002.safetensors",
        ),
    ],
)
def test_weights_in_another_form_are_named(
    directory: Path, files: tuple[str, ...], problem: str
) -> None:
    (directory / "model.safetensors").unlink()
    for name in files:
        (directory / name).touch()
    assert refusal(directory, ModelError).startswith(problem)


def test_the_command_that_converts_a_pickle_makes_a_directory_that_is_served(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = directory / "model.safetensors"
    torch.save(load_file(weights), directory / "pytorch_model.bin")
    weights.unlink()
    _, _, command = refusal(directory, UnsupportedModel).partition('python -c "')
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    exec(command.removesuffix('"'), {})
    load(directory)


@pytest.mark.parametrize("kind", ["llama", "opt"], ids=["native", "by transformers"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ([2, 320], "eos_token_id must be below vocab_size 320"),
        (-1, "eos_token_id must be a token id or a list of them, not -1"),
    ],
)
def test_an_eos_token_outside_the_vocabulary_is_refused_with_its_file(
    tmp_path: Path, kind: str, file: str, token: object, problem: str
) -> None:
    save_tiny_model(tmp_path, kind)
    (tmp_path / "generation_config.json").write_text("{}")
    values = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**values, "eos_token_id": token}))
    assert refusal(tmp_path, ModelConfigError) == f"{file}: {problem}"
