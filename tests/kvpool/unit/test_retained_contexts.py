"""The free queue that retains contexts (KV blocks of a request for the agent's next one), compared
with a plain model of its rules.
"""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.pool.ids import BlockId, ContextId
from services.kvpool.core.free_queue import FreeQueue
from services.kvpool.core.retained_contexts import RetainingFreeQueue

NUM_BLOCKS = 12


class Model:
    """A slow model of RetainingFreeQueue. All lists contain block IDs."""

    def __init__(self) -> None:
        self.blank = list(range(1, NUM_BLOCKS + 1))
        self.lru: list[int] = []
        self.in_use: list[int] = []
        self.contexts: list[tuple[int, list[int]]] = []
        self.whole: set[int] = set()
        """Contexts that are given up as a whole when one of their blocks is reused."""

    def owners(self, block: int) -> list[int]:
        return [context for context, blocks in self.contexts if block in blocks]

    @property
    def retained(self) -> list[int]:
        """The free blocks that belong to contexts, in the order in which they are reused."""
        gone = {*self.blank, *self.lru, *self.in_use}
        left = [context for context, _ in self.contexts]
        order = []
        for context, blocks in self.contexts:
            left.remove(context)
            for block in reversed(blocks):
                if block not in gone and not any(one in left for one in self.owners(block)):
                    order.append(block)
        return order

    def num_own(self, context: int) -> int:
        return sum(self.owners(block) == [context] for block in self.retained)

    def release(self, context: int, blocks: list[int]) -> None:
        if context:
            self.contexts.append((context, list(blocks)))
        for block in reversed(blocks):
            self.in_use.remove(block)
            if not self.owners(block):
                self.lru.append(block)

    def take(self) -> int:
        for queue in (self.blank, self.lru):
            if queue:
                self.in_use.append(block := queue.pop(0))
                return block
        while True:
            context, blocks = self.contexts[0]
            if context in self.whole:
                self.drop(context)
                if self.lru:
                    return self.take()
                continue
            block = blocks.pop()
            if not blocks:
                del self.contexts[0]
            if block not in self.in_use and not self.owners(block):
                self.in_use.append(block)
                return block

    def drop(self, context: int) -> None:
        found = dict(self.contexts).get(context, [])
        self.contexts = [(one, blocks) for one, blocks in self.contexts if one != context]
        for block in reversed(found):
            if block not in self.in_use and not self.owners(block):
                self.lru.append(block)


def ids(numbers: Sequence[int]) -> list[BlockId]:
    return list(map(BlockId, numbers))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_blocks_of_contexts_are_reused_by_the_rules(data: st.DataObject) -> None:
    queue, model, next_context = (
        RetainingFreeQueue(FreeQueue(ids(range(1, NUM_BLOCKS + 1)))),
        Model(),
        1,
    )
    for _ in range(data.draw(st.integers(1, 40))):
        known = [context for context, _ in model.contexts]
        match data.draw(st.sampled_from(("take", "hit", "release", "rank", "drop"))):
            case "take" if len(model.in_use) < NUM_BLOCKS:
                block = model.take()
                taken = queue.pop_blank(1) or queue.pop_cached(1)[0]
                assert taken == [block]
            case "hit" if model.lru or model.retained:
                some = st.lists(st.sampled_from([*model.lru, *model.retained]), unique=True)
                blocks = data.draw(some)
                held, times = queue.remove_cached(ids(blocks))
                assert (list(held), len(times)) == ([], len(blocks))
                model.lru = [block for block in model.lru if block not in blocks]
                model.in_use += blocks
            case "release" if model.in_use:
                some = st.lists(st.sampled_from(model.in_use), min_size=1, unique=True)
                blocks = data.draw(some)
                context = next_context if data.draw(st.booleans()) else 0
                next_context += 1
                if context:
                    if is_whole := data.draw(st.booleans()):
                        model.whole.add(context)
                    queue.retain(ContextId(context), ids(blocks), is_whole=is_whole)
                queue.push_cached(ids(blocks[::-1]), 0)
                model.release(context, blocks)
            case "rank":
                named = data.draw(st.permutations(known))[: data.draw(st.integers(0, len(known)))]
                queue.rank(map(ContextId, [*named, 99]))
                rest = [one for one in known if one not in named]
                contexts = dict(model.contexts)
                model.contexts = [(one, contexts[one]) for one in (*named, *rest)]
            case "drop" if known:
                context = data.draw(st.sampled_from(known))
                queue.drop([ContextId(context)])
                model.drop(context)
        assert queue.order() == [*model.blank, *model.lru, *model.retained]
        assert len(queue) == len(queue.order())
        assert queue.num_retained == len(model.retained)
        for change in queue.take_changes():
            blocks = dict(model.contexts).get(change.context, [])
            assert change.num_blocks == len(blocks)
            assert change.num_own_blocks == model.num_own(change.context)


def test_a_context_of_which_no_block_is_cached_any_more_is_forgotten() -> None:
    queue = RetainingFreeQueue(FreeQueue(ids(range(1, 4))))
    blocks = queue.pop_blank(2)
    queue.retain(ContextId(7), blocks)
    queue.push_blank(blocks)
    (change,) = queue.take_changes()
    assert (change.num_blocks, len(queue._contexts)) == (0, 0)


def test_a_whole_context_ends_when_one_of_its_blocks_is_reused_or_loses_its_hash() -> None:
    for is_reused in True, False:
        queue = RetainingFreeQueue(FreeQueue(ids(range(1, 6))))
        blocks = queue.pop_blank(5)
        queue.retain(ContextId(7), blocks[:3], is_whole=True)
        queue.retain(ContextId(8), blocks[3:])
        queue.push_cached(blocks[::-1], 0)
        if is_reused:
            assert queue.pop_cached(1)[0] == [3]
        else:
            queue.remove_cached([BlockId(2)])
            queue.push_blank([BlockId(2)])
        assert queue.ids == [8]
        assert queue.num_retained == 2
        assert {change.num_blocks for change in queue.take_changes()} == {0, 2}


def test_a_context_without_published_blocks_ends_at_once() -> None:
    queue = RetainingFreeQueue(FreeQueue(ids(range(1, 4))))
    queue.retain(ContextId(7), [], is_whole=True)
    (change,) = queue.take_changes()
    assert (queue.ids, change.num_blocks) == ([], 0)
