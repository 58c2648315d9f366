"""The block map of a KV pool shows the contents and the owner of each block."""

from services.common.pool.ids import BlockId, ContextId, RequestKey
from services.common.pool.operations import Release
from services.kvpool.core.block_map import BlockMap, BlockState, BlockUse, block_map
from services.kvpool.core.kv_pool import KVPool
from tests.kvpool.worked_examples import admit, make_pool, release

BLANK, CACHED = BlockState.BLANK, BlockState.CACHED
HELD, SHARED = BlockState.HELD, BlockState.SHARED


def total(blocks: BlockMap) -> int:
    num_free = blocks.num_blank + blocks.num_cached + blocks.num_retained
    return num_free + blocks.num_held + blocks.num_shared


def map_of(pool: KVPool) -> BlockMap:
    blocks = block_map(pool.block_use(), 100)
    assert total(blocks) == pool.config.num_blocks - 1
    held = pool.config.num_blocks - 1 - pool.num_free_blocks
    assert blocks.num_held + blocks.num_shared == held
    return blocks


def test_an_empty_pool_is_blank() -> None:
    blocks = map_of(make_pool(5))
    assert blocks.states == [BLANK] * 4
    assert blocks.owners == [0] * 4


def test_blocks_are_held_then_shared_then_cached() -> None:
    pool = make_pool(6)
    admit(pool, 1, 9, path="ab")
    assert map_of(pool).states == [HELD, HELD, HELD, BLANK, BLANK]
    assert map_of(pool).owners == [1, 1, 1, 0, 0]
    admit(pool, 2, 9, hit=8, path="ab")
    assert map_of(pool).states == [SHARED, SHARED, HELD, HELD, BLANK]
    assert map_of(pool).owners == [2, 2, 1, 2, 0]
    release(pool, 1)
    release(pool, 2)
    blocks = map_of(pool)
    assert (blocks.num_cached, blocks.num_blank) == (2, 3)
    assert blocks.states[:2] == [CACHED, CACHED]


def test_free_blocks_of_a_context_are_retained() -> None:
    pool = make_pool(6)
    admit(pool, 1, 9, path="ab")
    pool.transact([Release([RequestKey(1)], contexts=[ContextId(7)])])
    blocks = map_of(pool)
    assert blocks.states[:2] == [BlockState.RETAINED] * 2
    assert (blocks.num_retained, blocks.num_cached, blocks.num_blank) == (2, 0, 3)
    admit(pool, 2, 9, hit=8, path="ab")
    assert map_of(pool).num_retained == 0


def test_a_cell_of_several_blocks_shows_the_one_in_most_use() -> None:
    tables: list[tuple[RequestKey, list[BlockId]]] = [
        (RequestKey(7), [BlockId(3)]),
        (RequestKey(9), [BlockId(6), BlockId(7)]),
    ]
    cached, shared, retained = ([*map(BlockId, ids)] for ids in ([1, 2, 7], [7], [2]))
    use = BlockUse(8, tables, cached, shared, retained)
    blocks = block_map(use, max_cells=3)
    assert blocks.blocks_per_cell == 3
    assert blocks.states == [HELD, HELD, SHARED]
    blocks = block_map(use, max_cells=4)
    assert blocks.blocks_per_cell == 2
    assert blocks.states == [BlockState.RETAINED, HELD, HELD, SHARED]
    assert blocks.owners == [0, 7, 9, 9]
