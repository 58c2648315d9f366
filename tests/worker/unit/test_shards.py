"""What a rank reads and holds of a model, and which models cannot be divided."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from services.worker.kernels.torch_kernels import TorchKernels
from services.worker.models.checkpoint import Checkpoint, TensorReader, open_checkpoint
from services.worker.models.config import read_model_config
from services.worker.models.decoder import DecoderWeights
from services.worker.models.errors import UnsupportedModel
from services.worker.models.load import check_configuration
from services.worker.models.loader import load_weights
from services.worker.models.mlp import SummedMlp
from services.worker.models.shard import Shard
from tests.tiny_models import edit_config, save_tiny_model

WHOLE_ON_EACH_RANK = ("embed_tokens", "norm", "mlp.gate.weight", "block_sparse_moe.gate")


class OneOf:
    """A rank whose peers add nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part.repeat(1, self.size)

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        return [numbers] * self.size


class CountingFile:
    """A safetensors file that counts the elements that are taken of each tensor."""

    def __init__(self, file: Any, taken: dict[str, int]) -> None:
        self._file = file
        self._taken = taken

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._count(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return _CountingSlice(self._file.get_slice(name), lambda part: self._count(name, part))

    def _count(self, name: str, part: torch.Tensor) -> torch.Tensor:
        self._taken[name] = self._taken.get(name, 0) + part.numel()
        return part


class _CountingSlice:
    def __init__(self, inner: Any, count: Any) -> None:
        self._inner = inner
        self._count = count

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._count(self._inner[index])


class CountingCheckpoint(Checkpoint):
    """A checkpoint of one file that counts what is read of it."""

    def count(self, directory: Path) -> dict[str, int]:
        """Elements read of each tensor by rank 1 of 2."""
        taken: dict[str, int] = {}
        file = CountingFile(safe_open(directory / "model.safetensors", "pt"), taken)
        reader = TensorReader(self, dict.fromkeys(self.files, file))
        load(directory, OneOf(1, 2), _Opened(self, reader))
        return taken


class _Opened:
    """A checkpoint that is open already."""

    def __init__(self, checkpoint: Checkpoint, reader: TensorReader) -> None:
        self.tensors = checkpoint.tensors
        self.check = checkpoint.check
        self._reader = reader

    def open(self) -> "_Opened":
        return self

    def __enter__(self) -> TensorReader:
        return self._reader

    def __exit__(self, *_: object) -> None:
        pass


def load(directory: Path, ranks: OneOf, checkpoint: Any = None) -> DecoderWeights:
    return load_weights(
        read_model_config(directory),
        checkpoint or open_checkpoint(directory),
        torch.float32,
        TorchKernels(),
        lambda *_: None,
        ranks,
    )


def stack_experts(directory: Path) -> None:
    """Rewrites a checkpoint so that all experts of a layer lie in one tensor."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for prefix in {name.partition(".mlp.experts.")[0] for name in tensors if ".experts." in name}:
        own = f"{prefix}.mlp.experts."
        count = len([name for name in tensors if name.startswith(own) and "down_proj" in name])
        gates, ups, downs = (
            [tensors.pop(f"{own}{number}.{kind}_proj.weight") for number in range(count)]
            for kind in ("gate", "up", "down")
        )
        both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        tensors[f"{own}gate_up_proj"] = torch.stack(both)
        tensors[f"{own}down_proj"] = torch.stack(downs)
    save_file(tensors, file)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "mixtral", "qwen3_moe", "stacked"])
def test_a_rank_reads_its_part_alone(kind: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe" if kind == "stacked" else kind)
    if kind == "stacked":
        stack_experts(tmp_path)
    plain = open_checkpoint(tmp_path)
    taken = CountingCheckpoint(plain.directory, plain.tensors).count(tmp_path)
    for name, tensor in plain.tensors.items():
        whole = torch.Size(tensor.shape).numel()
        replicated = any(part in name for part in WHOLE_ON_EACH_RANK)
        assert taken[name] == (whole if replicated else whole // 2), name


@pytest.mark.parametrize("stacked", [False, True])
def test_the_parts_of_experts_add_up(tmp_path: Path, *, stacked: bool) -> None:
    save_tiny_model(tmp_path, "qwen3_moe")
    if stacked:
        stack_experts(tmp_path)
    torch.manual_seed(0)
    hidden = torch.randn(24, 48)
    whole = load(tmp_path, OneOf(0, 1)).layers[0].mlp
    parts = [load(tmp_path, OneOf(rank, 2)).layers[0].mlp for rank in range(2)]
    assert all(isinstance(part, SummedMlp) for part in parts)
    with torch.inference_mode():
        summed = sum(part(hidden, 24) for part in parts)
        torch.testing.assert_close(summed, whole(hidden, 24), rtol=1e-5, atol=1e-5)


def test_heads_of_keys_and_values_are_shared_by_neighbours() -> None:
    assert [Shard(rank, 2).kv_heads(8) for rank in range(2)] == [slice(0, 4), slice(4, 8)]
    assert [Shard(rank, 4).kv_heads(2) for rank in range(4)] == [
        *(slice(0, 1), slice(0, 1)),
        *(slice(1, 2), slice(1, 2)),
    ]


@pytest.mark.parametrize(
    ("kind", "changes", "size", "field"),
    [
        ("llama", {}, 3, "num_attention_heads 4 cannot be divided over 3 ranks"),
        ("llama", {"intermediate_size": 97}, 2, "intermediate_size 97"),
        ("llama", {"vocab_size": 321}, 2, "vocab_size 321"),
        ("qwen3_moe", {"moe_intermediate_size": 33}, 2, "moe_intermediate_size 33"),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "num_key_value_heads 6 cannot be divided over 4 ranks",
        ),
        ("opt", {}, 2, "architecture OPTForCausalLM has no native code"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    kind: str, changes: dict[str, int], size: int, field: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, kind)
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=field):
        check_configuration(tmp_path, size)
