"""Which part of a decoder a rank holds.

Heads, the inside of each MLP and the rows of the output projection are divided into equal parts.
Where there are fewer heads of keys and values than ranks, neighbours hold the same one, as in vLLM.
Embeddings are whole on each rank: a step reads but its own rows of them, so that a part would save
no time and cost one more sum; the output projection is read whole in each step, so it is divided.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from services.worker.models.architecture import ExpertLayout
from services.worker.models.config import ModelConfig
from services.worker.models.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def of(self, length: int) -> slice:
        """Its part of so many, which `size` divides."""
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """Its heads of keys and values: those that its heads of queries attend with."""
        if num_kv_heads >= self.size:
            return self.of(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return slice(head, head + 1)

    def config(self, config: ModelConfig) -> ModelConfig:
        """What is computed here: the part's heads, the whole of everything else."""
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(config.num_kv_heads // self.size, 1),
        )


def check_divisible(config: ModelConfig, size: int, directory: Path) -> None:
    """Raises UnsupportedModel, naming the field, for a model that so many ranks cannot divide."""
    lengths = {"num_attention_heads": config.num_heads, "vocab_size": config.vocab_size}
    for layer in config.layers:
        if layer.experts is None:
            lengths["intermediate_size"] = config.intermediate_size
        elif layer.experts.layout is ExpertLayout.QWEN3:
            lengths["moe_intermediate_size"] = layer.experts.intermediate_size
        else:
            lengths["intermediate_size"] = layer.experts.intermediate_size
    undivided = [(name, length) for name, length in lengths.items() if length % size]
    if config.num_kv_heads % size and size % config.num_kv_heads:
        undivided.append(("num_key_value_heads", config.num_kv_heads))
    for name, length in undivided:
        raise UnsupportedModel(
            directory / "config.json",
            f"{name} {length} cannot be divided over {size} ranks: choose another "
            "tensor_parallel_size",
        )


def of_width(part: slice, width: int) -> slice:
    """Where the elements of a part lie whose entries are each so wide."""
    return slice(part.start * width, part.stop * width)
