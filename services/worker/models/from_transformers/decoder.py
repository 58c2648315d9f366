"""A decoder that the library transformers runs, over Stepwell's KV cache.

Layers, norms and head are transformers' own. Only attention and the states of recurrent layers (see
`recurrent`) are replaced. vLLM's Transformers backend makes the same division.

Models of transformers call the attention function that their configuration names. Stepwell
registers a function as ATTENTION_NAME. It forwards each call to the function that `_computing_with`
has set for the thread: attention over a paged cache, or a probe, which examines the calls. No
function for masks is registered, because the cache determines which tokens a token attends to.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from services.worker.backends.attention import AttentionLayer, LayerAttention, StateLayer
from services.worker.backends.hybrid_cache import HybridStep
from services.worker.backends.out_of_memory import is_out_of_memory
from services.worker.models.from_transformers import recurrent
from services.worker.models.from_transformers.probe import Probe, Refused
from services.worker.models.from_transformers.recurrent import RecurFunction, RecurrentProbe
from services.worker.models.model import ModelInput, wanted_logits

ATTENTION_NAME = "stepwell"

_AttendFunction = Callable[..., torch.Tensor]
"""An attention function with transformers' signature. It returns [1, n, num_heads, head_dim]."""

_attend_function: ContextVar[_AttendFunction] = ContextVar("attend")

_PROBE_TOKENS = 33
_TOLERANCE = 1e-3
_ROUNDED_TOLERANCE = 0.2
"""Maximum relative difference of logits that is attributed to rounding. In half precision, rounding
can also change the choice of experts.
"""


@dataclass(frozen=True, slots=True)
class ProbedLayers:
    """The attention layers of a model, by layer number, and the states of its recurrent layers."""

    attention: dict[int, AttentionLayer]
    states: tuple[StateLayer, ...]


