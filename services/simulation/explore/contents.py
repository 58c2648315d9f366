"""Checks that cached blocks have the tokens for which their hashes stand."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import compress
from typing import Any

import numpy as np

from services.common.pool import block_hash
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId
from services.kvpool.core.pool_host import HostedPool
from services.worker.core.model_runner import ModelRunner

_TOKENS = slice(block_hash.HASH_BYTES, block_hash.HASH_BYTES + 4 * 16)
"""The part of a hash's input that has the tokens of a block of 16 tokens."""
_TOKEN_BITS = np.uint64(0xFFFFFFFF)
"""The part of a key that is the token's id. The other bits are the adapter's and the layer's."""

_tokens_of: dict[bytes, bytes] = {}
"""Maps each block hash that a service has computed since `forget_hashes` to the block's tokens, as
int32.
"""


def _hashed(data: bytes) -> Any:
    result = sha256(data)
    _tokens_of[result.digest()] = data[_TOKENS]
    return result


block_hash.sha256 = _hashed  # type: ignore[attr-defined, assignment]


def forget_hashes() -> None:
    """Called before each run, since a search of thousands of runs would fill the memory."""
    _tokens_of.clear()


def wrong_contents(
    worker: ModelRunner, pools: Iterable[HostedPool[Any]]
) -> Iterator[tuple[str, int]]:
    """Yields kinds of blocks with other tokens than their hashes stand for, and their numbers."""
    tier: Any = worker.tier
    yield "cached blocks with other tokens", len(wrong_blocks(worker, pools))
    if tier is not None:
        held = [(number, held.key) for number, held in enumerate(tier._held) if held is not None]
        numbers, hashes = [number for number, _ in held], [key[:32] for _, key in held]
        wrong = _are_wrong(tier.memory[numbers].view(np.uint64), hashes)
        yield "blocks of the tier with other tokens", sum(wrong)


def wrong_blocks(
    worker: ModelRunner, pools: Iterable[HostedPool[Any]]
) -> list[tuple[BlockId, BlockHash]]:
    """Returns the cached blocks with other tokens than their hashes stand for."""
    cache: Any = worker.attention
    found: list[tuple[BlockId, BlockHash]] = []
    for hosted in pools:
        (index,) = hosted.pool._blocks.indexes
        cached = list(index._hash_of.items())
        wrong = _are_wrong(cache.planes[0, [block for block, _ in cached]], [h for _, h in cached])
        found += compress(cached, wrong)
    return found


def _are_wrong(keys: Any, hashes: Sequence[bytes]) -> list[bool]:
    """Whether the keys of each block (a row) differ from the keys of the block's hash."""
    if not hashes:
        return []
    wanted = np.frombuffer(b"".join(map(_tokens_of.__getitem__, hashes)), np.int32)
    found = (keys[:, :16] & _TOKEN_BITS).astype(np.int32)
    wrong: list[bool] = (found != wanted.reshape(-1, 16)).any(axis=1).tolist()
    return wrong


def blocks_in_tables(pools: Iterable[HostedPool[Any]]) -> set[int]:
    """The blocks in use in pools."""
    return {
        block
        for hosted in pools
        for tables in hosted.pool._requests.tables.values()
        for table in tables
        for block in table.blocks
    }
