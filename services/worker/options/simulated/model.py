"""The simulated model, whose next token is a hash of the keys and values that attention reads.

A token's key is the token's id, combined with the LoRA adapter of the request. A token's value is a
hash of the keys that the token attends to. Therefore a value depends on the whole sequence before
it, as in later layers of a real model, and a block that has the right tokens but was computed after
another prefix changes the output. The next token follows from the hash of the keys and values that
the last token attends to.

The next token has by far the largest logit, so that it is drawn at any usual temperature. All other
logits are noise, from which a grammar or a logit bias selects.

Every pipeline stage computes the same hashes from its own KV cache. It sends its keys and hashes to
the next stage. The next stage alters each hash that differs from its own. Therefore the output does
not depend on the number of stages, unless the cache of one stage is wrong.

A draft model also computes the same hashes from its own cache. Some bits of a hash determine
whether the draft is the target model's next token.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from services.worker.backends.arrays import Float32Array, UInt64Array
from services.worker.backends.attention import LayerAttention
from services.worker.backends.lora import LoraLayer
from services.worker.models.model import ModelInput, wanted_logits, wanted_rows
from services.worker.options.simulated.hashing import mix, numbers_from
from services.worker.profiles.profile import ModelSize

_PEAK = 40.0
"""The logit of the next token. All other logits are between 0 and 1."""
_NUM_WINDOWS = 1 << 16
_ADAPTER = np.uint64(32)
"""In a key, the adapter's number begins at this bit."""
_CHANCE = np.uint64(0x5851F42D4C957F2D)
"""Mixed into the hash of the next token, to decide whether a draft is right."""


@dataclass(frozen=True, slots=True)
class SimulatedLora:
    """A LoRA adapter. `number` has 16 bits of the hash of the adapter's weights."""

    number: int
    num_bytes: int

    @classmethod
    def of(cls, layers: Sequence[LoraLayer]) -> "SimulatedLora":
        digest, num_bytes = sha256(), 0
        for layer in layers:
            for factors in (*layer.qkv, *layer.output, *layer.gate_up, *layer.down):
                for tensor in (factors.a, factors.b):
                    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
                    num_bytes += tensor.nbytes
        return cls(int.from_bytes(digest.digest()[:2], "little"), num_bytes)


