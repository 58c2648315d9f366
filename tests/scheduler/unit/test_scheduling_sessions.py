"""Client sessions: requests that keep their blocks while they wait for more input."""

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.common.request.finish import FinishReason
from services.common.request.sampling import SamplingParams
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import WaitReason
from services.scheduler.core.request import RequestStatus
from tests.scheduler.paged_model import continuation
from tests.scheduler.story import Story, prompt


def chunk(token_ids: list[int], max_tokens: int = 2) -> InputChunk:
    return InputChunk(token_ids, SamplingParams(max_tokens=max_tokens))


async def test_a_session_goes_on_from_its_blocks_without_its_last_token() -> None:
    story = Story()
    session = story.add("s", prompt(6), max_tokens=2, resumable=True)
    await story.steps(2)
    assert session.status is RequestStatus.WAITING_FOR_CHUNK
    first = continuation(prompt(6), 2)
    assert session.token_ids == [*prompt(6), first[0]], "nothing was computed of the last one"
    assert story.pool.core.block_tables(session.key) == ((1, 2),)
    story.scheduler.add_chunk(session, chunk(prompt(3, first=700)))
    told = await story.step()
    assert (told.new, told.start, told.granted) == (["s"], {"s": 7}, {"s": 3})
    assert told.blocks == {"s": [1, 2, 3]}
    held = [*prompt(6), first[0], *prompt(3, first=700)]
    assert told.tokens == {"s": continuation(held, 1)}


async def test_a_session_between_two_turns_keeps_its_place_and_cannot_be_preempted() -> None:
    story = Story(max_num_seqs=1)
    session = story.add("s", prompt(6), max_tokens=1, resumable=True)
    await story.step()
    story.add("other", prompt(6, first=500))
    told = await story.step()
    assert (told.granted, story.waiting) == ({}, ["other"])
    story.scheduler.add_chunk(session, None)
    assert session.finish_reason is FinishReason.ABORT
    assert (await story.step()).new == ["other"]


async def test_who_comes_later_overtakes_a_session_that_has_no_input() -> None:
    story = Story()
    session = story.add("s", prompt(6), max_tokens=1, resumable=True)
    await story.step()
    story.add("other", prompt(6, first=500))
    assert (await story.step()).new == ["other"]
    assert story.scheduler.queues.passed_over == {session: WaitReason.SESSION}


async def test_input_that_came_early_begins_the_next_turn_at_once() -> None:
    story = Story()
    session = story.add("s", prompt(6), max_tokens=1, resumable=True)
    story.scheduler.add_chunk(session, chunk(prompt(3, first=700), max_tokens=1))
    story.scheduler.add_chunk(session, None)
    await story.step()
    assert session.status is RequestStatus.WAITING
    await story.step()
    assert session.finish_reason is FinishReason.LENGTH, "the end came before the turn was over"
    await story.scheduler.flush()
    assert story.pool.core.num_free_blocks == 99


async def test_the_hash_of_a_block_with_the_dropped_token_is_never_published() -> None:
    """The last token of the first turn would fill a block, but it is dropped. The next input has
    another token at its position.
    """
    story = Story()
    session = story.add("s", prompt(7), max_tokens=1, resumable=True)
    await story.step()
    dropped = continuation(prompt(7), 1)
    story.scheduler.add_chunk(session, chunk(prompt(6, first=700)))
    await story.step()
    story.add("same", [*prompt(7), *dropped, 1, 2, 3], max_tokens=1)
    assert (await story.step()).start["same"] == 4, "only the first block is equal"


async def test_output_in_flight_at_the_end_of_a_turn_is_dropped() -> None:
    story = Story(async_scheduling=True)
    first, second = continuation(prompt(6), 2)
    session = story.add("s", prompt(6), stop=[first], resumable=True)
    told = await story.steps(3)
    assert told[1].tokens == {"s": [first]}
    assert second not in session.token_ids
    assert (session.num_computed_tokens, len(session.token_ids)) == (6, 6)


async def test_a_lost_pool_costs_a_session_computation_and_no_token() -> None:
    story = Story()
    session = story.add("s", prompt(6), max_tokens=2, resumable=True)
    await story.steps(2)
    story.lose()
    story.scheduler.add_chunk(session, chunk(prompt(3, first=700)))
    told = await story.step()
    assert (told.start, told.granted) == ({"s": 0}, {"s": 10})


async def test_two_sessions_do_not_wait_for_each_others_blocks() -> None:
    """No request runs. Neither session's next turn fits beside the blocks of the other session."""
    story = Story(num_blocks=9, max_model_len=32)
    sessions = [
        story.add(name, prompt(12, first=first), max_tokens=1, resumable=True)
        for name, first in (("a", 100), ("b", 500))
    ]
    await story.step()
    for session in sessions:
        story.scheduler.add_chunk(session, chunk(prompt(12, first=800)))
        story.scheduler.add_chunk(session, None)
    told = await story.step()
    assert (told.preempted, told.granted) == (["b"], {})
    assert (await story.step()).new == ["a"]
    await story.run()
    assert [session.num_tokens for session in sessions] == [26, 26]


async def test_a_session_that_holds_all_blocks_does_not_wait_for_itself() -> None:
    """Two states fill the pool. The next turn needs a third block before it frees one."""
    states = KVCacheGroup(AttentionType.STATE_SPACE, 4, mamba_cache_mode=MambaCacheMode.ALIGN)
    story = Story(num_blocks=3, groups=(states,), max_model_len=40)
    session = story.add("s", prompt(6), max_tokens=1, resumable=True)
    while session.status is not RequestStatus.WAITING_FOR_CHUNK:
        await story.step()
    story.scheduler.add_chunk(session, chunk(prompt(6, first=800)))
    story.scheduler.add_chunk(session, None)
    assert (await story.step()).preempted == ["s"]
    await story.run()
    assert session.is_finished


async def test_a_state_that_a_step_in_flight_overwrites_is_not_gone_on_from() -> None:
    """When the turn ends, a step in flight is computing a token that is dropped."""
    groups = (
        KVCacheGroup(AttentionType.FULL, 4),
        KVCacheGroup(AttentionType.STATE_SPACE, 4, mamba_cache_mode=MambaCacheMode.ALIGN),
    )
    story = Story(async_scheduling=True, groups=groups)
    stop, _ = continuation(prompt(6), 2)
    session = story.add("s", prompt(6), stop=[stop], resumable=True)
    while session.status is not RequestStatus.WAITING_FOR_CHUNK:
        await story.step()
    story.scheduler.add_chunk(session, chunk(prompt(3, first=700)))
    story.scheduler.add_chunk(session, None)
    told = await story.step()
    assert told.start == {"s": 4}, "the end of its first block, where a state is cached"
    await story.run()
    assert session.token_ids[9:] == continuation([*prompt(6), *prompt(3, first=700)], 2)


async def test_hashes_of_long_input_may_be_computed_apart_from_the_steps() -> None:
    story = Story()
    session = story.add("s", prompt(6), max_tokens=2, resumable=True)
    await story.steps(2)
    more = prompt(9, first=700)
    config = story.scheduler.config
    hashes = session.hashes_with(config.fingerprint, config.hash_block_size, more)
    sampling = SamplingParams(max_tokens=1)
    story.scheduler.add_chunk(session, InputChunk(more, sampling, block_hashes=hashes))
    assert len(session.block_hashes) == 4, "of 16 tokens"
    await story.step()
    whole = [*prompt(6), *continuation(prompt(6), 1), *more]
    story.add("same", [*whole, 1], max_tokens=1)
    assert (await story.step()).start["same"] == 16