class TransformersDecoder:
    """A Model. A step's tokens are computed as one sequence, with the positions that they have in
    their requests. They are padded by `padded_rows` (padded_torch_rows of Kernels), because the
    results of torch's products depend on the number of rows.
    """

    def __init__(
        self, model: PreTrainedModel, padded_rows: Callable[[int], int] = lambda rows: rows
    ) -> None:
        self._padded_rows = padded_rows
        self._recurrent = recurrent.wrap_recurrent_layers(model)
        self._attention_index: dict[int, int] = {}
        """Maps layer numbers to indexes among the attention layers."""
        self._body: nn.Module = model.base_model
        self._embedding: nn.Module = model.get_input_embeddings()
        self._given = _GivenStates(self._body)
        self._head = copy.copy(model)  # shares everything except the body
        self._head._modules = {**model._modules, model.base_model_prefix: self._given}

    @property
    def hidden_size(self) -> int:
        """Width of the embeddings. The model may project them to another width for its layers."""
        device = next(self._embedding.parameters()).device
        return int(self.embed(torch.zeros(1, dtype=torch.int64, device=device)).shape[1])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._embedding(token_ids[None])[0]
        return embedded

    def forward(self, given: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert given.lora is None, "layers that transformers runs take no adapters"
        attention, num_tokens = given.attention, len(given.token_ids)
        attend = _from_cache(attention, self._attention_index)
        recur = None
        if self._recurrent:
            assert isinstance(attention, HybridStep), "recurrent layers need a cache of states"
            recur = recurrent.recurring_from(attention, self._padded_rows)
        padding = (0, self._padded_rows(num_tokens) - num_tokens)
        positions = F.pad(given.positions, padding)
        if given.embedded is None:
            token_ids = F.pad(given.token_ids, padding)
            hidden = self._forward(attend, recur, positions, input_ids=token_ids[None])
        else:
            embedded = F.pad(given.embedded, (0, 0, *padding))
            hidden = self._forward(attend, recur, positions, inputs_embeds=embedded[None])
        hidden = hidden[:num_tokens]
        return hidden, wanted_logits(self, hidden, given.wanted)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes logits, including operations that the model applies after its projection."""
        num_rows = len(hidden)
        padded = F.pad(hidden, (0, 0, 0, self._padded_rows(num_rows) - num_rows))
        self._given.states = padded[None]
        dummy = torch.zeros(1, len(padded), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._head(input_ids=dummy, use_cache=False).logits
        return logits[0, :num_rows].float()

    def probe(self, model: PreTrainedModel) -> ProbedLayers:
        """Determines the parameters of attention layers and the states of recurrent layers. Raises
        Refused for a model that cannot be served over the paged cache.

        Compares the logits of a few tokens with the logits that the model computes with its own
        attention. If they differ, the model changes scores or logits in a way that the arguments of
        its attention calls do not show.
        """
        longest = min(_PROBE_TOKENS, model.config.max_position_embeddings)
        positions = torch.arange(longest, device=model.device)
        token_ids = positions % model.config.vocab_size
        is_exact = next(model.parameters()).dtype is torch.float32
        tolerance = _TOLERANCE if is_exact else _ROUNDED_TOLERANCE
        probe, states = Probe(), RecurrentProbe(tolerance)
        hidden = self._forward(probe, states, positions, input_ids=token_ids[None])
        stateful = {layer.layer_idx for layer in self._recurrent}
        attending = probe.layers(model.config.num_hidden_layers, stateful)
        self._attention_index = {layer: index for index, layer in enumerate(attending)}
        logits = self.compute_logits(hidden)
        model.set_attn_implementation("eager")
        own = model(input_ids=token_ids[None], use_cache=False).logits[0].float()
        model.set_attn_implementation(ATTENTION_NAME)
        if (logits - own).norm() > tolerance * own.norm():
            raise Refused(
                "computes other logits with its own attention than with transformers' attention "
                "interface"
            )
        self._probe_embedded(positions, self.embed(token_ids) / 2, tolerance)
        return ProbedLayers(attending, states.states(len(self._recurrent)))

    def _probe_embedded(
        self, positions: torch.Tensor, embedded: torch.Tensor, tolerance: float
    ) -> None:
        try:
            self._forward(
                Probe(), RecurrentProbe(tolerance), positions, inputs_embeds=embedded[None]
            )
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise Refused(
                "needs token ids, so it cannot compute prompts that are given as embeddings"
            ) from error

    def _forward(
        self,
        attend: _AttendFunction,
        recur: RecurFunction | None,
        positions: torch.Tensor,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        with _computing_with(attend, recur):
            output = self._body(position_ids=positions[None], use_cache=False, **inputs)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[0]


class _States(MoeModelOutputWithPast):  # type: ignore[misc]
    """The output of a decoder's body. It has the fields for router logits, cross-attentions, and
    keys and values shared between layers, which some heads read.
    """

    cross_attentions = None
    shared_kv_states = None


class _GivenStates(nn.Module):
    """Takes the place of a model's body, and returns preset hidden states, so that the model
    computes only its head. All other attributes are the body's, because some heads read a factor
    from the body.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.states = torch.empty(0)
        self._replaced = (body,)

    def __getattr__(self, name: str) -> Any:
        if name == "_replaced":
            raise AttributeError(name)
        return getattr(self._replaced[0], name)

    @property
    def decoder(self) -> "_GivenStates":
        """Returns this object, for models such as OPT that call a part of their body."""
        return self

    def forward(self, *_: Any, **__: Any) -> _States:
        """The preset states, [1, n, hidden_size]."""
        return _States(last_hidden_state=self.states)


@contextmanager
def _computing_with(attend: _AttendFunction, recur: RecurFunction | None) -> Iterator[None]:
    """Within this context, models that transformers runs in this thread call `attend` for attention
    and `recur` for recurrent layers.
    """
    tokens = _attend_function.set(attend), recurrent.recur_function.set(recur)
    try:
        yield
    finally:
        _attend_function.reset(tokens[0])
        recurrent.recur_function.reset(tokens[1])


def _from_cache(attention: LayerAttention, indexes: Mapping[int, int]) -> _AttendFunction:
    """Returns attention of a step's tokens over a paged cache. Queries and keys are already
    rotated. `indexes` maps layer numbers to indexes among the attention layers.
    """

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        heads = [x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value)]
        layer: Any = module.layer_idx
        attended = attention(indexes[layer], heads[0], heads[1], heads[2], None)
        return attended.view(1, *heads[0].shape)

    return attend


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The registered function, which transformers calls with heads [1, heads, n, head_dim]."""
    return _attend_function.get()(module, query, key, value, *args, **options), None


AttentionInterface.register(ATTENTION_NAME, _attend)