class SimulatedModel:
    """A Model. Hidden states are hashes, int64 [n, 1]. Logits that `forward` returns are valid
    until the next step. If the model pools, hidden states are float32 [n, hidden_size], and logits
    are class scores.

    `end_token_ids` end an output. After each token, the first of them has the probability 1 /
    `mean_output_tokens`, or 0 if that number is 0. A pipeline stage `receives` and `sends` hidden
    states as elements of `dtype`, [n, hidden_size].
    """

    def __init__(
        self,
        size: ModelSize,
        end_token_ids: Sequence[int],
        mean_output_tokens: int = 0,
        *,
        pools: bool = False,
        num_labels: int = 0,
        dtype: torch.dtype = torch.float32,
        receives: bool = False,
        sends: bool = False,
    ) -> None:
        self.size = size
        self._ends = tuple(end_token_ids)
        self._mean_output_tokens = mean_output_tokens if self._ends else 0
        self._pools = pools
        self._num_labels = num_labels
        self._dtype = dtype
        self._receives = receives
        self._sends = sends
        self._acceptance_rate: float | None = None
        self._tokens = np.setdiff1d(np.arange(size.vocab_size), self._ends)
        self._width = size.hidden_size if pools else size.vocab_size
        words = numbers_from(0, _NUM_WINDOWS + self._width) >> np.uint64(40)
        self._noise: Float32Array = (words / 2.0**24).astype(np.float32)
        self._logits: Float32Array = np.empty((0, self._width), np.float32)
        """Memory for a step's logits. Allocating new memory would take ten times as long."""

    def draft_model(self, acceptance_rate: float) -> "SimulatedModel":
        """Returns a draft model whose drafts are this model's next tokens with this probability."""
        draft = copy(self)
        draft._acceptance_rate = acceptance_rate
        draft._logits = self._logits[:0]
        return draft

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns float32 [n, hidden_size]: the token id, followed by zeros."""
        embedded = torch.zeros(len(token_ids), self.size.hidden_size)
        embedded[:, 0] = token_ids
        return embedded

    def forward(self, given: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        keys, before = given.token_ids.numpy().astype(np.uint64), None
        attention, embedded, lora = given.attention, given.embedded, given.lora
        if self._receives:
            assert embedded is not None
            keys, before = _unpack(embedded)
        elif embedded is not None:
            keys = _read_embedded(embedded)
        if lora is not None and before is None:
            starts = lora.starts.tolist()
            for index, adapter in enumerate(lora.adapters):
                assert isinstance(adapter, SimulatedLora)
                rows = lora.rows[starts[index] : starts[index + 1]]
                keys[rows] += np.uint64(adapter.number + 1) << _ADAPTER
        seen = _attend(attention, 0, keys)
        hashes = mix(seen ^ mix(_attend(attention, 1, mix(seen))))
        if before is not None:
            hashes = np.where(hashes == before, hashes, mix(hashes ^ mix(before)))
        if self._sends:
            return self._pack(keys, hashes), None
        hidden = torch.from_numpy(hashes.view(np.int64))[:, None]
        if self._pools:
            hidden = torch.from_numpy(self._noise_of(hashes) - np.float32(0.5))
            return hidden, wanted_logits(self, hidden, given.wanted)
        states = wanted_rows(hidden, given.wanted)
        if states is None:
            return hidden, None
        if len(self._logits) < len(states):
            self._logits = np.empty((len(states), self._width), np.float32)
        return hidden, self._compute_logits(states, self._logits[: len(states)])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._pools:
            return hidden[:, torch.arange(self._num_labels) % self.size.hidden_size]
        return self._compute_logits(hidden, np.empty((len(hidden), self._width), np.float32))

    def _compute_logits(self, hidden: torch.Tensor, logits: Float32Array) -> torch.Tensor:
        hashes: UInt64Array = hidden[:, 0].contiguous().numpy().view(np.uint64)
        self._noise_of(hashes, logits)
        chosen = hashes % np.uint64(len(self._tokens))
        tokens = self._tokens[chosen]
        if self._mean_output_tokens:
            chance = (hashes >> np.uint64(16)) % np.uint64(self._mean_output_tokens)
            tokens = np.where(chance == 0, self._ends[0], tokens)
        if self._acceptance_rate is not None:
            is_wrong = mix(hashes ^ _CHANCE) / 2.0**64 >= self._acceptance_rate
            other = (chosen + np.uint64(1)) % np.uint64(len(self._tokens))
            tokens = np.where(is_wrong, self._tokens[other], tokens)
        logits[np.arange(len(tokens)), tokens] = _PEAK
        return torch.from_numpy(logits)

    def _pack(self, *parts: UInt64Array) -> torch.Tensor:
        """Returns hidden states [n, hidden_size] whose bytes begin with these numbers."""
        hidden = torch.zeros(len(parts[0]), self.size.hidden_size, dtype=self._dtype)
        raw = hidden.view(torch.uint8).numpy()
        raw[:, : 8 * len(parts)] = np.stack(parts, axis=1).view(np.uint8)
        return hidden

    def _noise_of(self, hashes: UInt64Array, rows: Float32Array | None = None) -> Float32Array:
        found = np.empty((len(hashes), self._width), np.float32) if rows is None else rows
        for row, start in zip(found, (hashes >> np.uint64(48)).tolist(), strict=True):
            row[:] = self._noise[start : start + self._width]
        return found


def _attend(attention: LayerAttention, layer: int, numbers: UInt64Array) -> UInt64Array:
    key = torch.from_numpy(numbers.view(np.int64))
    sums: UInt64Array = attention(layer, key, key, key, None).numpy().view(np.uint64)
    return sums


def _unpack(hidden: torch.Tensor) -> tuple[UInt64Array, UInt64Array]:
    raw = hidden.contiguous().view(torch.uint8).numpy()[:, :16]
    numbers: UInt64Array = np.ascontiguousarray(raw).view(np.uint64)
    return numbers[:, 0].copy(), numbers[:, 1]


def _read_embedded(embedded: torch.Tensor) -> UInt64Array:
    """Returns the keys of embeddings. Rows that `embed` returned contain their token id, which is
    the key. For all other rows, the key is 31 bits of a hash.
    """
    bits = embedded.contiguous().numpy().view(np.uint32).astype(np.uint64)
    sums = np.add.reduce(mix(bits) * numbers_from(0, bits.shape[1]), axis=1)
    is_token = ~bits[:, 1:].any(axis=1)
    token_ids = np.where(is_token, embedded[:, 0].numpy(), 0).astype(np.uint64)
    return np.where(is_token, token_ids, mix(sums) >> np.uint64(33))
