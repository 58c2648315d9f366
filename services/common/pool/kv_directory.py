"""The directory's nouns: what a pool writes about its prefix index, and what a gateway reads.

A *node* is the pool of one scheduler process. A *life* of a node has an epoch: all that was written
under another epoch is void. Blocks are named by keys, which are shortened hashes. The forms in
Redis are in `services.common.redis.directory_layout`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.packed_keys import KEY_BITS, KEY_BYTES

_KEY_MASK = (1 << KEY_BITS) - 1
_GROUP_MULTIPLIER = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: multiples of it differ in all bits (Knuth, volume 3)."""


def group_salt(group: int) -> int:
    """What the keys of a KV-cache group are combined with (XOR), so that groups do not share keys;
    0 for the first.
    """
    return group * _GROUP_MULTIPLIER & _KEY_MASK


def block_keys(hashes: Iterable[bytes], group: int = 0) -> list[int]:
    """The keys of block hashes in a KV-cache group: of each hash the first 48 bits.

    Among a million blocks three look-ups in a billion find a block that is not the one asked for.
    """
    salt, from_bytes = group_salt(group), int.from_bytes
    return [from_bytes(block_hash[:KEY_BYTES], "little") ^ salt for block_hash in hashes]


def node_name(replica: str, started_unix_nanos: int) -> str:
    """The node of a scheduler process's pool. It stays when the pool's process is replaced."""
    return f"{replica}-{started_unix_nanos:x}"


@dataclass(frozen=True, slots=True)
class Digest:
    """Count and XOR of a set of keys. Two sets that differ have the same one by chance only."""

    count: int = 0
    xor: int = 0


def digest_of(keys: Iterable[int]) -> Digest:
    """The digest of keys, each given once."""
    keys = list(keys)
    return Digest(len(keys), reduce(xor, keys, 0))


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """One entry of the log: keys that entered and left a node's index since the entry before it."""

    epoch: int
    sequence: int
    """Grows by one with each entry of a life. Entry 0 begins the life: what the node holds then is
    in a snapshot, unless its digest says that it holds nothing.
    """
    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    digest: Digest | None = None
    """That of all keys after this entry; None in entries without one."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node and its present life."""

    node: str
    epoch: int
    generation: int
    """The pool's generation, by which its scheduler knows it."""
    groups: tuple[KVCacheGroup, ...]


@dataclass(frozen=True, slots=True)
class NodeLease:
    """Expires unless it is renewed: the node runs, and has this digest after entry `sequence`."""

    epoch: int
    sequence: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """What a snapshot says besides the keys: they are all keys of a life after entry `sequence`,
    and later entries follow `log_id` in the log.
    """

    epoch: int
    sequence: int
    log_id: str
