"""An index of the KV blocks that each replica's KV-cache pool has cached. The index finds how many
leading blocks of a prompt each pool has cached.

A node is the pool of one replica. One table maps a block's key to the set of nodes that have the
block. The set is an integer with one bit per node. A chain is the sequence of a prompt's blocks.
With full attention, pools evict the tail of a chain first, so a node always has a prefix of the
chain. Therefore a lookup reads only every 128th block of the chain. If a node has one of these
blocks but not the next one, bisection finds the node's last block. The jumps are from NVIDIA
Dynamo's PositionalIndexer, which jumps over 32 blocks. Each read causes a cache miss of the
processor, and longer jumps with bisection need fewer reads.

After a reset of its pool, or when its keys are loaded again, a node gets a new bit. The old bit is
invalid at once. `sweep` removes the old bit from the table in small steps, so that no call takes
long even if the table is large.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import or_

from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.kv_directory import KeyBatch, NodeLease, group_salt
from services.common.pool.prefix_depth import IsCached, prefix_depth
from services.gateway.core.prefix_index.node_view import Applied, DirectoryState, NodeView

JUMP = 128
NUM_SHARDS = 1024
"""The table is divided into this number of dictionaries (shards) by the low bits of the key. So one
call of `sweep`, or the growth of one dictionary, processes only a small part of the table.
"""
MAX_INTERNED_SETS = 65_536

_SHARD = NUM_SHARDS - 1


class PrefixIndex:
    """The index, with a view of each node. Not thread-safe."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        self._views: dict[str, NodeView] = {}
        self._by_epoch: dict[int, NodeView] = {}
        self._node_of_bit: dict[int, str] = {}
        self._live = 0
        """The bits of all nodes that have a view."""
        self._jumping = 0
        """The bits of the nodes whose cached blocks of a chain always form a prefix."""
        self._retired = 0
        """Invalid bits that are still in the table."""
        self._being_swept = 0
        """The bits that the current sweep removes."""
        self._next_shard = 0
        self._interned: dict[int, int] = {}
        self.contact = DirectoryState.FALLBACK
        """The state of the connection to the source of the batches and snapshots. Set by the
        adapter that reads from this source.
        """

    # Queries.

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """Returns how many leading blocks of a chain each node need not compute. Nodes that must
        compute all blocks are omitted. `keys` are the chain's block keys in KV-cache group 0, from
        `block_keys`. The result is empty while the state is FALLBACK or UNUSED.
        """
        if not self.contact.has_matches or not keys:
            return {}
        depths: dict[str, int] = {}
        if self._jumping:
            self._match_by_jumps(keys, depths)
        if self._live != self._jumping:
            self._match_exactly(keys, depths)
        return depths

    @property
    def state(self) -> DirectoryState:
        """The state of the whole index: DEGRADED if `contact` is EXACT and any node is degraded,
        and otherwise `contact`.
        """
        if self.contact is DirectoryState.EXACT and not all(view.is_exact for view in self.views):
            return DirectoryState.DEGRADED
        return self.contact

    def node_state(self, node: str) -> DirectoryState:
        """Returns the state of one node, or FALLBACK if the node is not known."""
        view = self._views.get(node)
        if view is None:
            return DirectoryState.FALLBACK
        if view.is_exact or not self.contact.has_matches:
            return self.contact
        return DirectoryState.DEGRADED

    @property
    def views(self) -> Sequence[NodeView]:
        """A copy of the views of all nodes. It is a copy because the thread that scrapes metrics
        reads it while the event loop may add and remove nodes.
        """
        return tuple(self._views.values())

    def view(self, node: str) -> NodeView | None:
        return self._views.get(node)

    @property
    def num_keys(self) -> int:
        return sum(map(len, self._shards))

    # Changes that the source of the views reports.

    def begin(
        self, node: str, epoch: int, groups: tuple[KVCacheGroup, ...], sequence: int = 0
    ) -> None:
        """Makes an empty view for a new epoch of a node, which begins with a reset of its pool. The
        view equals the empty pool after the log entry `sequence`. The node's earlier keys become
        invalid.
        """
        self.remove(node)
        self._show(NodeView(node, epoch, groups, sequence, self._new_bit(), is_exact=True))

    def remove(self, node: str) -> None:
        """Does nothing if the node is not known."""
        view = self._views.pop(node, None)
        if view is not None:
            del self._by_epoch[view.epoch]
            self._retire(view)

    def apply(self, batch: KeyBatch) -> Applied:
        """Applies a batch of added and removed keys, and returns the outcome. The batch was applied
        if the outcome is DONE or DRIFTED.
        """
        view = self._by_epoch.get(batch.epoch)
        if view is None:
            return Applied.OTHER_EPOCH
        if batch.sequence <= view.sequence:
            return Applied.KNOWN
        if not view.is_exact:
            return Applied.AWAITS_SNAPSHOT
        if batch.sequence != view.sequence + 1:
            view.is_exact = False
            return Applied.GAP
        self._add_keys(view, batch.added)
        self._discard(view, batch.removed)
        view.sequence = batch.sequence
        if batch.digest is not None and batch.digest != view.digest:
            view.is_exact = False
            return Applied.DRIFTED
        return Applied.DONE

    def degrade(self, node: str) -> None:
        """Marks a node's view as not exact until it is loaded again."""
        view = self._views.get(node)
        if view is not None:
            view.is_exact = False

    def compare(self, node: str, lease: NodeLease) -> bool:
        """Marks a node's view as not exact if the node's lease, the pool's entry in the directory,
        has the view's log entry but another digest of the keys. Returns whether the view is exact.
        The lease must be of the view's epoch.
        """
        view = self._views[node]
        if lease.sequence == view.sequence and lease.digest != view.digest:
            view.is_exact = False
        return view.is_exact

    @contextmanager
    def loading(
        self, node: str, epoch: int, groups: tuple[KVCacheGroup, ...], sequence: int
    ) -> Iterator[Callable[[Iterable[int]], None]]:
        """Loads a node from a snapshot, whose keys the block passes in parts to the returned
        function. The existing view stays in use until the block ends, or longer if it raises.
        """
        view = NodeView(node, epoch, groups, sequence, self._new_bit(), is_exact=True)
        try:
            yield partial(self._add_keys, view)
        except BaseException:
            self._retire(view)
            raise
        self.remove(node)
        self._show(view)

    def sweep(self) -> bool:
        """Removes invalid bits from one shard. Returns whether any invalid bits are left."""
        if not self._being_swept:
            if not self._retired:
                return False
            self._being_swept, self._next_shard = self._retired, 0
        kept, intern = ~self._being_swept, self._intern
        shard = self._shards[self._next_shard]
        self._shards[self._next_shard] = {
            key: held if held & kept == held else intern(held & kept)
            for key, held in shard.items()
            if held & kept
        }
        self._next_shard += 1
        if self._next_shard == NUM_SHARDS:
            self._retired &= kept
            for bit in _bits(self._being_swept):
                self._node_of_bit.pop(bit, None)
            self._being_swept = 0
            self._interned.clear()
        return bool(self._retired)

    # Lookups.

    def _match_by_jumps(self, keys: Sequence[int], depths: dict[str, int]) -> None:
        """Stores in `depths` the number of leading blocks of each node that always has prefixes of
        chains. In each iteration, `holders` are the nodes that have all blocks of the chain up to
        and including `position`.
        """
        shards, last = self._shards, len(keys) - 1
        position = 0
        holders = shards[keys[0] & _SHARD].get(keys[0], 0) & self._jumping
        while holders and position < last:
            ahead = min(position + JUMP, last)
            key = keys[ahead]
            lost = holders & ~shards[key & _SHARD].get(key, 0)
            if lost:
                holders ^= lost
                self._bisect(keys, lost, position, ahead, depths)
            position = ahead
        self._record(holders, len(keys), depths)

    def _bisect(
        self, keys: Sequence[int], lost: int, low: int, high: int, depths: dict[str, int]
    ) -> None:
        """Stores in `depths` the number of leading blocks of each node in `lost`. These nodes have
        block `low` of the chain, but not block `high`.
        """
        shards = self._shards
        while lost and high - low > 1:
            middle = (low + high) // 2
            key = keys[middle]
            having = lost & shards[key & _SHARD].get(key, 0)
            if having and having != lost:
                self._bisect(keys, having, middle, high, depths)
                lost ^= having
                high = middle
            elif having:
                low = middle
            else:
                high = middle
        self._record(lost, high, depths)

    def _match_exactly(self, keys: Sequence[int], depths: dict[str, int]) -> None:
        """Stores in `depths` the number of leading blocks of each node that has several KV-cache
        groups or a group without full attention. Reads every block of every group.
        """
        shards = self._shards
        held_by_group: list[list[int]] = []
        present = 0
        depths_of_nothing: dict[tuple[KVCacheGroup, ...], int] = {}
        for view in self._views.values():
            if view.has_full_prefixes:
                continue
            for group in range(len(held_by_group), len(view.groups)):
                salt = group_salt(group)
                salted = keys if not salt else [key ^ salt for key in keys]
                held_by_group.append([shards[key & _SHARD].get(key, 0) for key in salted])
                present = reduce(or_, held_by_group[-1], present)
            is_cached = [_reader(held, view.bit) for held in held_by_group[: len(view.groups)]]
            if present & view.bit:
                depth = prefix_depth(view.groups, is_cached, len(keys))
            else:
                # With chunked attention, even a node without blocks may have a depth above 0.
                depth = depths_of_nothing.get(view.groups, -1)
                if depth < 0:
                    depth = prefix_depth(view.groups, is_cached, len(keys))
                    depths_of_nothing[view.groups] = depth
            if depth:
                depths[view.node] = depth

    def _record(self, bits: int, depth: int, depths: dict[str, int]) -> None:
        node_of_bit = self._node_of_bit
        while bits:
            bit = bits & -bits
            depths[node_of_bit[bit]] = depth
            bits ^= bit

    # The table.

    def _add_keys(self, view: NodeView, keys: Iterable[int]) -> None:
        shards, bit, interned = self._shards, view.bit, self._interned
        count, xor = view.count, view.xor
        for key in keys:
            shard = shards[key & _SHARD]
            held = shard.get(key)
            if held is None:
                shard[key] = bit
            elif held & bit:
                continue
            else:
                held |= bit
                shard[key] = interned.setdefault(held, held)
            count += 1
            xor ^= key
        view.count, view.xor = count, xor
        if len(interned) > MAX_INTERNED_SETS:
            interned.clear()

    def _discard(self, view: NodeView, keys: Iterable[int]) -> None:
        shards, bit = self._shards, view.bit
        for key in keys:
            shard = shards[key & _SHARD]
            held = shard.get(key, 0)
            if held & bit:
                if held == bit:
                    del shard[key]
                else:
                    shard[key] = self._intern(held ^ bit)
                view.count -= 1
                view.xor ^= key

    def _intern(self, held: int) -> int:
        """Returns an integer object equal to `held`, always the same one, because a million
        separate objects would take 32 MB.
        """
        return self._interned.setdefault(held, held)

    def _show(self, view: NodeView) -> None:
        self._views[view.node] = view
        self._by_epoch[view.epoch] = view
        self._node_of_bit[view.bit] = view.node
        self._live |= view.bit
        if view.has_full_prefixes:
            self._jumping |= view.bit

    def _retire(self, view: NodeView) -> None:
        self._live &= ~view.bit
        self._jumping &= ~view.bit
        self._retired |= view.bit

    def _new_bit(self) -> int:
        used = self._retired | sum(self._node_of_bit)
        bit = ~used & (used + 1)
        self._node_of_bit[bit] = ""
        return bit


def _reader(held: Sequence[int], bit: int) -> IsCached:
    return lambda index: bool(held[index] & bit)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
