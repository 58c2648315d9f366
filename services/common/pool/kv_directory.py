"""Types of the directory of cached prefixes, which pools write and gateways read. A *node* is the
pool of one scheduler process. All nodes of a model write to one log, whose entries list the blocks
that a node added to its prefix index and removed from it. When a node's earlier entries become
invalid, the node begins a new *epoch*, and readers ignore the entries of its other epochs. Blocks
are identified by keys, which are shortened hashes. `services.common.redis.directory_layout` defines
the schemas in Redis.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.packed_keys import KEY_BITS, KEY_BYTES

_KEY_MASK = (1 << KEY_BITS) - 1
_GROUP_MULTIPLIER = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio. Its multiples differ in all bits (Knuth, volume 3)."""


def group_salt(group: int) -> int:
    """The value, 0 for the first group, with which keys are XORed to differ between groups."""
    return group * _GROUP_MULTIPLIER & _KEY_MASK


def block_keys(hashes: Iterable[bytes], group: int = 0) -> list[int]:
    """The keys of block hashes in a KV-cache group. A key is the first 48 bits of a hash, XORed
    with the group's salt. Three of a billion look-ups among a million blocks match a wrong block.
    """
    salt, from_bytes = group_salt(group), int.from_bytes
    return [from_bytes(block_hash[:KEY_BYTES], "little") ^ salt for block_hash in hashes]


def node_name(replica: str, started_unix_nanos: int) -> str:
    """The node name of a scheduler process's pool. A restart of the pool does not change it."""
    return f"{replica}-{started_unix_nanos:x}"


@dataclass(frozen=True, slots=True)
class Digest:
    """The number of keys in a set and the XOR of all keys, which identify the set."""

    count: int = 0
    xor: int = 0


def digest_of(keys: Iterable[int]) -> Digest:
    """The digest of distinct keys."""
    keys = list(keys)
    return Digest(len(keys), reduce(xor, keys, 0))


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """A log entry: the keys added to and removed from a node's index since the previous entry."""

    epoch: int
    sequence: int
    """The entry's number in its epoch. Entry 0 begins the epoch. If the node already had keys then,
    entry 0 has their digest, and a snapshot has the keys.
    """
    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    digest: Digest | None = None
    """The digest of all keys of the node after this entry, or None if the entry has no digest."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node and its current epoch."""

    node: str
    epoch: int
    generation: int
    """The number of the pool's last opening, by which the node's scheduler identifies its pool."""
    groups: tuple[KVCacheGroup, ...]


@dataclass(frozen=True, slots=True)
class NodeLease:
    """Shows that a node runs. `digest` covers the node's keys after the log entry `sequence`."""

    epoch: int
    sequence: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The header of a snapshot. A snapshot has all keys that a node has after log entry `sequence`.
    In Redis that log entry has the id `log_id`, so later entries have larger ids.
    """

    epoch: int
    sequence: int
    log_id: str
