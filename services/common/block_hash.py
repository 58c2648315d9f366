"""The hash of a full KV-cache block, by which prefixes are found. The same on every machine.

    hash(block) = SHA-256( parent digest | token ids, int32 little-endian | extra keys )

The chain starts at the model's fingerprint, so that equal tokens of two models have different
hashes. Extra keys are what changes the keys and values besides the tokens: the cache salt and the
content of an adapter, which go into the first block only, since every later one inherits them
through its parent. Chained block hashes are vLLM's automatic prefix caching; a canonical encoding
in place of pickle makes them portable.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import NewType, cast

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 32
HASH_VERSION = 1


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32. Raises OverflowError for an id of 2**31 or more."""
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise OverflowError(f"a token id is no int32: {error}") from None


def unpack_token_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_token_ids`. Raises ValueError if the length is no multiple of 4."""
    num_tokens, rest = divmod(len(packed), 4)
    if rest:
        raise ValueError(f"{len(packed)} bytes are no whole number of int32")
    return list(struct.unpack(f"<{num_tokens}i", packed))


def encode_extra_keys(cache_salt: str, adapter_digest: bytes = b"") -> bytes:
    """Extra keys of a first block: of a salt a tag, its length and the salt, then of an adapter a
    tag and the digest of its files, 32 bytes. Nothing of what a request does not have.
    """
    extra_keys = b""
    if cache_salt:
        salt = cache_salt.encode()
        extra_keys = b"cache_salt\0" + len(salt).to_bytes(4, "little") + salt
    return extra_keys + b"adapter\0" + adapter_digest if adapter_digest else extra_keys


def hash_full_blocks(
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    *,
    cache_salt: str = "",
    adapter_digest: bytes = b"",
    known: Sequence[BlockHash] = (),
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids` after those already `known`, in order. `root` is the
    model's fingerprint.
    """
    parent: bytes = known[-1] if known else root
    extra_keys = b"" if known else encode_extra_keys(cache_salt, adapter_digest)
    end = len(token_ids) // block_size * block_size
    packed = pack_token_ids(token_ids[len(known) * block_size : end])
    if len(packed) == 4 * block_size:  # as while a request decodes
        return [BlockHash(sha256(parent + packed + extra_keys).digest())]
    return hash_packed_blocks(parent, packed, block_size, extra_keys)


def hash_packed_blocks(
    parent: bytes, packed: bytes, block_size: int, extra_keys: bytes = b""
) -> list[BlockHash]:
    """Hashes of consecutive full blocks, whose tokens are packed, after the block with the hash
    `parent`. `extra_keys` are those of the first of them.
    """
    stride = 4 * block_size
    hashes: list[bytes] = []
    for start in range(0, len(packed), stride):
        parent = sha256(parent + packed[start : start + stride] + extra_keys).digest()
        hashes.append(parent)
        extra_keys = b""
    return cast("list[BlockHash]", hashes)
