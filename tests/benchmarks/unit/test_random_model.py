"""transformers loads the random model, with the shape that its name states."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.random_model import SIZES, tensor_dims, write_model
from tests.benchmarks.programs import run_program


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random-15m")
    write_model(SIZES["15m"], path)
    return path


def test_transformers_loads_it_and_finds_every_tensor(directory: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert 15.0e6 < model.num_parameters() < 15.5e6
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, 32000)
    assert torch.isfinite(logits).all()


def test_its_tokenizer_spells_bytes_and_knows_the_whole_vocabulary(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "Grüße, 水! <|extra_7|>\n\ttab"
    token_ids = tokenizer(text)["input_ids"]
    assert len(token_ids) == len(text.encode())
    assert max(token_ids) < 256
    assert tokenizer.decode(token_ids) == text
    assert len(tokenizer) == 32000
    assert tokenizer.eos_token_id == 256
    assert tokenizer.decode([257, 31999]) == "<|extra_0|><|extra_31742|>"
    chat = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "user: Hi\nassistant: "


def test_another_process_writes_the_same_bytes(directory: Path, tmp_path: Path) -> None:
    done = run_program("common.random_model", "--size", "15m", "--out", tmp_path)
    assert "15.2M parameters" in done.stdout
    names = sorted(path.name for path in directory.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()


@pytest.mark.parametrize(("size", "millions"), [("15m", 15.2), ("135m", 134.5), ("1.1b", 1100.0)])
def test_each_size_has_the_parameters_of_its_name(size: str, millions: float) -> None:
    found = sum(torch.Size(dims).numel() for _, dims in tensor_dims(SIZES[size]))
    assert found / 1e6 == pytest.approx(millions, abs=0.1)
