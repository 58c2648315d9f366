"""The part of a decoder that a tensor-parallel rank has.

Query heads, key-value heads, the inner dimension of each MLP and the rows of the output projection
are divided. The parts are equal, or the first ranks have one element more. A query head is on the
same rank as the key-value head that it attends with. If there are fewer key-value heads than ranks,
several ranks have the same key-value head, as in vLLM.

Embeddings are whole on each rank. A step reads only a few rows of them, so dividing them would save
no time and would require one more sum. The output projection is divided, because a step reads all
of it. It stays whole if its parts would differ in size, because the ranks' gather requires equal
sizes.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from services.worker.models.config import ModelConfig
from services.worker.models.errors import UnsupportedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part with number `rank` of a decoder that is divided into `size` parts."""

    rank: int = 0
    size: int = 1

    def of(self, length: int) -> slice:
        """This rank's part of a dimension of this length."""
        part, more = divmod(length, self.size)
        start = self.rank * part + min(self.rank, more)
        return slice(start, start + part + (self.rank < more))

    def divides_head(self, num_rows: int) -> bool:
        """Whether the rows of the output projection are divided."""
        return num_rows % self.size == 0

    def of_head(self, num_rows: int) -> slice:
        """This rank's rows of the output projection, or all rows if parts would differ in size."""
        return self.of(num_rows) if self.divides_head(num_rows) else slice(0, num_rows)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's key-value heads, with which its query heads attend."""
        if num_kv_heads >= self.size:
            return self.of(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return slice(head, head + 1)

    def heads(self, num_heads: int, num_kv_heads: int) -> slice:
        """This rank's query heads: all query heads that attend with its key-value heads. If several
        ranks have the same key-value head, they divide its query heads.
        """
        queries = num_heads // num_kv_heads
        own = self.kv_heads(num_kv_heads)
        if num_kv_heads >= self.size:
            return of_width(own, queries)
        holders = self.size // num_kv_heads
        share = Shard(self.rank % holders, holders).of(queries)
        first = own.start * queries
        return slice(first + share.start, first + share.stop)

    def count_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        heads, kv_heads = self.heads(num_heads, num_kv_heads), self.kv_heads(num_kv_heads)
        return heads.stop - heads.start, kv_heads.stop - kv_heads.start

    def config(self, config: ModelConfig) -> ModelConfig:
        """Returns `config`, which describes the whole model, with this rank's head counts."""
        num_heads, num_kv_heads = self.count_heads(config.num_heads, config.num_kv_heads)
        return replace(config, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def log_read(self, num_bytes: int, whole: int) -> None:
        """Logs how many of a checkpoint's bytes were read for this part."""
        if self.size > 1:
            logger.info(
                "rank %d of %d read %.1f of %.1f MiB of the weights",
                *(self.rank, self.size, num_bytes / 2**20, whole / 2**20),
            )


def check_divisible(num_heads: int, num_kv_heads: int, size: int, directory: Path) -> None:
    """Raises UnsupportedModel, naming possible sizes, if `size` ranks cannot divide the heads."""
    if size <= num_kv_heads or (size % num_kv_heads == 0 and size <= num_heads):
        return
    if num_kv_heads in (1, num_heads):
        may_be = f"{num_heads} or less"
    else:
        may_be = f"{num_kv_heads} or less, or a multiple of {num_kv_heads} up to {num_heads}"
    raise UnsupportedModel(
        directory / "config.json",
        f"{num_heads} attention heads with {num_kv_heads} heads of keys and values cannot be "
        f"divided over {size} ranks: tensor_parallel_size may be {may_be}",
    )


def check_stages(num_layers: int, num_stages: int, directory: Path) -> None:
    """Raises UnsupportedModel if a stage would have no layer."""
    if num_stages > num_layers:
        raise UnsupportedModel(
            directory / "config.json",
            f"{num_layers} layers cannot be divided into {num_stages} stages: "
            f"pipeline_parallel_size may be {num_layers} or less",
        )


def of_width(part: slice, width: int) -> slice:
    """Converts a range of heads (or other entries) of `width` elements to a range of elements."""
    return slice(part.start * width, part.stop * width)
