"""Packs block keys into bytes. A sequence of keys takes 6 bytes per key. A set takes fewer bytes.

Keys have 48 bits. The keys of a set are sorted. Instead of the first bytes of all keys, 256 counts
are stored, one for each value of the first byte. The second byte of each key is replaced by its
difference from the second byte of the previous key, which is small and compresses well. The other
four bytes stay unchanged. In a set of twenty thousand keys each key takes 4.5 bytes. Numbers are
little-endian.
"""

import struct
import zlib
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import accumulate

from services.common.request.byte_order import little_endian

KEY_BITS = 48

KEY_BYTES = KEY_BITS // 8
_WIDE_BYTES = 8
_LOW_BITS = 32
_LOW_BYTES = 4
_LOW_MASK = (1 << _LOW_BITS) - 1
_TOP_SHIFT = KEY_BITS - 8
_NUM_TOPS = 256
_COUNTS = struct.Struct(f"<{_NUM_TOPS}I")
_LENGTHS = struct.Struct("<II")  # number of keys, number of compressed bytes
_KEYS_PER_TURN = 4096


class DamagedKeys(ValueError):
    """The bytes are not packed keys."""


def pack_keys(keys: Sequence[int]) -> bytes:
    """Packs keys in order, with 6 bytes per key."""
    wide = little_endian(array("Q", keys)).tobytes()
    packed = bytearray(KEY_BYTES * len(keys))
    for index in range(KEY_BYTES):
        packed[index::KEY_BYTES] = wide[index::_WIDE_BYTES]
    return bytes(packed)


def unpack_keys(packed: bytes) -> "array[int]":
    """The inverse of `pack_keys`. Raises DamagedKeys."""
    if len(packed) % KEY_BYTES:
        raise DamagedKeys("the keys are not a whole number of bytes")
    wide = bytearray(len(packed) // KEY_BYTES * _WIDE_BYTES)
    for index in range(KEY_BYTES):
        wide[index::_WIDE_BYTES] = packed[index::KEY_BYTES]
    keys = array("Q")
    keys.frombytes(wide)
    return little_endian(keys)


def pack_key_set(keys: Sequence[int]) -> Generator[None, None, bytes]:
    """Packs distinct keys as a set. Yields periodically, so that other tasks can run."""
    by_top: list[list[int]] = [[] for _ in range(_NUM_TOPS)]
    for at in range(0, len(keys), _KEYS_PER_TURN):
        for key in keys[at : at + _KEYS_PER_TURN]:
            by_top[key >> _TOP_SHIFT].append(key)
        yield
    steps, lows = bytearray(), array("I")
    since_turn = 0
    for same in by_top:
        same.sort()
        seconds = [key >> _LOW_BITS & 0xFF for key in same]
        steps += bytes(map(int.__sub__, seconds, [0, *seconds]))
        lows.extend([key & _LOW_MASK for key in same])
        since_turn += len(same)
        if since_turn >= _KEYS_PER_TURN:
            since_turn = 0
            yield
    # Repetitions are rare in these numbers, so only Huffman codes reduce their size.
    compressor = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    compressed = compressor.compress(_COUNTS.pack(*map(len, by_top)) + steps)
    compressed += compressor.flush()
    head = _LENGTHS.pack(len(keys), len(compressed))
    return head + compressed + little_endian(lows).tobytes()


def unpack_key_set(packed: bytes) -> Iterator[list[int]]:
    """The inverse of `pack_key_set`. Yields the keys in lists. Raises DamagedKeys at once."""
    try:
        num_keys, num_compressed = _LENGTHS.unpack_from(packed)
        begin = _LENGTHS.size + num_compressed
        whole = zlib.decompressobj().decompress(
            packed[_LENGTHS.size : begin], _COUNTS.size + num_keys
        )
        counts = _COUNTS.unpack_from(whole)
    except (struct.error, zlib.error) as error:
        raise DamagedKeys(f"the set of keys cannot be unpacked: {error}") from error
    steps, lows = whole[_COUNTS.size :], packed[begin:]
    if not sum(counts) == len(steps) == num_keys or len(lows) != num_keys * _LOW_BYTES:
        raise DamagedKeys("the parts of the set of keys have different lengths")
    return _parts(counts, steps, lows)


def _parts(counts: Iterable[int], steps: bytes, packed_lows: bytes) -> Iterator[list[int]]:
    lows = array("I")
    lows.frombytes(packed_lows)
    little_endian(lows)
    begin = 0
    for top, count in enumerate(counts):
        end, base = begin + count, top << _TOP_SHIFT
        yield [
            base | (second & 0xFF) << _LOW_BITS | low
            for second, low in zip(accumulate(steps[begin:end]), lows[begin:end], strict=True)
        ]
        begin = end
