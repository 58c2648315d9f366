"""Reads this rank's part of LoRA adapters in PEFT's format, for a native decoder. An adapter adds B
A to the weight of a projection.

If a projection is divided by columns, a rank has all of A and its own rows of B. If the projection
is divided by rows, a rank has its own columns of A and all of B, and the adapter's result is summed
over the ranks together with the projection's product.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.request.adapter import WEIGHTS_FILE
from services.worker.backends.kernels import Kernels
from services.worker.backends.lora import LoraFactors, LoraLayer, LoraShape, PackedLora
from services.worker.models.config import ModelConfig
from services.worker.models.errors import ModelConfigError, ModelTensorError, UnsupportedModel
from services.worker.models.files.checkpoint import WHOLE, Checkpoint, TensorReader, check_dtype
from services.worker.models.files.tensor_files import read_header
from services.worker.models.lora.peft_config import PeftConfig, read_peft_config
from services.worker.models.shard import Shard, of_width
from services.worker.models.stage import StageLayers

_NUM_FACTORS = {"qkv": 3, "gate_up": 2}
_PREFIX = "base_model.model."
_TENSOR = re.compile(
    r"base_model\.model\.(model\.layers\.(\d+)\.((?:self_attn|mlp)\.\w+))\.lora_([AB])\.weight"
)


@dataclass(frozen=True, slots=True)
class _Target:
    """A projection that adapters may add to.

    `shape`: the projection's shape in the whole model. `rows` and `columns`: this rank's part.
    `part`: the field of LoraLayer to which the projection belongs. `first`: the projection's first
    output column in this field.
    """

    shape: tuple[int, int]
    rows: slice
    columns: slice
    part: str
    first: int


@dataclass(frozen=True, slots=True)
class LoraReader:
    """Reads adapters for a pipeline stage's layers on one rank. `config` is the whole model's."""

    config: ModelConfig
    shard: Shard
    stage: StageLayers
    dtype: torch.dtype
    kernels: Kernels

    def read(self, directory: Path, max_rank: int, device: torch.device) -> PackedLora:
        """Reads and packs an adapter. Raises a ModelError that names an unsupported part."""
        config, file = read_peft_config(directory), directory / WEIGHTS_FILE
        tensors = {tensor.name: tensor for tensor in read_header(file)}
        checkpoint = Checkpoint(directory, tensors, device)
        modules = self._modules(checkpoint, config, file, max_rank)
        with checkpoint.open() as reader:
            layers = [
                self._layer(reader, config, index, modules.get(index, {}))
                for index in self.stage.indexes
            ]
        return self.kernels.pack_lora(layers, self.shapes, self.dtype)

    def num_bytes(self, rank: int) -> int:
        """Upper estimate of the bytes of an adapter of this LoRA rank that adds to every
        projection. In each field of LoraLayer, its factors are combined into one.
        """
        per_layer = sum(
            _rounded(_NUM_FACTORS.get(part, 1) * rank) * (shape.columns + shape.depth)
            for part, shape in self.shapes.items()
        )
        return per_layer * self.dtype.itemsize * len(self.stage.indexes)

    @property
    def shapes(self) -> dict[str, LoraShape]:
        """Maps the names of projections to the shapes of this rank's parts."""
        queries, keys, inner = self._widths
        hidden = self.config.hidden_size
        return {
            "qkv": LoraShape(_length(queries) + 2 * _length(keys), hidden),
            "output": LoraShape(hidden, _length(queries)),
            "gate_up": LoraShape(2 * _length(inner), hidden, is_gated=True),
            "down": LoraShape(hidden, _length(inner)),
        }

    @property
    def _widths(self) -> tuple[slice, slice, slice]:
        """This rank's part of the queries, of the keys, and of the inner width of an MLP."""
        config, shard = self.config, self.shard
        queries = of_width(shard.heads(config.num_heads, config.num_kv_heads), config.head_dim)
        keys = of_width(shard.kv_heads(config.num_kv_heads), config.head_dim)
        return queries, keys, shard.of(config.intermediate_size)

    def _targets(self, index: int) -> dict[str, _Target]:
        config, (queries, keys, inner) = self.config, self._widths
        hidden, width = config.hidden_size, config.intermediate_size
        all_queries, all_keys = (
            x * config.head_dim for x in (config.num_heads, config.num_kv_heads)
        )
        behind = _length(queries)
        last = behind + _length(keys)
        targets = {
            "self_attn.q_proj": _Target((all_queries, hidden), queries, WHOLE, "qkv", 0),
            "self_attn.k_proj": _Target((all_keys, hidden), keys, WHOLE, "qkv", behind),
            "self_attn.v_proj": _Target((all_keys, hidden), keys, WHOLE, "qkv", last),
            "self_attn.o_proj": _Target((hidden, all_queries), WHOLE, queries, "output", 0),
        }
        if config.layers[index].experts is None:
            targets |= {
                "mlp.gate_proj": _Target((width, hidden), inner, WHOLE, "gate_up", 0),
                "mlp.up_proj": _Target((width, hidden), inner, WHOLE, "gate_up", _length(inner)),
                "mlp.down_proj": _Target((hidden, width), WHOLE, inner, "down", 0),
            }
        return targets

    def _modules(
        self, checkpoint: Checkpoint, config: PeftConfig, file: Path, max_rank: int
    ) -> dict[int, dict[str, str]]:
        """For each layer, the adapter's modules: maps the name within the layer to the full name.
        Raises ModelError for tensors that do not belong to an adapter of this model.
        """
        modules: dict[int, dict[str, str]] = {}
        for name in checkpoint.tensors:
            found = _TENSOR.fullmatch(name)
            index = int(found[2]) if found else 0
            known = found is not None and index < self.config.num_layers
            if found is None or not known or found[3] not in self._targets(index):
                problem = (
                    f"tensor {name}: the model has no such projection to which adapters can be "
                    "applied"
                )
                raise UnsupportedModel(file, problem)
            modules.setdefault(index, {})[found[3]] = found[1]
        if not modules:
            raise ModelTensorError(file, "the adapter has no tensors")
        for index, names in modules.items():
            for within, module in names.items():
                rank = config.rank(module)
                if rank > max_rank:
                    problem = f"the rank of {module} is {rank}, above max_lora_rank {max_rank}"
                    raise ModelConfigError(config.path, problem)
                rows, columns = self._targets(index)[within].shape
                _check_tensor(checkpoint, file, f"{_PREFIX}{module}.lora_A.weight", (rank, columns))
                _check_tensor(checkpoint, file, f"{_PREFIX}{module}.lora_B.weight", (rows, rank))
        return modules

    def _layer(
        self, reader: TensorReader, config: PeftConfig, index: int, modules: dict[str, str]
    ) -> LoraLayer:
        parts: dict[str, list[LoraFactors]] = {}
        for within, target in self._targets(index).items():
            if (module := modules.get(within)) is None:
                continue
            name = f"{_PREFIX}{module}.lora_"
            a = reader.read_parts((f"{name}A.weight", (WHOLE, target.columns)), dtype=self.dtype)
            b = reader.read_parts((f"{name}B.weight", (target.rows,)), dtype=torch.float32)
            scaled = (b * config.scale(module)).to(self.dtype)
            parts.setdefault(target.part, []).append(LoraFactors(a, scaled, target.first))
        return LoraLayer(**{part: tuple(factors) for part, factors in parts.items()})


def _check_tensor(checkpoint: Checkpoint, file: Path, name: str, shape: tuple[int, int]) -> None:
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise ModelTensorError(file, f"tensor {name} is missing")
    if tensor.shape != shape:
        problem = f"tensor {name} has shape {list(tensor.shape)}, not {list(shape)}"
        raise ModelTensorError(file, problem)
    check_dtype(tensor)


def _rounded(rank: int) -> int:
    """The rank of packed factors, a multiple of 16 in the largest of the formats."""
    return rank + -rank % 16


def _length(part: slice) -> int:
    return int(part.stop - part.start)
