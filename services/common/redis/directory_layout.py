"""The schemas of the directory of cached prefixes in Redis: names of keys, and encodings of values.

`kvd:{fp}:log`            stream; each entry has one field, `b`, with a batch of keys
`kvd:{fp}:epoch`          counter; a new epoch of any node has the next number
`kvd:{fp}:nodes`          hash: name of a node to the node's record, in JSON; a node that begins an
                          epoch or leaves removes the records of nodes without a lease
`kvd:{fp}:lease:N`        lease of node N; expires
`kvd:{fp}:snap:N:E`       snapshot: all block keys of node N in its epoch E; expires

The last node that leaves also deletes the log and the counter.

A node is the pool of one scheduler process. It begins a new epoch when its earlier log entries
become invalid. `fp` is the model's fingerprint. The braces put all Redis keys of a model into one
slot of Redis Cluster. Binary values begin with a CRC-32 of the following bytes. Numbers are
little-endian. In a log entry, block keys are packed with 6 bytes each, in a snapshot as a set.
"""

import json
import re
import struct
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from services.common.pool import packed_keys
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import Digest, KeyBatch, NodeLease, NodeRecord, NodeSnapshot

FIELD = b"b"
"""The name of a log entry's only field."""

_CRC = struct.Struct("<I")
_BATCH = struct.Struct("<BBQQI")  # version, flags, epoch, sequence, number of added keys
_DIGEST = struct.Struct("<IQ")
_LEASE = struct.Struct("<BQQIQ")  # version, epoch, sequence, count, xor
_SNAPSHOT = struct.Struct("<BQQB")  # version, epoch, sequence, length of the log entry's id
_LOG_ID = re.compile(rb"[0-9]{1,19}-[0-9]{1,20}")
_VERSION = 1
_HAS_DIGEST = 1


class DamagedValue(ValueError):
    """The bytes are incomplete, or no value of the directory of cached prefixes."""


@dataclass(frozen=True, slots=True)
class DirectoryKeys:
    """The names of the Redis keys of one model."""

    prefix: str

    @classmethod
    def of(cls, fingerprint: bytes) -> "DirectoryKeys":
        """Returns the names for a model. They contain 64 bits of the model's fingerprint."""
        return cls(f"kvd:{{{fingerprint[:8].hex()}}}")

    @property
    def log(self) -> str:
        return f"{self.prefix}:log"

    @property
    def epoch(self) -> str:
        return f"{self.prefix}:epoch"

    @property
    def nodes(self) -> str:
        return f"{self.prefix}:nodes"

    def lease(self, node: str) -> str:
        return f"{self.prefix}:lease:{node}"

    def snapshot(self, node: str, epoch: int) -> str:
        """The name of the key with an epoch's snapshot. No other epoch overwrites that key."""
        return f"{self.prefix}:snap:{node}:{epoch}"


def batch_to_bytes(batch: KeyBatch) -> bytes:
    digest = batch.digest
    head = _BATCH.pack(
        _VERSION,
        0 if digest is None else _HAS_DIGEST,
        batch.epoch,
        batch.sequence,
        len(batch.added),
    )
    tail = b"" if digest is None else _DIGEST.pack(digest.count, digest.xor)
    return _seal(
        head + tail + packed_keys.pack_keys(batch.added) + packed_keys.pack_keys(batch.removed)
    )


def batch_from_bytes(value: bytes) -> KeyBatch:
    """The inverse of `batch_to_bytes`. Raises DamagedValue."""
    body = _unseal(value, _BATCH.size)
    version, flags, epoch, sequence, num_added = _BATCH.unpack_from(body)
    _require(version == _VERSION, "unknown version")
    at, digest = _BATCH.size, None
    if flags & _HAS_DIGEST:
        _require(len(body) >= at + _DIGEST.size, "too short")
        digest = Digest(*_DIGEST.unpack_from(body, at))
        at += _DIGEST.size
    try:
        keys = packed_keys.unpack_keys(body[at:])
    except packed_keys.DamagedKeys as error:
        raise DamagedValue(str(error)) from error
    _require(num_added <= len(keys), "fewer keys than its counts say")
    return KeyBatch(epoch, sequence, keys[:num_added], keys[num_added:], digest)


def lease_to_bytes(lease: NodeLease) -> bytes:
    digest = lease.digest
    return _seal(_LEASE.pack(_VERSION, lease.epoch, lease.sequence, digest.count, digest.xor))


def lease_from_bytes(value: bytes) -> NodeLease:
    """The inverse of `lease_to_bytes`. Raises DamagedValue."""
    body = _unseal(value, _LEASE.size)
    _require(len(body) == _LEASE.size, "too long")
    version, epoch, sequence, count, xor = _LEASE.unpack(body)
    _require(version == _VERSION, "unknown version")
    return NodeLease(epoch, sequence, Digest(count, xor))


def snapshot_to_bytes(snapshot: NodeSnapshot, keys: Sequence[int]) -> Generator[None, None, bytes]:
    """Encodes a snapshot. Yields periodically, as `pack_key_set` does."""
    log_id = snapshot.log_id.encode()
    head = _SNAPSHOT.pack(_VERSION, snapshot.epoch, snapshot.sequence, len(log_id))
    packed = yield from packed_keys.pack_key_set(keys)
    return _seal(head + log_id + packed)


def snapshot_from_bytes(value: bytes) -> tuple[NodeSnapshot, Iterator[list[int]]]:
    """The inverse of `snapshot_to_bytes`. Yields the keys in lists. Raises DamagedValue at once."""
    body = _unseal(value, _SNAPSHOT.size)
    version, epoch, sequence, id_length = _SNAPSHOT.unpack_from(body)
    _require(version == _VERSION, "unknown version")
    begin = _SNAPSHOT.size + id_length
    log_id = body[_SNAPSHOT.size : begin]
    _require(_LOG_ID.fullmatch(log_id) is not None, "not the id of a log entry")
    try:
        keys = packed_keys.unpack_key_set(body[begin:])
    except packed_keys.DamagedKeys as error:
        raise DamagedValue(str(error)) from error
    return NodeSnapshot(epoch, sequence, log_id.decode()), keys


def record_to_bytes(record: NodeRecord) -> bytes:
    groups = [
        {
            "attention_type": group.attention_type.value,
            "block_size": group.block_size,
            "window": group.window,
        }
        for group in record.groups
    ]
    values = {"epoch": record.epoch, "generation": record.generation, "groups": groups}
    return json.dumps(values, separators=(",", ":")).encode()


def record_from_bytes(node: str, value: bytes) -> NodeRecord:
    """The inverse of `record_to_bytes`, which omits the node's name. Raises DamagedValue."""
    try:
        values = json.loads(value)
        groups = tuple(
            KVCacheGroup(
                AttentionType(group["attention_type"]),
                block_size=int(group["block_size"]),
                window=int(group["window"]),
            )
            for group in values["groups"]
        )
        return NodeRecord(node, int(values["epoch"]), int(values["generation"]), groups)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedValue(f"not the record of a pool: {error!r}") from error


def _seal(body: bytes) -> bytes:
    return _CRC.pack(zlib.crc32(body)) + body


def _unseal(value: bytes, least: int) -> bytes:
    _require(len(value) >= _CRC.size + least, "too short")
    (crc,) = _CRC.unpack_from(value)
    body = value[_CRC.size :]
    _require(zlib.crc32(body) == crc, "wrong checksum")
    return body


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise DamagedValue(what)
