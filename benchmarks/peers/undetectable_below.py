"""The undetectable faults of the scheduler's links to the pool and the workers."""

from collections.abc import Iterator

from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2

from benchmarks.peers.fields import field_paths

_MODEL = "only the model knows which token is drawn, and how probable each one is"
_REFUSAL = "only the worker knows of which requests it has no token"
_REQUEST = "another request may be meant as well"
_BLOCK = "any block of the pool may be the one that is meant"
_CACHE = "only the pool knows what it has cached, and only the scheduler what is computed"
_HASH = "a hash names tokens that the pool does not have"
_SHAPE = "a pool may have this shape as well"

_NEW = "Execute request: new_requests"
_LOGPROBS = ("token_ids", "logprobs", "ranks")


def _below(prefix: str, kind: object, reason: str) -> Iterator[tuple[str, str]]:
    """Pairs of a path and the reason: one for the field, and one for each nested field."""
    yield prefix, reason
    for path in field_paths(kind.DESCRIPTOR):  # type: ignore[attr-defined]
        yield ".".join((prefix, *path)), reason


UNDETECTABLE_BELOW: dict[str, str] = {
    "Execute response: token_ids": _MODEL,
    **{f"Execute response: logprobs.sampled.{name}": _MODEL for name in _LOGPROBS},
    **{f"Execute response: logprobs.prompt.{name}": _MODEL for name in _LOGPROBS},
    "Execute response: pooled.values": _MODEL,
    "Execute response: nan_requests": _REFUSAL,
    "Execute response: refused_requests": _REFUSAL,
    "Execute response: refused_tokens": _REFUSAL,
    "Execute response: grammar_errors": _REFUSAL,
    "Execute response: grammar_errors.index": _REFUSAL,
    "Execute response: grammar_errors.message": _REFUSAL,
    "Execute response: ended_tier_loads": _REFUSAL,
    f"{_NEW}.token_ids": _REQUEST,
    f"{_NEW}.num_prompt_tokens": _REQUEST,
    f"{_NEW}.adapter_digest": _REQUEST,
    f"{_NEW}.prompt_embeds.data": _REQUEST,
    **dict(_below(f"{_NEW}.sampling", common_pb2.SamplingParams, _REQUEST)),
    **dict(_below(f"{_NEW}.pooling", common_pb2.PoolingParams, _REQUEST)),
    f"{_NEW}.block_tables.block_ids": _BLOCK,
    "Execute request: appended_blocks.block_ids": _BLOCK,
    "Execute request: block_ids_to_zero": _BLOCK,
    "Execute request: copy_sources": _BLOCK,
    "Execute request: copy_targets": _BLOCK,
    "Execute request: num_computed_tokens": _CACHE,
    "PrepareGrammar request: structured_outputs": _REQUEST,
    "PrepareGrammar request: structured_outputs.kind": _REQUEST,
    "PrepareGrammar request: structured_outputs.text": _REQUEST,
    "Transact response: results.admit.groups.block_ids": _BLOCK,
    "Transact response: results.grow.groups.block_ids": _BLOCK,
    "Transact response: block_ids_to_zero": _BLOCK,
    **dict(_below("Transact response: copies", kvpool_pb2.BlockCopy, _BLOCK)),
    **{
        f"Transact request: operations.{name}": _HASH
        for name in ("commit.new_hashes", "lookup.new_hashes", "admit.admissions.new_hashes")
    },
    **{
        f"Transact request: operations.{name}": _CACHE
        for name in (
            *("grow.num_computed_tokens", "commit.num_tokens"),
            *("admit.admissions.num_commit_tokens", "admit.admissions.num_stored_tokens"),
            "remove_skipped_blocks.num_computed_tokens",
        )
    },
    "Transact request: operations.lookup.requests": _REQUEST,
    "Transact request: operations.lookup.num_new_hashes: reversed": _HASH,
    "Transact request: operations.admit.admissions: reversed": _REQUEST,
    "OpenPool request: fingerprint": _SHAPE,
    "OpenPool request: drop_last_hit_block": _SHAPE,
    **dict(_below("OpenPool request: groups", common_pb2.KVCacheGroup, _SHAPE)),
}
"""Maps changes to the reason why no receiver can detect them, with keys as in UNDETECTABLE."""
