"""Compares block hashes byte by byte with an independent computation."""

import struct
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.pool.block_hash import (
    HASH_BYTES,
    cache_key,
    encode_extra_keys,
    hash_full_blocks,
    pack_token_ids,
    unpack_token_ids,
)
from services.common.request.encoder_input import EncoderInput

ROOT = bytes(range(32))

token_ids = st.integers(0, 2**31 - 1)


def independent(
    root: bytes, tokens: list[int], size: int, salt: str = "", adapter: bytes = b""
) -> list[bytes]:
    hashes, parent = [], root
    for start in range(0, len(tokens) - size + 1, size):
        extra = b""
        if start == 0 and salt:
            raw = salt.encode("utf-8")
            extra = b"cache_salt\x00" + struct.pack("<I", len(raw)) + raw
        if start == 0 and adapter:
            extra += b"adapter\x00" + adapter
        packed = struct.pack(f"<{size}i", *tokens[start : start + size])
        parent = sha256(parent + packed + extra).digest()
        hashes.append(parent)
    return hashes


def test_a_hash_is_sha256_of_its_parent_and_its_tokens_as_little_endian_int32() -> None:
    first, second = hash_full_blocks(ROOT, [1, 2, 3, 4, 5, 6, 7], 3)
    packed = bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
    assert first == sha256(ROOT + packed).digest()
    packed = bytes([4, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0])
    assert second == sha256(first + packed).digest()
    assert len(first) == HASH_BYTES


def test_a_hash_is_the_same_on_every_machine() -> None:
    (written,) = hash_full_blocks(b"root", [1, 256, 65_536, 2**31 - 1], 4, cache_salt="é")
    message = (
        b"root"
        b"\x01\x00\x00\x00\x00\x01\x00\x00\x00\x00\x01\x00\xff\xff\xff\x7f"
        b"cache_salt\x00\x02\x00\x00\x00\xc3\xa9"
    )
    assert written == sha256(message).digest()


@given(
    tokens=st.lists(token_ids, max_size=40),
    size=st.integers(1, 9),
    salt=st.sampled_from(["", "a", "tenant-7"]),
    adapter=st.sampled_from([b"", bytes(32), sha256(b"adapter").digest()]),
    data=st.data(),
)
def test_chains_continue_where_they_were_left(
    tokens: list[int], size: int, salt: str, adapter: bytes, data: st.DataObject
) -> None:
    expected = independent(ROOT, tokens, size, salt, adapter)
    extra = {"cache_salt": salt, "adapter_digest": adapter}
    assert hash_full_blocks(ROOT, tokens, size, **extra) == expected  # type: ignore[arg-type]
    known = expected[: data.draw(st.integers(0, len(expected)))]
    rest = hash_full_blocks(ROOT, tokens, size, **extra, known=known)  # type: ignore[arg-type]
    assert rest == expected[len(known) :]


def test_a_partial_block_has_no_hash() -> None:
    assert hash_full_blocks(ROOT, [1, 2, 3], 4) == []
    assert hash_full_blocks(ROOT, [], 4) == []


def test_everything_before_a_block_is_in_its_hash() -> None:
    plain = hash_full_blocks(ROOT, [1, 2, 3, 4], 2)
    assert hash_full_blocks(ROOT, [9, 2, 3, 4], 2)[1] != plain[1]
    assert hash_full_blocks(b"other", [1, 2, 3, 4], 2)[1] != plain[1]
    assert hash_full_blocks(ROOT, [1, 2, 3, 4], 2, cache_salt="s")[1] != plain[1]
    assert hash_full_blocks(ROOT, [1, 2, 3, 4], 2, adapter_digest=bytes(32))[1] != plain[1]
    assert hash_full_blocks(ROOT, [1, 2, 3, 9], 2)[0] == plain[0]


def test_a_salt_cannot_be_mistaken_for_another() -> None:
    assert encode_extra_keys("") == b""
    encoded = {encode_extra_keys(salt) for salt in ("a", "b", "aa", "a\0", "\0a")}
    assert len(encoded) == 5


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_survive_packing(tokens: list[int]) -> None:
    packed = pack_token_ids(tokens)
    assert packed == struct.pack(f"<{len(tokens)}i", *tokens)
    assert unpack_token_ids(packed) == tokens


def test_what_is_no_token_id_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_token_ids([2**31])
    with pytest.raises(ValueError, match=r".*"):
        unpack_token_ids(b"12345")


def test_an_item_is_in_the_hash_of_each_block_that_it_touches() -> None:
    items = [EncoderInput("é", 1, 4), EncoderInput("b", 5, 1)]
    tokens = list(range(8))
    hashes, parent = [], ROOT
    for start, extra in (
        (0, b"item\x00\x02\x00\x00\x00\xc3\xa9\x01\x00\x00\x00"),
        (2, b"item\x00\x02\x00\x00\x00\xc3\xa9\xff\xff\xff\xff"),
        (
            4,
            b"item\x00\x02\x00\x00\x00\xc3\xa9\xfd\xff\xff\xff"
            b"item\x00\x01\x00\x00\x00b\x01\x00\x00\x00",
        ),
        (6, b""),
    ):
        packed = struct.pack("<2i", *tokens[start : start + 2])
        salt = b"cache_salt\x00\x01\x00\x00\x00s" if start == 0 else b""
        parent = sha256(parent + packed + salt + extra).digest()
        hashes.append(parent)
    for known in range(5):
        rest = hash_full_blocks(
            ROOT, tokens, 2, cache_salt="s", encoder_inputs=items, known=hashes[:known]
        )
        assert rest == hashes[known:]


def test_a_cache_key_for_each_pair_of_salt_and_adapter() -> None:
    adapter, other = bytes(32), bytes(range(32))
    pairs = [(salt, of) for salt in ("", "ann", "ben") for of in (b"", adapter, other)]
    assert len({cache_key(*pair) for pair in pairs}) == len(pairs)
    assert cache_key("") == b""
    packed = b"cache_salt\0" + struct.pack("<I", 3) + b"ann" + b"adapter\0" + adapter
    assert cache_key("ann", adapter) == sha256(packed).digest()
