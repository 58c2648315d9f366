"""The check whether a model can be served reads its files, and does not need torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.worker.models.errors import ModelError
from services.worker.models.pooling_config import RunnerSetting
from services.worker.models.suitability.check import check_configuration, check_model
from tests.tiny_models import TINY_MODELS

ROOT = Path(__file__).parents[4]
TEXT = {"vocab_size": 40}


def write_config(directory: Path, architecture: str, **values: Any) -> None:
    config = {"architectures": [architecture], **values}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_supported_models_pass_the_check(tmp_path: Path, kind: str) -> None:
    config = TINY_MODELS[kind].config
    config.save_pretrained(tmp_path)
    names = {**json.loads((tmp_path / "config.json").read_text())}
    own = type(config).__name__.removesuffix("Config").removesuffix("Text")
    (tmp_path / "config.json").write_text(
        json.dumps({**names, "architectures": [f"{own}ForCausalLM"]})
    )
    check_configuration(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "values", "problem"),
    [
        ("Mamba2ForCausalLM", {"model_type": "mamba2"}, "has no attention layer"),
        ("xLSTMForCausalLM", {"model_type": "xlstm"}, "has no attention layer"),
        ("RwkvForCausalLM", {"model_type": "rwkv"}, "does not use transformers'"),
        ("GPTJForCausalLM", {"model_type": "gptj"}, "does not use transformers'"),
        ("FalconForCausalLM", {"model_type": "falcon", "alibi": True}, "(ALiBi)"),
        (
            "LlavaForConditionalGeneration",
            {"model_type": "llava", "vision_config": {}, **TEXT},
            "processes more than text (vision_config)",
        ),
        (
            "Gemma3ForConditionalGeneration",
            {"model_type": "gemma3", "vision_config": {}, **TEXT},
            "processes more than text (vision_config)",
        ),
        ("ViTModel", {"model_type": "vit"}, "does not process text: vocab_size is missing"),
        (
            "WhisperForConditionalGeneration",
            {"model_type": "whisper", "is_encoder_decoder": True, **TEXT},
            "has a decoder in addition to its encoder",
        ),
        ("NewForCausalLM", {"model_type": "new"}, "is unknown to Stepwell and to transformers"),
        (
            "NewForCausalLM",
            {"model_type": "new", "auto_map": {"AutoModel": "modeling.New"}},
            "; Stepwell never runs the code that auto_map names",
        ),
        ("OPTForCausalLM", {}, "model_type is missing"),
        ("BertModel", {"model_type": "bert", **TEXT}, ""),
    ],
)
def test_the_check_finds_the_reason_in_the_configuration_alone(
    tmp_path: Path, architecture: str, values: dict[str, Any], problem: str
) -> None:
    write_config(tmp_path, architecture, **values)
    if not problem:
        check_configuration(tmp_path)
        return
    with pytest.raises(ModelError) as caught:
        check_configuration(tmp_path)
    assert caught.value.message.startswith(f"{tmp_path}/config.json: ")
    assert problem in caught.value.message


def test_an_encoder_does_not_generate(tmp_path: Path) -> None:
    write_config(tmp_path, "BertModel", model_type="bert", vocab_size=40)
    with pytest.raises(ModelError, match="BertModel is not a decoder that can be served"):
        check_configuration(tmp_path, runner=RunnerSetting.GENERATE)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ((), "config.json: the file is missing"),
        (("adapter_config.json",), "this is an adapter: serve its base model"),
        (("model_index.json",), "a pipeline of diffusers"),
        (("snapshots",), "name the model as OWNER/NAME"),
    ],
)
def test_a_directory_that_is_no_model_is_named(
    tmp_path: Path, files: tuple[str, ...], problem: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelError) as caught:
        check_model(tmp_path)
    assert problem in caught.value.message


def test_neither_the_check_nor_the_settings_import_torch() -> None:
    program = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from services.worker.models.suitability.check import check_model
import services.worker.__main__
check_model(Path("models/demo"))
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
