"""The layers of a decoder that a pipeline stage computes.

Layers are divided so that the stages read about equally many bytes of weights in a step. Because a
step of few tokens takes as long as reading the weights, its stages then take about equally long. A
step reads all weights of its layers and of the head, which may be as large as many layers. Of the
embedding it reads one row for each token, which is negligible.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.files.tensor_shapes import EMBEDDING, HEAD, NORM
from services.worker.models.shard import check_stages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers from `start` up to `stop` of `num_layers`. The first stage embeds tokens. The last
    stage has the final norm and the head.
    """

    start: int
    stop: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last

    @property
    def indexes(self) -> range:
        return range(self.start, self.stop)

    def of_group(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Converts indexes in the model to indexes in the stage, without layers of other stages."""
        return tuple(layer - self.start for layer in layers if self.start <= layer < self.stop)

    def log_read(self, num_bytes: int, whole: int) -> None:
        """Logs how many of a checkpoint's bytes were read for this stage."""
        if not self.is_whole:
            logger.info(
                "this stage has layers %d to %d of %d: read %.1f of %.1f MiB of the weights",
                *(self.start, self.stop - 1, self.num_layers, num_bytes / 2**20, whole / 2**20),
            )


def divide_layers(layer_bytes: Sequence[int], head_bytes: int, num_stages: int) -> list[range]:
    """Divides layers into consecutive ranges, one for each stage, so that the largest stage has as
    few bytes as possible. Each stage has at least one layer.

    The last stage also has `head_bytes`. If several divisions are equally good, earlier stages get
    as many layers as possible.
    """
    num_layers = len(layer_bytes)
    if num_stages > num_layers:
        raise ValueError(f"{num_layers} layers are fewer than {num_stages} stages")
    ends = [0, *accumulate(layer_bytes)]

    def divided(most: int) -> list[range] | None:
        """Returns a division with at most `most` bytes in each stage, or None."""
        stages, start = [], 0
        for left in reversed(range(1, num_stages)):
            # The stage gets as many layers as fit, but leaves at least one for each later stage.
            stop = min(bisect_left(ends, ends[start] + most + 1) - 1, num_layers - left)
            if stop == start:
                return None
            stages.append(range(start, stop))
            start = stop
        fits = ends[num_layers] - ends[start] + head_bytes <= most
        return [*stages, range(start, num_layers)] if fits else None

    least, enough = 0, ends[-1] + head_bytes
    while enough - least > 1:
        middle = (least + enough) // 2
        least, enough = (middle, enough) if divided(middle) is None else (least, middle)
    found = divided(enough)
    assert found is not None  # with the upper bound, one stage has room for all bytes
    return found


def layers_of_stage(
    checkpoint: Checkpoint, num_layers: int, stage: int, num_stages: int
) -> StageLayers:
    """The layers of a stage, from the sizes of the checkpoint's tensors. Raises UnsupportedModel if
    there are more stages than layers.
    """
    if num_stages == 1:
        return StageLayers(0, num_layers, num_layers)
    check_stages(num_layers, num_stages, checkpoint.directory)
    sizes = [0] * num_layers
    for name, tensor in checkpoint.tensors.items():
        index = _layer_of(name)
        if index is not None and index < num_layers:
            sizes[index] += tensor.num_bytes
    head = HEAD if HEAD in checkpoint.tensors else EMBEDDING
    head_bytes = sum(
        checkpoint.tensors[name].num_bytes for name in (head, NORM) if name in checkpoint.tensors
    )
    layers = divide_layers(sizes, head_bytes, num_stages)[stage]
    return StageLayers(layers.start, layers.stop, num_layers)


def _layer_of(name: str) -> int | None:
    prefix, _, rest = name.partition("model.layers.")
    number = rest.partition(".")[0]
    return int(number) if not prefix and number.isdigit() else None
