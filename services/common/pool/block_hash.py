"""Hashes of full KV-cache blocks, which identify cached prefixes.

    hash(block) = SHA-256( parent digest | token ids, int32 little-endian | extra keys )

The first block's parent digest is the model's fingerprint, so that equal tokens of two models have
different hashes. Extra keys represent all inputs, besides the tokens, on which the attention's keys
and values depend. The cache salt and the digest of an adapter are hashed with the first block only,
since later hashes depend on them through the parent digest. An item of the prompt, such as an
image, is hashed with each block that it overlaps, since its tokens are placeholders. Chained block
hashes are from vLLM's automatic prefix caching. Unlike pickle, this canonical encoding leads to the
same hashes on all machines.
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
    """Encodes token ids as little-endian int32. Raises OverflowError for an id >= 2**31."""
    if not token_ids:
        return b""
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise OverflowError(f"a token id is not an int32: {error}") from None


def unpack_token_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_token_ids`. Raises ValueError if the length is no multiple of 4."""
    if not packed:
        return []
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes are not a whole number of int32 values")
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def encode_extra_keys(cache_salt: str, adapter_digest: bytes = b"") -> bytes:
    """The extra keys of a sequence's first block. A salt adds a tag, the salt's length, and the
    salt. An adapter adds a tag and the 32-byte digest of the adapter's files. Without salt and
    adapter, the extra keys are empty.
    """
    extra_keys = b""
    if cache_salt:
        salt = cache_salt.encode()
        extra_keys = b"cache_salt\0" + len(salt).to_bytes(4, "little") + salt
    return extra_keys + b"adapter\0" + adapter_digest if adapter_digest else extra_keys


def cache_key(cache_salt: str, adapter_digest: bytes = b"") -> bytes:
    """Returns a key that is equal for requests that may share cached results. The key is the
    SHA-256 of the first block's extra keys, or empty if there are no extra keys.
    """
    extra_keys = encode_extra_keys(cache_salt, adapter_digest)
    return sha256(extra_keys).digest() if extra_keys else b""


def encode_items(encoder_inputs: Sequence[EncoderInput], start: int, end: int) -> bytes:
    """The extra keys of a block that has the tokens from `start` to `end`, `end` excluded. Each
    item that overlaps the block adds a tag, the length of its identifier, the identifier, and the
    item's position relative to the start of the block, as a signed int32.
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
    """Returns the hashes of the full blocks of `token_ids` after the first `len(known)` blocks.
    `known` has the hashes of these first blocks. `root` is the model's fingerprint.
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
    if len(packed) == 4 * block_size:  # usual while a request decodes
        return [BlockHash(sha256(parent + packed + extra_keys).digest())]
    return hash_packed_blocks(parent, packed, block_size, extra_keys)


def _hash_with_items(
    parent: bytes, packed: bytes, block_size: int, extra_keys: bytes, of_items: Sequence[bytes]
) -> list[BlockHash]:
    """Hashes of consecutive full blocks. `of_items` has each block's extra keys of prompt items."""
    hashes: list[BlockHash] = []
    for index, extra_keys_of_items in enumerate(of_items):
        block = packed[4 * block_size * index : 4 * block_size * (index + 1)]
        hashes += hash_packed_blocks(parent, block, block_size, extra_keys + extra_keys_of_items)
        parent, extra_keys = hashes[-1], b""
    return hashes


def hash_packed_blocks(
    parent: bytes, packed: bytes, block_size: int, extra_keys: bytes = b""
) -> list[BlockHash]:
    """Hashes of consecutive full blocks that follow the block with the hash `parent`. `packed` has
    the blocks' token ids as int32. `extra_keys` belong to the first of these blocks.
    """
    stride = 4 * block_size
    hashes: list[bytes] = []
    for start in range(0, len(packed), stride):
        parent = sha256(parent + packed[start : start + stride] + extra_keys).digest()
        hashes.append(parent)
        extra_keys = b""
    return cast("list[BlockHash]", hashes)
