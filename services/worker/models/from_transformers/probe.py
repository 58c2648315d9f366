"""Determines how the attention layers of a model that transformers runs work.

A few tokens run through the whole model. The arguments of its attention calls determine the shape
of the KV cache. If a call has an option that the paged cache does not implement, the results would
be wrong, so the model is refused with an error that names the option.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from services.worker.backends.attention import AttentionLayer

_HARMLESS = {"position_ids", "cache_position", "is_causal", "use_cache"}
_HARMLESS |= {"output_attentions", "output_hidden_states", "return_dict"}


class Refused(Exception):
    """A model needs an unsupported feature. The message completes the sentence 'the model ...'."""


class Probe:
    """Plain causal attention that records the arguments of each layer's call."""

    def __init__(self) -> None:
        self._layers: dict[int, AttentionLayer] = {}

    def layers(self, num_layers: int, recurrent: Collection[int] = ()) -> dict[int, AttentionLayer]:
        """Maps layer numbers to attention layers, in ascending order. Raises Refused unless each of
        `num_layers` layers, except those in `recurrent`, has called attention exactly once.
        """
        if not self._layers:
            raise Refused("does not use transformers' attention interface")
        if sorted({*self._layers, *recurrent}) != list(range(num_layers)):
            raise Refused(
                f"uses transformers' attention interface in only {len(self._layers)} of its "
                f"{num_layers} layers"
            )
        return dict(sorted(self._layers.items()))

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Computes attention. Raises Refused for features that a paged cache does not implement."""
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self._layers:
            raise Refused("calls attention outside of its layers, or twice in a layer")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise Refused("attends to later tokens")
        if attention_mask is not None or dropout:
            raise Refused("passes a mask or dropout of its own to attention")
        for name, option in options.items():
            if name not in _HARMLESS and option is not None and option is not False:
                raise Refused(f"passes {name} to attention, which is not supported")
        if query.shape[2] != key.shape[2]:
            raise Refused("attends to something other than the tokens of the sequence")
        if query.shape[-1] != value.shape[-1] or key.shape[1] != value.shape[1]:
            raise Refused("has values of another shape than its keys")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        heads = query.shape[1], key.shape[1], query.shape[-1]
        self._layers[index] = AttentionLayer(*heads, scale, sliding_window, softcap)
        attended = _attend(query, key, value, self._layers[index])
        return attended.transpose(1, 2).contiguous()  # contiguous, since some models call view


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: AttentionLayer
) -> torch.Tensor:
    repeats = layer.num_heads // layer.num_kv_heads
    key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    positions = torch.arange(query.shape[2], device=query.device)
    distance = positions[:, None] - positions
    hidden = distance < 0
    if layer.window is not None:
        hidden |= distance >= layer.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return weights.to(value.dtype) @ value
