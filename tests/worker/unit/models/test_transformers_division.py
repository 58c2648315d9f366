"""Models that transformers runs are divided among ranks, or refused with one sentence."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Starcoder2Config,
)

from services.worker.backends.attention import AttentionLayer
from services.worker.backends.ranks import Ranks
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.models.config import DtypeSetting
from services.worker.models.errors import UnsupportedModel
from services.worker.models.files.checkpoint import Checkpoint, TensorReader, open_checkpoint
from services.worker.models.from_transformers.checkpoint import load_checkpoint
from services.worker.models.from_transformers.division import Division
from services.worker.models.from_transformers.model import read_transformers_config
from services.worker.models.load import load_model
from services.worker.models.model import LoadedModel, LoadOptions, ModelInput
from services.worker.parallel.group import Timeouts
from tests.worker.rank_threads import RankThread, on_ranks

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 48, "init_std": 0.3}
NUM_TOKENS = 20

DIVIDED: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "heads of keys and values for each rank": (GraniteConfig, {}),
    "one head of keys and values for all": (GraniteConfig, {"num_key_value_heads": 1}),
    "more of them on one rank": (GraniteConfig, {"num_key_value_heads": 3}),
    "a tied head": (OPTConfig, {**OPT, "tie_word_embeddings": True}),
    "a head and an MLP of odd width": (
        Starcoder2Config,
        {"vocab_size": 41, "intermediate_size": 63, "sliding_window": None},
    ),
    "projections in one, outputs whole": (Phi3Config, {}),
    "projections in one, by heads": (GPTNeoXConfig, {}),
    "norms over all heads": (Olmo2Config, {}),
}
REFUSED: dict[str, tuple[type[PretrainedConfig], dict[str, Any], int, str]] = {
    "too many ranks": (
        GraniteConfig,
        {},
        8,
        "6 attention heads with 2 heads of keys and values cannot be divided over 8 ranks: "
        "tensor_parallel_size may be 2 or less, or a multiple of 2 up to 6",
    ),
    "norms over heads that do not divide": (
        Olmo2Config,
        {},
        4,
        "Olmo2ForCausalLM needs equal parts of model.layers.0.self_attn.q_norm on all ranks, and 4 "
        "ranks cannot divide 6 equally",
    ),
    "experts": (
        OlmoeConfig,
        {"num_experts": 2},
        2,
        "style 'packed_colwise' of model.layers.0.mlp.",
    ),
    "no plan": (
        GPT2Config,
        {},
        2,
        "has no tensor-parallel plan in transformers, so it cannot be divided among ranks",
    ),
    "a plan for its head alone": (
        HunYuanDenseV1Config,
        {"head_dim": 8},
        2,
        "has no tensor-parallel plan in transformers, so it cannot be divided among ranks",
    ),
}


def save(directory: Path, config_class: type[PretrainedConfig], changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory)
    return model.eval()


def load(
    directory: Path, ranks: Ranks, wait_for_ranks: Callable[[], Any] = lambda: None
) -> LoadedModel:
    checkpoint, options = open_checkpoint(directory), LoadOptions(None, DtypeSetting.AUTO)
    return load_model(checkpoint, options, TorchKernels(), lambda *_: None, ranks, wait_for_ranks)


@dataclass(frozen=True)
class Causal:
    layers: tuple[AttentionLayer, ...]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: object
    ) -> torch.Tensor:
        assert (query.shape[1], key.shape[1]) == (
            self.layers[layer].num_heads,
            self.layers[layer].num_kv_heads,
        )
        heads = (x.transpose(0, 1) for x in (query, key, value))
        scale = self.layers[layer].scale
        attended = F.scaled_dot_product_attention(
            *heads, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended.transpose(0, 1).flatten(1)


@torch.inference_mode()
def logits_of(loaded: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    ids = positions = torch.arange(NUM_TOKENS)
    model, attention = loaded.model, Causal(loaded.attention)
    _, told = model.forward(ModelInput(ids, positions, attention))
    _, embedded = model.forward(ModelInput(ids * 0, positions, attention, model.embed(ids)))
    assert told is not None
    assert embedded is not None
    return told, embedded


@pytest.mark.parametrize("what", DIVIDED)
def test_two_ranks_give_the_logits_of_the_whole_model(tmp_path: Path, what: str) -> None:
    whole: PreTrainedModel = save(tmp_path, *DIVIDED[what])

    def work(thread: RankThread) -> tuple[torch.Tensor, torch.Tensor]:
        return logits_of(load(tmp_path, thread.ranks))

    with torch.inference_mode():
        expected = whole(input_ids=torch.arange(NUM_TOKENS)[None]).logits[0]
    for told, embedded in on_ranks(2, work):
        torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(told, embedded)


def test_ranks_wait_for_a_rank_that_reads_longer(tmp_path: Path) -> None:
    save(tmp_path, GraniteConfig, {})

    def work(thread: RankThread) -> int:
        ranks = thread.ranks
        time.sleep(1.5 * ranks.rank)
        return load(tmp_path, ranks, lambda: thread.group.gather("loaded", "")).vocab_size

    assert on_ranks(2, work, Timeouts(join_seconds=20, collective_seconds=1)) == [40, 40]


class OneOf:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


class CountingCheckpoint(Checkpoint):
    @contextmanager
    def open(self) -> Iterator[TensorReader]:
        with super().open() as reader:
            yield reader
            READ.append(reader.num_bytes)


READ: list[int] = []
WHOLE_ON_EACH_RANK = ("embed", "norm", "out_proj.bias", "fc2.bias", "dense", "4h_to_h")


@pytest.mark.parametrize("kind", ["opt", "olmo2"])
def test_a_rank_reads_its_part_alone(tmp_path: Path, kind: str) -> None:
    save(tmp_path, *((OPTConfig, OPT) if kind == "opt" else (Olmo2Config, {})))
    plain = open_checkpoint(tmp_path)
    division: Any = Division(tmp_path, OneOf(1, 2))
    checkpoint = CountingCheckpoint(plain.directory, plain.tensors)
    load_checkpoint(checkpoint, read_transformers_config(tmp_path), torch.float32, division)
    assert READ.pop() == sum(
        tensor.num_bytes // (1 if any(part in name for part in WHOLE_ON_EACH_RANK) else 2)
        for name, tensor in plain.tensors.items()
    )


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_cannot_be_divided_are_refused(tmp_path: Path, what: str) -> None:
    config_class, changes, size, problem = REFUSED[what]
    save(tmp_path, config_class, changes)
    ranks: Any = OneOf(0, size)
    with pytest.raises(UnsupportedModel) as caught:
        load(tmp_path, ranks)
    assert problem in caught.value.message
