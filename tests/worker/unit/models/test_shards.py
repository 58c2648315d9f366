"""Which parts of a model a rank reads and stores, and which models cannot be divided."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from services.worker.backends.kernels import DecoderWeights
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.models.config import read_model_config
from services.worker.models.errors import UnsupportedModel
from services.worker.models.files.checkpoint import Checkpoint, TensorReader, open_checkpoint
from services.worker.models.shard import Shard
from services.worker.models.suitability.check import check_configuration
from services.worker.models.weights import load_weights
from tests.tiny_models import edit_config, save_tiny_model

WHOLE_ON_EACH_RANK = ("embed_tokens", "norm", "mlp.gate.weight", "block_sparse_moe.gate")


class OneOf:
    """A rank of a group. In collectives, the other ranks add nothing."""

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
    def count(self, directory: Path) -> dict[str, int]:
        taken: dict[str, int] = {}
        file = CountingFile(safe_open(directory / "model.safetensors", "pt"), taken)
        reader = TensorReader(self, dict.fromkeys(self.files, file))
        load(directory, OneOf(1, 2), _Opened(self, reader))
        return taken


class _Opened:
    def __init__(self, checkpoint: Checkpoint, reader: TensorReader) -> None:
        self.tensors = checkpoint.tensors
        self.num_bytes, self.check = checkpoint.num_bytes, checkpoint.check
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
    with torch.inference_mode():
        summed = sum(part(hidden, 24) for part in parts)
        torch.testing.assert_close(summed, whole(hidden, 24), rtol=1e-5, atol=1e-5)


def test_heads_of_keys_and_values_are_shared_by_neighbours() -> None:
    assert [Shard(rank, 2).kv_heads(8) for rank in range(2)] == [slice(0, 4), slice(4, 8)]
    assert [Shard(rank, 4).kv_heads(2) for rank in range(4)] == [
        *(slice(0, 1), slice(0, 1)),
        *(slice(1, 2), slice(1, 2)),
    ]


def test_heads_that_do_not_divide() -> None:
    """There are nine query heads, three for each of three key-value heads."""
    two = [Shard(rank, 2) for rank in range(2)]
    assert [shard.kv_heads(3) for shard in two] == [slice(0, 2), slice(2, 3)]
    assert [shard.heads(9, 3) for shard in two] == [slice(0, 6), slice(6, 9)]
    assert [shard.count_heads(9, 3) for shard in two] == [(6, 2), (3, 1)]
    six = [Shard(rank, 6) for rank in range(6)]
    assert [shard.kv_heads(3).start for shard in six] == [0, 0, 1, 1, 2, 2]
    assert [shard.heads(9, 3) for shard in six[:3]] == [slice(0, 2), slice(2, 3), slice(3, 5)]


def test_every_row_is_in_one_part() -> None:
    parts = [Shard(rank, 4).of(10) for rank in range(4)]
    assert parts == [slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "may_be"),
    [
        (4, 2, 3, "2 or less, or a multiple of 2 up to 4"),
        (9, 3, 4, "3 or less, or a multiple of 3 up to 9"),
        (9, 3, 12, "3 or less, or a multiple of 3 up to 9"),
        (4, 4, 8, "4 or less"),
        (4, 1, 8, "4 or less"),
    ],
)
def test_an_impossible_division_is_refused_with_the_possible_sizes(
    heads: int, kv_heads: int, size: int, may_be: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "llama")
    edit_config(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads)
    problem = (
        f"{heads} attention heads with {kv_heads} heads of keys and values cannot be divided over "
        f"{size} ranks: tensor_parallel_size may be {may_be}"
    )
    with pytest.raises(UnsupportedModel, match=f"{problem}$"):
        check_configuration(tmp_path, size)
