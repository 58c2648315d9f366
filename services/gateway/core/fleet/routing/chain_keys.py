"""Computes the keys by which the directory of cached prefixes identifies a prompt's KV blocks. Each
part of a conversation is hashed only once.
"""

from dataclasses import dataclass

from services.common.pool.block_hash import encode_extra_keys, hash_packed_blocks, pack_token_ids
from services.common.pool.kv_directory import block_keys
from services.common.recent import Recent
from services.gateway.core.fleet.replica_description import ReplicaDescription
from services.gateway.core.request.inflight import Inflight

BLOCKS_PER_SEGMENT = 16
MAX_SEGMENTS = 8192


@dataclass(frozen=True, slots=True)
class _Segment:
    last_hash: bytes
    keys: list[int]


class ChainKeys:
    """Computes the keys of prompts' blocks, and caches them by segments of 16 blocks.

    Turns of a conversation, and prompts with a common prefix, repeat segments, so only the new tail
    is hashed. A segment is looked up by the hash of the block before it and by its tokens, so
    conversations need no ids. 8192 segments of 16-token blocks take about 16 MB.
    """

    def __init__(self, max_segments: int = MAX_SEGMENTS) -> None:
        self._segments: Recent[tuple[bytes, int, bytes], _Segment] = Recent(max_segments)

    def of_sequence(self, inflight: Inflight, served: ReplicaDescription) -> list[int]:
        request = inflight.request
        return self.of(
            served.fingerprint,
            request.prompt_token_ids + inflight.output_token_ids,
            served.block_size,
            request.cache_salt,
            served.hash_block_size,
            request.adapter_digest,
        )

    def of(
        self,
        root: bytes,
        token_ids: list[int],
        block_size: int,
        cache_salt: str,
        hash_block_size: int | None = None,
        adapter_digest: bytes = b"",
    ) -> list[int]:
        """Returns the keys of a prompt's full blocks in order. `root` is the model's fingerprint,
        which is the parent of the first block's hash. If `hash_block_size` is smaller than
        `block_size`, a block has several hashes, and its key is made from its last hash.
        """
        unit = hash_block_size or block_size
        last = block_size // unit - 1
        stride = 4 * block_size * BLOCKS_PER_SEGMENT
        packed = pack_token_ids(token_ids[: len(token_ids) // block_size * block_size])
        parent, extra_keys = root, encode_extra_keys(cache_salt, adapter_digest)
        keys: list[int] = []
        for start in range(0, len(packed), stride):
            part = packed[start : start + stride]
            name = (parent + extra_keys, unit, part)
            segment = self._segments.get(name)
            if segment is None:
                hashes = hash_packed_blocks(parent, part, unit, extra_keys)
                segment = _Segment(hashes[-1], block_keys(hashes[last :: last + 1]))
                if len(part) == stride:
                    self._segments[name] = segment
            else:
                self._segments.move_to_end(name)
            keys += segment.keys
            parent, extra_keys = segment.last_hash, b""
        return keys
