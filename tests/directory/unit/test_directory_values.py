"""Values are read back from the directory unchanged, and damaged values are detected."""

import random
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import (
    Digest,
    KeyBatch,
    NodeLease,
    NodeRecord,
    NodeSnapshot,
    block_keys,
    digest_of,
    node_name,
)
from services.common.redis.directory_layout import (
    DamagedValue,
    DirectoryKeys,
    batch_from_bytes,
    batch_to_bytes,
    lease_from_bytes,
    lease_to_bytes,
    record_from_bytes,
    record_to_bytes,
    snapshot_from_bytes,
    snapshot_to_bytes,
)

NUMBERS = st.integers(0, 2**62)
KEYS = st.lists(st.integers(0, 2**48 - 1), max_size=20)
DIGESTS = st.builds(Digest, st.integers(0, 2**32 - 1), st.integers(0, 2**48 - 1))


def to_the_end(work: Generator[None, None, bytes]) -> bytes:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return bytes(end.value)


def listed(batch: KeyBatch) -> tuple[object, ...]:
    return (batch.epoch, batch.sequence, list(batch.added), list(batch.removed), batch.digest)


@given(st.builds(KeyBatch, NUMBERS, NUMBERS, KEYS, KEYS, st.none() | DIGESTS))
def test_a_batch_reads_back(batch: KeyBatch) -> None:
    assert listed(batch_from_bytes(batch_to_bytes(batch))) == listed(batch)


@given(st.builds(NodeLease, NUMBERS, NUMBERS, DIGESTS))
def test_a_lease_reads_back(lease: NodeLease) -> None:
    assert lease_from_bytes(lease_to_bytes(lease)) == lease


@given(
    st.builds(
        NodeSnapshot, NUMBERS, NUMBERS, st.from_regex(r"[0-9]{1,13}-[0-9]{1,5}", fullmatch=True)
    ),
    st.sets(st.integers(0, 2**48 - 1), max_size=50),
)
def test_a_snapshot_reads_back(snapshot: NodeSnapshot, keys: set[int]) -> None:
    read, parts = snapshot_from_bytes(to_the_end(snapshot_to_bytes(snapshot, list(keys))))
    assert read == snapshot
    assert [key for part in parts for key in part] == sorted(keys)


def test_many_keys_of_a_snapshot_take_less_than_five_bytes_and_several_turns() -> None:
    rng = random.Random(1)
    keys = list({rng.getrandbits(48) for _ in range(20_000)})
    work = snapshot_to_bytes(NodeSnapshot(1, 2, "3-4"), keys)
    for _ in range(8):
        next(work)
    packed = to_the_end(work)
    assert len(packed) < 4.7 * len(keys)
    _, parts = snapshot_from_bytes(packed)
    assert [key for part in parts for key in part] == sorted(keys)


def test_a_record_reads_back() -> None:
    groups = (
        KVCacheGroup(AttentionType.FULL, 16),
        KVCacheGroup(AttentionType.CHUNKED_LOCAL, 16, 64),
    )
    record = NodeRecord("a node", 7, 8, groups)
    assert record_from_bytes("a node", record_to_bytes(record)) == record


@given(st.data())
def test_a_batch_with_a_changed_or_missing_byte_is_damaged(data: st.DataObject) -> None:
    whole = batch_to_bytes(KeyBatch(5, 6, [1, 2], [3], Digest(2, 3)))
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), whole[:at], whole + b"\0"):
        with pytest.raises(DamagedValue):
            batch_from_bytes(damaged)


@pytest.mark.parametrize("read", [batch_from_bytes, lease_from_bytes, snapshot_from_bytes])
def test_foreign_bytes_are_damaged(read) -> None:
    for value in (b"", b"\0", b"text of some length, which is no value of the directory at all"):
        with pytest.raises(DamagedValue):
            read(value)


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b'{"epoch":1,"generation":2,"groups":[{"attention_type":"?"}]}']
)
def test_foreign_records_are_damaged(value: bytes) -> None:
    with pytest.raises(DamagedValue):
        record_from_bytes("node", value)


def test_all_names_of_a_model_are_in_one_slot() -> None:
    keys = DirectoryKeys.of(bytes(range(32)))
    names = (keys.log, keys.epoch, keys.nodes, keys.lease("n"), keys.snapshot("n", 5))
    assert {name.split("{")[1].split("}")[0] for name in names} == {"0001020304050607"}
    assert len(set(names)) == 5


def test_a_key_is_48_bits_of_a_hash_and_a_digest_their_count_and_xor() -> None:
    assert block_keys([b"\xff" * 32]) == [2**48 - 1]
    assert block_keys([(1).to_bytes(6, "little") + b"\xff" * 26]) == [1]
    assert digest_of([5, 3, 8]) == Digest(3, 5 ^ 3 ^ 8)
    assert node_name("replica-0", 255) == "replica-0-ff"
