"""The hash of a full KV-cache block, by which prefixes are found. The same on every machine.

    hash(block) = SHA-256( parent digest | token ids, int32 little-endian | extra keys )

The chain starts at the model's fingerprint, so that equal tokens of two models have different
hashes. Extra keys are what changes the keys and values besides the tokens: the cache salt and the
content of an adapter, which go into the first block only, since every later one inherits them
through its parent, and items of the prompt such as images, which go into each block that they
touch: their tokens are placeholders. Chained block hashes are vLLM's automatic prefix caching; a
canonical encoding in place of pickle makes them portable.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import NewType, cast

from services.common.request.encoder_input import EncoderInput

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 32
HASH_VERSION = 1


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32. Raises OverflowError for an id of 2**31 or more."""
    if not token_ids:
        return b""
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise OverflowError(f"a token id is no int32: {error}") from None


def unpack_token_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_token_ids`. Raises ValueError if the length is no multiple of 4."""
    if not packed:
        return []
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes are no whole number of int32")
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def encode_extra_keys(cache_salt: str, adapter_digest: bytes = b"") -> bytes:
    """Extra keys of a first block: of a salt a tag, its length and the salt, then of an adapter a
    tag and the digest of its files, 32 bytes. Nothing of what a request does not have.
    """
    extra_keys = b""
    if cache_salt:
        salt = cache_salt.encode()
        extra_keys = b"cache_salt\0" + len(salt).to_bytes(4, "little") + salt
    return extra_keys + b"adapter\0" + adapter_digest if adapter_digest else extra_keys


def cache_key(cache_salt: str, adapter_digest: bytes = b"") -> bytes:
    """What requests must have in common to be served from what others left behind: SHA-256 of the
    extra keys of their first blocks, empty where there are none.
    """
    extra_keys = encode_extra_keys(cache_salt, adapter_digest)
    return sha256(extra_keys).digest() if extra_keys else b""


def encode_items(encoder_inputs: Sequence[EncoderInput], start: int, end: int) -> bytes:
    """Extra keys of the block of tokens `start` up to `end`: of each item that it touches a tag,
    the length of the item's identifier, the identifier, and where the item begins, counted from
    the beginning of the block, as a signed int32.
    """
    extra_keys = b""
    for item in encoder_inputs:
        if item.offset < end and start < item.end:
            name = item.identifier.encode()
            offset = (item.offset - start).to_bytes(4, "little", signed=True)
            extra_keys += b"item\0" + len(name).to_bytes(4, "little") + name + offset
    return extra_keys


def hash_full_blocks(
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    *,
    cache_salt: str = "",
    adapter_digest: bytes = b"",
    encoder_inputs: Sequence[EncoderInput] = (),
    known: Sequence[BlockHash] = (),
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids` after those already `known`, in order. `root` is the
    model's fingerprint.
    """
    parent: bytes = known[-1] if known else root
    extra_keys = b"" if known else encode_extra_keys(cache_salt, adapter_digest)
    end = len(token_ids) // block_size * block_size
    packed = pack_token_ids(token_ids[len(known) * block_size : end])
    if encoder_inputs and encoder_inputs[-1].end > len(known) * block_size:
        of_items = [
            encode_items(encoder_inputs, start, start + block_size)
            for start in range(len(known) * block_size, end, block_size)
        ]
        return _hash_with_items(parent, packed, block_size, extra_keys, of_items)
    if len(packed) == 4 * block_size:  # as while a request decodes
        return [BlockHash(sha256(parent + packed + extra_keys).digest())]
    return hash_packed_blocks(parent, packed, block_size, extra_keys)


def _hash_with_items(
    parent: bytes, packed: bytes, block_size: int, extra_keys: bytes, of_items: Sequence[bytes]
) -> list[BlockHash]:
    """Hashes of consecutive full blocks, each with extra keys of items."""
    hashes: list[BlockHash] = []
    for index, extra_keys_of_items in enumerate(of_items):
        block = packed[4 * block_size * index : 4 * block_size * (index + 1)]
        hashes += hash_packed_blocks(parent, block, block_size, extra_keys + extra_keys_of_items)
        parent, extra_keys = hashes[-1], b""
    return hashes


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
