"""A rank's part of a model that transformers runs.

Divided layers replace whole layers before a checkpoint is read, so that only this rank's parts of
their tensors are read. Attention is divided by heads, and other layers evenly. The head counts that
attention layers store are changed to this rank's counts.
"""

from collections.abc import Iterable
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from services.worker.backends.ranks import Ranks
from services.worker.models.from_transformers import linear
from services.worker.models.from_transformers.linear import DividedLinear, Part, SummedLinear
from services.worker.models.from_transformers.plan import Style, read_plan
from services.worker.models.from_transformers.probe import Refused
from services.worker.models.shard import Shard, check_divisible, of_width

_OF_KEYS_AND_VALUES = frozenset({"k_proj", "v_proj", "k_norm"})
_COUNTS_OF_HEADS = ("num_heads", "num_attention_heads")
_COUNTS_OF_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


class Division:
    """One rank's part of a model. `heads` is this rank's part of the query heads and of the
    key-value heads, or None if attention is not divided.
    """

    def __init__(self, directory: Path, ranks: Ranks) -> None:
        self._directory = directory
        self._ranks = ranks
        self.shard = Shard(ranks.rank, ranks.size)
        self._num_heads = self._num_kv_heads = 0
        self.heads: tuple[int, int] | None = None
        self._prefix = ""
        self._renamings: list[WeightRenaming] = []
        self._parts: dict[str, Part] = {}

    def apply(self, model: PreTrainedModel) -> None:
        """Replaces whole layers by divided layers without weights. Raises Refused, and
        UnsupportedModel if the number of ranks cannot divide the model's heads.
        """
        self._prefix = f"{model.base_model_prefix}."
        transforms = get_model_conversion_mapping(model)
        self._renamings = [x for x in transforms if isinstance(x, WeightRenaming)]
        head: nn.Module | None = model.get_output_embeddings()
        plan = read_plan(model)
        self._num_heads = model.config.num_attention_heads
        self._num_kv_heads = _count_kv_heads(model, plan, self._num_heads)
        for name, style in plan.items():
            parent_name, _, own_name = name.rpartition(".")
            parent, layer = model.get_submodule(parent_name), model.get_submodule(name)
            if style is Style.NORM_OF_GATHERED:
                self._divide_norm(parent, name, layer)
                continue
            if type(layer) is not nn.Linear:
                raise Refused(
                    f"has a tensor-parallel plan that divides {name}, which is not an nn.Linear"
                )
            if layer is head:
                divided = self._divide_head(layer, is_tied=model.config.tie_word_embeddings)
            else:
                divided = self._divide(parent, name, layer, style)
            if divided is not None:
                setattr(parent, own_name, divided)
                self._parts |= {f"{name}.{key}": part for key, part in divided.parts.items()}

    def part_of(self, tensor: str) -> Part:
        """Returns the part of a checkpoint tensor to read, empty for the whole tensor."""
        return self._parts.get(self._known_as(tensor), ())

    def _known_as(self, tensor: str) -> str:
        """Returns the model's name for a tensor of a checkpoint. The names may differ by a renaming
        or by the prefix of the model's body.
        """
        for renaming in self._renamings:
            tensor, _ = renaming.rename_source_key(tensor)
        for name in (self._prefix + tensor, tensor.removeprefix(self._prefix)):
            if name in self._parts:
                return name
        return tensor

    def _divide(
        self, parent: nn.Module, name: str, layer: nn.Linear, style: Style
    ) -> DividedLinear:
        match style:
            case Style.COLUMNS:
                return DividedLinear(layer, self._part(parent, name, layer.out_features))
            case Style.ROWS:
                columns = self._part(parent, name, layer.in_features)
                return SummedLinear(layer, columns, self._ranks)
            case Style.ROWS_OF_WHOLE_INPUT:
                columns = self.shard.of(layer.in_features)
                return SummedLinear(layer, columns, self._ranks, takes_part=True)
            case _:
                self._require_equal(name, layer.out_features)
                part = self.shard.of(layer.out_features)
                return linear.GatheredLinear(layer, part, self._ranks)

    def _divide_head(self, head: nn.Linear, *, is_tied: bool) -> DividedLinear | None:
        """Divides the head. Returns None if it stays whole, because parts would differ in size."""
        if head.out_features % self.shard.size:
            return None
        divided = linear.GatheredTiedLinear if is_tied else linear.GatheredLinear
        return divided(head, self.shard.of(head.out_features), self._ranks)

    def _divide_norm(self, parent: nn.Module, name: str, norm: nn.Module) -> None:
        width = norm.get_parameter("weight").shape[-1]
        for count in (self._num_heads, self._num_kv_heads):
            self._require_equal(name, count)
        linear.normalize_gathered(norm, self._part(parent, name, width), self._ranks)

    def _require_equal(self, name: str, length: int) -> None:
        if length % self.shard.size:
            raise Refused(
                f"needs equal parts of {name} on all ranks, and {self.shard.size} ranks cannot "
                f"divide {length} equally"
            )

    def _part(self, parent: nn.Module, name: str, width: int) -> slice:
        """This rank's part of a layer's columns. In attention layers it consists of whole heads."""
        if not isinstance(getattr(parent, "layer_idx", None), int):
            return self.shard.of(width)
        check_divisible(self._num_heads, self._num_kv_heads, self.shard.size, self._directory)
        self._correct_counts(parent)
        if name.rpartition(".")[2] in _OF_KEYS_AND_VALUES:
            count, heads = self._num_kv_heads, self.shard.kv_heads(self._num_kv_heads)
        else:
            heads = self.shard.heads(self._num_heads, self._num_kv_heads)
            count = self._num_heads
        if width % (count * getattr(parent, "head_dim", 1)):  # layers may differ in their heads
            raise Refused(f"has {width} columns in {name}, which {count} heads cannot divide")
        return of_width(heads, width // count)

    def _correct_counts(self, attention: nn.Module) -> None:
        num_heads, num_kv_heads = self.shard.count_heads(self._num_heads, self._num_kv_heads)
        self.heads = (num_heads, num_kv_heads)
        counts = dict.fromkeys(_COUNTS_OF_HEADS, (self._num_heads, num_heads))
        counts |= dict.fromkeys(_COUNTS_OF_KV_HEADS, (self._num_kv_heads, num_kv_heads))
        groups = self._num_heads // self._num_kv_heads
        counts["num_key_value_groups"] = (groups, num_heads // num_kv_heads)
        for name, (whole, own) in counts.items():
            if getattr(attention, name, None) == whole:
                setattr(attention, name, own)


def _count_kv_heads(model: PreTrainedModel, plan: Iterable[str], num_heads: int) -> int:
    """Returns the number of key-value heads, computed from the widths of a layer's projections.
    With one projection for queries, keys and values, it is the number of query heads.
    """
    for name in plan:
        if name.endswith(".k_proj"):
            queries = model.get_parameter(f"{name.removesuffix('k_proj')}q_proj.weight")
            return num_heads * len(model.get_parameter(f"{name}.weight")) // len(queries)
    return num_heads
