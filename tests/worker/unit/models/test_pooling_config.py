"""The pooling settings of a model directory. Unsupported ones are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.request.pooling import PoolingTask, PoolingType
from services.worker.models.errors import ModelError
from services.worker.models.pooling_config import Activation, RunnerSetting, read_pooling
from services.worker.models.suitability.check import takes_whole_prompts

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}


def write(directory: Path, architecture: str, **config: Any) -> None:
    whole = {"architectures": [architecture], **config}
    (directory / "config.json").write_text(json.dumps(whole))


def write_modules(directory: Path, *modules: dict[str, str], **pooling: Any) -> None:
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("architecture", "runner", "pools"),
    [
        ("LlamaForCausalLM", RunnerSetting.AUTO, False),
        ("LlamaForCausalLM", RunnerSetting.POOLING, True),
        ("LlamaModel", RunnerSetting.AUTO, True),
        ("BertForMaskedLM", RunnerSetting.AUTO, True),
        ("LlamaModel", RunnerSetting.GENERATE, False),
    ],
)
def test_a_model_without_modules_pools_by_its_architecture(
    tmp_path: Path, architecture: str, runner: RunnerSetting, pools: bool
) -> None:
    write(tmp_path, architecture)
    assert (read_pooling(tmp_path, runner) is not None) is pools


def test_modules_say_how_states_are_pooled(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3ForCausalLM", matryoshka_dimensions=[4, 8])
    write_modules(
        tmp_path, TRANSFORMER, POOLING, pooling_mode_mean_tokens=True, pooling_mode_cls_token=False
    )
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 77}))
    found = read_pooling(tmp_path, RunnerSetting.AUTO)
    assert found is not None
    assert (found.pooling_type, found.activation) == (PoolingType.MEAN, Activation.NONE)
    assert (found.max_seq_length, found.matryoshka_dimensions) == (77, (4, 8))
    write_modules(tmp_path, TRANSFORMER, POOLING, NORMALIZE, pooling_mode="lasttoken")
    found = read_pooling(tmp_path, RunnerSetting.AUTO)
    assert found is not None
    assert (found.pooling_type, found.activation) == (PoolingType.LAST, Activation.NORMALIZE)


@pytest.mark.parametrize(
    ("config", "num_labels", "activation"),
    [
        ({"id2label": {"0": "relevant"}}, 1, Activation.SIGMOID),
        ({}, 2, Activation.SOFTMAX),
        (
            {
                "id2label": {"0": "a"},
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            1,
            Activation.NONE,
        ),
    ],
)
def test_classes_and_their_activation_are_read_from_the_config(
    tmp_path: Path, config: dict[str, Any], num_labels: int, activation: Activation
) -> None:
    write(tmp_path, "BertForSequenceClassification", **config)
    found = read_pooling(tmp_path, RunnerSetting.AUTO)
    assert found is not None
    assert (found.task, found.num_labels) == (PoolingTask.CLASSIFY, num_labels)
    assert found.activation is activation


@pytest.mark.parametrize(
    ("modules", "pooling", "named"),
    [
        ([TRANSFORMER, {"type": "sentence_transformers.models.Dense"}], {}, "models.Dense"),
        ([POOLING], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (
            [POOLING],
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "pooling_mode_cls_token, pooling_mode_mean_tokens",
        ),
        ([POOLING], {}, "no pooling mode"),
        ([POOLING], {"pooling_mode": "max"}, "'max'"),
    ],
)
def test_unsupported_pooling_is_refused_by_name(
    tmp_path: Path, modules: list[dict[str, str]], pooling: dict[str, Any], named: str
) -> None:
    write(tmp_path, "BertModel")
    write_modules(tmp_path, *modules, **pooling)
    with pytest.raises(ModelError, match=named):
        read_pooling(tmp_path, RunnerSetting.AUTO)


def test_which_models_take_whole_prompts(tmp_path: Path) -> None:
    for name, config, whole in (
        ("BertModel", {}, True),
        ("LlamaModel", {}, False),
        ("Gemma3TextModel", {"use_bidirectional_attention": True}, True),
        ("GPTNeoXForCausalLM", {}, False),
        ("GPTNeoXModel", {}, True),
        ("Qwen3ForSequenceClassification", {}, False),
    ):
        write(tmp_path, name, **config)
        assert takes_whole_prompts(tmp_path) is whole, name
    write(tmp_path, "Qwen2Model", is_causal=False)
    with pytest.raises(ModelError, match="is_causal"):
        takes_whole_prompts(tmp_path)
