"""Chooses how attention is computed on CUDA, and which steps are recorded."""

from collections.abc import Sequence
from typing import Any

from services.worker.backends.attention import AttentionLayer
from services.worker.backends.device import Device
from services.worker.backends.torch.paged_attention import TorchPagedAttention
from services.worker.core.decode_buckets import DecodeBuckets
from services.worker.core.device_tokens import DeviceTokens
from services.worker.core.model_runner import ModelRunner
from services.worker.platforms.interface import Parts


def suits_xformers(layers: Sequence[AttentionLayer]) -> bool:
    """Whether xFormers' kernel can compute the layers: it cannot cap scores."""
    return all(layer.softcap is None for layer in layers)


def runner_on(
    device: Device,
    parts: Parts,
    split_k: type[Any] | None = None,
    *,
    batch_invariant: bool = False,
) -> ModelRunner:
    """A runner that samples on the device, and repeats recorded decodes if the model allows it.

    Attention is xFormers' if that suits every layer; else torch's, whose decodes depend on values
    and are not recorded. `split_k`: see XformersPagedAttention. `batch_invariant`: a request's
    tokens do not depend on the other requests in its steps; xFormers' kernel must suit every layer.
    """
    shape, limits, model = parts.shape, parts.limits, parts.loaded.model
    device_tokens = DeviceTokens(device, limits.max_num_seqs, by_row=batch_invariant)
    if not suits_xformers(shape.layers):
        plain = TorchPagedAttention(shape, device, batch_invariant=False)
        return ModelRunner(model, plain, limits, device, device_tokens, lockstep=parts.lockstep)

    # Imported here because it imports xFormers, which a worker on the CPU does not need.
    from services.worker.backends.cuda.paged_attention import XformersPagedAttention  # noqa: PLC0415

    attention = XformersPagedAttention(
        shape, device, limits.max_blocks_per_seq, split_k, batch_invariant=batch_invariant
    )
    buckets = DecodeBuckets(model, attention, device) if parts.loaded.is_static else None
    return ModelRunner(model, attention, limits, device, device_tokens, buckets, parts.lockstep)
