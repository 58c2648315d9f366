"""The index of cached prefixes: worked examples, and random histories compared with plain sets."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.common.pool.kv_directory import (
    Digest,
    KeyBatch,
    NodeLease,
    block_keys,
    digest_of,
    group_salt,
)
from services.common.pool.prefix_depth import prefix_depth
from services.gateway.core.prefix_index.node_view import Applied, DirectoryState
from services.gateway.core.prefix_index.prefix_index import JUMP, PrefixIndex
from tests.directory.busy_pools import keys_of

BLOCK_SIZE = 4
FULL = KVCacheGroup(AttentionType.FULL, BLOCK_SIZE)
WINDOW = KVCacheGroup(AttentionType.SLIDING_WINDOW, BLOCK_SIZE, 10)
STATE = KVCacheGroup(AttentionType.STATE_SPACE, BLOCK_SIZE, mamba_cache_mode=MambaCacheMode.ALIGN)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    index.contact = DirectoryState.EXACT
    return index


def chain(seed: int, num_blocks: int) -> list[int]:
    """Random keys for the blocks of a prompt."""
    rng = random.Random(seed)
    return [rng.getrandbits(48) for _ in range(num_blocks)]


def test_a_match_is_the_depth_of_each_node_that_holds_the_first_block(index):
    keys = chain(1, 5 * JUMP)
    depths = {"a": 1, "b": JUMP, "c": JUMP + 1, "d": 3 * JUMP + 7, "e": 5 * JUMP}
    for epoch, (node, depth) in enumerate(depths.items(), 1):
        index.begin(node, epoch, (FULL,))
        assert index.apply(KeyBatch(epoch, 1, keys[:depth])) is Applied.DONE
    index.begin("f", 9, (FULL,))
    assert index.match(keys) == depths
    assert index.match(keys[: JUMP + 1]) == {
        node: min(depth, JUMP + 1) for node, depth in depths.items()
    }
    assert index.match(chain(2, 3 * JUMP)) == {}
    assert index.match([]) == {}


def test_a_batch_is_applied_once_and_in_order(index):
    keys = chain(1, 4)
    index.begin("a", 7, (FULL,))
    assert index.apply(KeyBatch(7, 1, keys[:2])) is Applied.DONE
    assert index.apply(KeyBatch(7, 1, keys)) is Applied.KNOWN
    assert index.apply(KeyBatch(6, 2, keys)) is Applied.OTHER_EPOCH
    assert index.apply(KeyBatch(7, 2, keys[2:], keys[1:2])) is Applied.DONE
    assert keys_of(index, "a") == {keys[0], keys[2], keys[3]}
    assert index.state is DirectoryState.EXACT


def test_a_scrape_in_a_thread_reads_views_while_nodes_change(index):
    for epoch, node in enumerate("abc", 1):
        index.begin(node, epoch, (FULL,))
    seen = []
    for view in index.views:
        seen.append(view.node)
        index.begin(f"{view.node} again", 9 + len(seen), (FULL,))
    assert seen == ["a", "b", "c"]


def test_a_gap_degrades_its_node_alone(index):
    keys = chain(1, 4)
    for epoch, node in ((1, "a"), (2, "b")):
        index.begin(node, epoch, (FULL,))
        index.apply(KeyBatch(epoch, 1, keys))
    assert index.apply(KeyBatch(1, 3, (), keys[3:])) is Applied.GAP
    assert index.node_state("a") is index.state is DirectoryState.DEGRADED
    assert index.node_state("b") is DirectoryState.EXACT
    assert index.match(keys) == {"a": 4, "b": 4}


def test_a_digest_that_differs_degrades_the_node(index):
    keys = chain(1, 3)
    index.begin("a", 1, (FULL,))
    assert index.apply(KeyBatch(1, 1, keys[:2], (), digest_of(keys[:2]))) is Applied.DONE
    assert index.compare("a", NodeLease(1, 1, digest_of(keys[:2])))
    assert index.compare("a", NodeLease(1, 2, digest_of(keys))), "it is not as far"
    assert index.apply(KeyBatch(1, 2, keys[2:], (), Digest(4, 0))) is Applied.DRIFTED
    assert index.node_state("a") is DirectoryState.DEGRADED


def test_a_lease_that_differs_degrades_the_node(index):
    index.begin("a", 1, (FULL,))
    index.apply(KeyBatch(1, 1, chain(1, 3)))
    assert not index.compare("a", NodeLease(1, 1, Digest(3, 1)))
    assert index.node_state("a") is DirectoryState.DEGRADED


def test_a_new_life_voids_the_one_before_at_once(index):
    keys = chain(1, 4)
    index.begin("a", 1, (FULL,))
    index.apply(KeyBatch(1, 1, keys))
    index.begin("a", 2, (FULL,))
    assert index.match(keys) == {}
    assert index.apply(KeyBatch(1, 2, keys)) is Applied.OTHER_EPOCH
    assert index.match(keys) == {}
    index.apply(KeyBatch(2, 1, keys[:1]))
    assert index.match(keys) == {"a": 1}


def test_a_snapshot_replaces_the_view_when_it_is_complete(index):
    old, new = chain(1, 3), chain(2, 3)
    index.begin("a", 1, (FULL,))
    index.apply(KeyBatch(1, 1, old))
    index.degrade("a")
    with index.loading("a", 1, (FULL,), 5) as add:
        add(new[:2])
        assert index.match(old) == {"a": 3}
        assert index.match(new) == {}
        add(new[2:])
    assert index.match(old) == {}
    assert index.match(new) == {"a": 3}
    assert index.view("a").digest == digest_of(new)
    assert index.apply(KeyBatch(1, 5, old)) is Applied.KNOWN
    assert index.apply(KeyBatch(1, 6, old)) is Applied.DONE
    assert index.node_state("a") is DirectoryState.EXACT


def test_a_snapshot_that_is_given_up_changes_nothing(index):
    keys = chain(1, 3)

    def give_up() -> None:
        with index.loading("a", 1, (FULL,), 5) as add:
            add(keys)
            raise KeyError

    with pytest.raises(KeyError):
        give_up()
    assert index.match(keys) == {}
    swept(index)
    assert index.num_keys == 0


def test_sweeping_removes_what_is_void_and_frees_its_bit(index):
    keys = chain(1, 2000)
    for life in range(1, 20):
        index.begin("a", life, (FULL,))
        index.apply(KeyBatch(life, 1, keys))
        index.begin("b", 100 + life, (FULL,))
        index.apply(KeyBatch(100 + life, 1, keys[:10]))
        swept(index)
    assert index.match(keys) == {"a": 2000, "b": 10}
    assert max(view.bit for view in index.views) <= 1 << 3
    index.remove("a")
    swept(index)
    assert index.num_keys == 10


def test_without_contact_nothing_is_matched(index):
    keys = chain(1, 3)
    index.begin("a", 1, (FULL,))
    index.apply(KeyBatch(1, 1, keys))
    index.contact = DirectoryState.DEGRADED
    assert index.match(keys) == {"a": 3}
    index.contact = DirectoryState.FALLBACK
    assert index.match(keys) == {}
    assert index.node_state("a") is index.state is DirectoryState.FALLBACK
    index.contact = DirectoryState.EXACT
    assert index.match(keys) == {"a": 3}
    assert index.node_state("elsewhere") is DirectoryState.FALLBACK


def test_groups_do_not_share_keys(index):
    hashes = [bytes([number]) * 32 for number in range(3)]
    assert block_keys(hashes, 1) == [key ^ group_salt(1) for key in block_keys(hashes)]
    index.begin("a", 1, (FULL, FULL))
    index.apply(KeyBatch(1, 1, block_keys(hashes)))
    assert index.match(block_keys(hashes)) == {}
    index.apply(KeyBatch(1, 2, block_keys(hashes[:2], 1)))
    assert index.match(block_keys(hashes)) == {"a": 2}


CHAINS = [chain(seed, 2 * JUMP + 50) for seed in range(3)]
CHAINS.append(CHAINS[0][:150] + chain(9, JUMP + 28))  # shares its first 150 blocks with CHAINS[0]

Step = tuple[int, int, int]


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(0, len(CHAINS) - 1), st.integers(0, len(CHAINS[0]))
        ),
        max_size=40,
    ),
    sweeps=st.integers(0, 40),
)
def test_random_prefixes_of_full_attention_are_matched_as_by_brute_force(
    steps: list[Step], sweeps: int
) -> None:
    """Each step sets how many leading blocks of one chain a node has cached."""
    index = PrefixIndex()
    index.contact = DirectoryState.EXACT
    depth = {(node, number): 0 for node in range(5) for number in range(len(CHAINS))}
    held: dict[int, set[int]] = {node: set() for node in range(5)}
    sequences = dict.fromkeys(range(5), 0)
    for node in range(5):
        index.begin(str(node), node + 1, (FULL,))
    for node, number, to in steps:
        depth[node, number] = to
        now = {key for n in range(len(CHAINS)) for key in CHAINS[n][: depth[node, n]]}
        sequences[node] += 1
        batch = KeyBatch(
            node + 1,
            sequences[node],
            sorted(now - held[node]),
            sorted(held[node] - now),
            digest_of(now),
        )
        held[node] = now
        assert index.apply(batch) is Applied.DONE
        index.sweep()
    for _ in range(sweeps):
        index.sweep()
    for node in range(5):
        assert keys_of(index, str(node)) == held[node]
    for keys in CHAINS:
        expected = {str(node): brute_depth(keys, held[node]) for node in range(5)}
        assert index.match(keys) == {node: found for node, found in expected.items() if found}


@settings(max_examples=150, deadline=None)
@given(
    groups=st.sampled_from([(WINDOW,), (STATE,), (FULL, WINDOW), (STATE, FULL, WINDOW)]),
    held=st.lists(st.lists(st.frozensets(st.integers(0, 11)), min_size=3, max_size=3), max_size=4),
    length=st.integers(0, 12),
)
def test_any_blocks_of_other_attention_are_matched_as_by_brute_force(
    groups: tuple[KVCacheGroup, ...], held: list[list[frozenset[int]]], length: int
) -> None:
    index = PrefixIndex()
    index.contact = DirectoryState.EXACT
    keys = chain(1, 12)
    expected = {}
    for node, sets in enumerate(held):
        index.begin(str(node), node + 1, groups)
        added = [keys[at] ^ group_salt(group) for group in range(len(groups)) for at in sets[group]]
        index.apply(KeyBatch(node + 1, 1, added))
        is_cached = [s.__contains__ for s in sets[: len(groups)]]
        if depth := prefix_depth(groups, is_cached, length):
            expected[str(node)] = depth
    assert index.match(keys[:length]) == expected


def brute_depth(keys: list[int], held: set[int]) -> int:
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


def swept(index: PrefixIndex) -> None:
    while index.sweep():
        pass
