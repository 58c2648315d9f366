"""Helpers for the pool's examples: small pools, and hash chains written as letters."""

from collections.abc import Sequence
from hashlib import sha256

from services.common.pool.block_hash import BlockHash
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import (
    Admission,
    Admit,
    AdmitResult,
    Commit,
    Grow,
    GrowResult,
    Lookup,
    LookupResult,
    Release,
)
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig

BLOCK_SIZE = 4


def hashes(path: str) -> list[BlockHash]:
    """The hash chain of a prompt, a letter for each block. "ab" and "ac" share their first hash."""
    return [BlockHash(sha256(path[:end].encode()).digest()) for end in range(1, len(path) + 1)]


def make_pool(num_blocks: int, *, num_groups: int = 1, caching: bool = True) -> KVPool:
    groups = (KVCacheGroup(AttentionType.FULL, BLOCK_SIZE),) * num_groups
    return KVPool(PoolConfig(num_blocks, groups, caching))


def admission(
    request: int,
    num_tokens: int,
    *,
    hit: int = 0,
    path: str = "",
    reserve: int | None = None,
    watermark: int = 0,
    resumed: bool = False,
) -> Admission:
    """The admission of a request whose `num_tokens` tokens are all computed in one step."""
    return Admission(
        request=request,
        max_hit_tokens=num_tokens - 1,
        num_hit_tokens=hit,
        num_slots=num_tokens,
        num_commit_tokens=num_tokens,
        num_reserve_slots=num_tokens if reserve is None else reserve,
        num_watermark_blocks=watermark,
        new_hashes=hashes(path),
        resumed=resumed,
    )


def admit(
    pool: KVPool, request: int, num_tokens: int, *, hit: int = 0, path: str = ""
) -> list[int]:
    """Admits one request, which must succeed. Returns its block table in the first group."""
    terms = admission(request, num_tokens, hit=hit, path=path)
    outcome = pool.transact([Admit([terms])])
    assert outcome.stop is None
    (result,) = outcome.results
    assert isinstance(result, AdmitResult)
    return list(result.groups[0].block_ids)


def grow(pool: KVPool, request: int, num_slots: int, *, computed: int = 0) -> list[int]:
    """Grows one request, which must succeed. Returns its new blocks in the first group."""
    outcome = pool.transact([Grow([request], [computed], [num_slots])])
    assert outcome.stop is None
    (result,) = outcome.results
    assert isinstance(result, GrowResult)
    return list(result.groups[0].block_ids)


def commit(pool: KVPool, request: int, num_tokens: int, new: Sequence[BlockHash] = ()) -> None:
    pool.transact([Commit([request], [num_tokens], [new])])


def lookup(pool: KVPool, request: int, max_hit_tokens: int, path: str = "") -> int:
    (result,) = pool.transact([Lookup([request], [max_hit_tokens], [hashes(path)])]).results
    assert isinstance(result, LookupResult)
    return result.num_hit_tokens[0]


def release(pool: KVPool, *requests: int) -> None:
    pool.transact([Release(requests)])
