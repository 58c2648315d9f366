"""Recurrent layers of models that transformers runs, such as Mamba-2 and gated delta nets.

Such a layer is a module whose `forward` has the parameter `cache_params`, a cache object. The
module reads its initial states from this object, and writes its final states to it: the last inputs
of the convolution, and the matrix of the recurrence. Here each module is wrapped in a
RecurrentLayer, which divides a step's tokens into sequences, and passes the module a cache object
with their states from KV-cache blocks. All sequences of a single token that have a state are
computed in one call, and each other sequence in its own call.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from services.worker.backends.attention import StateLayer
from services.worker.backends.hybrid_cache import HybridStep
from services.worker.models.from_transformers.probe import Refused

_PIECES = (20, 12, 1)
"""Lengths of the pieces into which a probe splits a sequence. A layer must return the same results
for the pieces as for the whole sequence. The last piece is one token, as in a decode step.
"""

_CONVOLUTION, _RECURRENCE = range(2)

RecurFunction = Callable[["RecurrentLayer", torch.Tensor], torch.Tensor]
"""Computes a recurrent layer over hidden states [1, n, hidden_size]."""

recur_function: ContextVar[RecurFunction | None] = ContextVar("recur", default=None)
"""Computes recurrent layers in this thread. If None, all tokens are computed as one sequence."""


class RecurrentLayer(nn.Module):
    """Wraps a recurrent layer of transformers. `index`: its number among recurrent layers."""

    def __init__(self, mixer: nn.Module, index: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.index = index

    @property
    def layer_idx(self) -> int:
        """The layer's number in the model, counting all layers."""
        return int(self.mixer.layer_idx)  # type: ignore[arg-type]

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Computes the layer, with the arguments that transformers passes to its module."""
        recur = recur_function.get()
        if recur is None:
            return self.mixer(hidden_states, *args, **options)
        return recur(self, hidden_states)

    def compute(self, hidden_states: torch.Tensor, cache: "SequenceStates | None") -> Any:
        """Computes sequences of equal length, [num_sequences, n, hidden_size], from the states in
        `cache`. Afterwards `cache` has the states after the last token.
        """
        return self.mixer(hidden_states, cache_params=cache)


class SequenceStates:
    """The states of one layer, with the interface of transformers' caches. Modules may overwrite
    tensors that they have read.

    `tensors`: the last inputs of the convolution [num_sequences, channels, width], and the matrix
    of the recurrence [num_sequences, ...]. They are None before the first token.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self._tensors: list[torch.Tensor | None] = [None, None] if tensors is None else [*tensors]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The current states. Raises Refused unless the layer has written both."""
        given = tuple(tensor for tensor in self._tensors if tensor is not None)
        if len(given) < len(self._tensors):
            raise Refused("has recurrent layers without a convolution or without a recurrence")
        return given

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._only(state_idx)[_CONVOLUTION]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._only(state_idx)[_RECURRENCE]

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Appends new inputs [num_sequences, channels, n] to the last inputs, and returns all of
        them. If they are fewer than the convolution's width, zeros are prepended.
        """
        held, width = self._only(state_idx), conv_kernel_size or conv_states.shape[-1]
        before = held[_CONVOLUTION]
        inputs = conv_states if before is None else torch.cat([before, conv_states], -1)
        inputs = F.pad(inputs, (max(0, width - inputs.shape[-1]), 0))
        held[_CONVOLUTION] = inputs[..., -width:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Stores the matrix after the last token, and returns it."""
        self._only(state_idx)[_RECURRENCE] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether earlier states are kept as well. Always False."""
        return False

    def _only(self, state_idx: int) -> list[torch.Tensor | None]:
        if state_idx:
            raise Refused("has recurrent layers with several states each")
        return self._tensors


class RecurrentProbe:
    """Computes recurrent layers as transformers does, records the shapes of their states, and
    checks that a layer can continue from its states.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._states: dict[int, StateLayer] = {}

    def states(self, num_layers: int) -> tuple[StateLayer, ...]:
        """Returns the shapes and data types of the states of all `num_layers` recurrent layers.
        Raises Refused if a layer was not computed.
        """
        if sorted(self._states) != list(range(num_layers)):
            raise Refused("does not compute all of its recurrent layers")
        return tuple(self._states[index] for index in range(num_layers))

    def __call__(self, layer: RecurrentLayer, hidden_states: torch.Tensor) -> torch.Tensor:
        """Computes a layer. Raises Refused if its results change when a sequence is split."""
        if layer.index in self._states:
            raise Refused("has recurrent layers that are computed more than once")
        whole = layer.compute(hidden_states, None)
        cache, pieces = SequenceStates(), []
        lengths = [length for length in _PIECES if length <= hidden_states.shape[1]]
        for piece in torch.split(hidden_states[:, : sum(lengths)], lengths, 1):
            pieces.append(layer.compute(piece, cache))
        if not isinstance(whole, torch.Tensor):
            raise Refused("has recurrent layers that return more than hidden states")
        cut = torch.cat(pieces, 1)
        expected = whole[:, : cut.shape[1]]
        if (cut - expected).norm() > self._tolerance * expected.norm():
            raise Refused("has recurrent layers that cannot continue from their stored states")
        self._states[layer.index] = StateLayer(
            tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in cache.tensors)
        )
        return whole


def wrap_recurrent_layers(model: nn.Module) -> tuple[RecurrentLayer, ...]:
    """Wraps every recurrent layer of a model in a RecurrentLayer. Returns them in order."""
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if is_recurrent(child)
    ]
    found.sort(key=lambda place: int(place[2].layer_idx))  # type: ignore[arg-type]
    layers = tuple(RecurrentLayer(child, index) for index, (_, _, child) in enumerate(found))
    for (parent, name, _), layer in zip(found, layers, strict=True):
        setattr(parent, name, layer)
    return layers


def is_recurrent(module: nn.Module) -> bool:
    """Whether transformers passes the cache to a module as `cache_params`."""
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and "cache_params" in inspect.signature(module.forward).parameters
    )


def recurring_from(step: HybridStep, padded_rows: Callable[[int], int]) -> RecurFunction:
    """Returns a function that computes recurrent layers of a step, from the states in KV-cache
    blocks. The outputs of padding tokens are zeros. `padded_rows`: see Kernels.padded_torch_rows.
    """

    def recur(layer: RecurrentLayer, hidden_states: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        for run in step.runs:
            count, held = run.num_sequences, step.states.read(layer.index, run)
            sequences = hidden_states[0, run.tokens]
            sequences = sequences.view(count, -1, sequences.shape[1])
            if held is not None and sequences.shape[1] == 1:
                missing = padded_rows(count) - count
                sequences = _with_rows(sequences, missing)
                held = tuple(_with_rows(tensor, missing) for tensor in held)
            cache = SequenceStates(held)
            computed = layer.compute(sequences, cache)[:count]
            output[0, run.tokens] = computed.flatten(0, 1)
            step.states.write(layer.index, run, [tensor[:count] for tensor in cache.tensors])
        return output

    return recur


def _with_rows(x: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
