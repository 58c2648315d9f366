"""Requests that wait for a reason of their own: others overtake them, they keep their places."""

from hashlib import sha256
from typing import Any

import pytest

from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.scheduler.adapters.own_waits import MAX_WAITS, OwnWait, OwnWaits, overlay
from services.scheduler.core.output import WaitReason
from services.scheduler.core.recorder import Entry, RecordingScheduler
from services.scheduler.core.request import Request
from tests.scheduler.story import Story, names, prompt
from tests.scheduler.traced_story import TracedStory
from tests.scheduler.unit.test_request_traces import queue, wait

ADAPTERS = WaitReason.ADAPTERS
LLAMA, OTHER = (sha256(name).digest() for name in (b"llama", b"other"))


def add(story: Story, name: str, adapter: bytes = b"", **fields: Any) -> Request:
    first = 100 + 10 * len(story.scheduler.requests)
    return story.add(name, prompt(4, first), adapter_digest=adapter, **fields)


async def test_who_waits_for_an_adapter_is_overtaken_and_keeps_its_place() -> None:
    story = Story(max_loras=1)
    add(story, "a", LLAMA, max_tokens=2)
    add(story, "b", OTHER)
    add(story, "c")
    add(story, "d", LLAMA)
    add(story, "e", OTHER)
    told = await story.step()
    assert told.new == ["a", "c", "d"]
    assert told.round_trips == 2, "one look-up, one admission"
    assert names(story.scheduler.waiting) == ["b", "e"]
    assert names(story.scheduler.passed_over) == ["b", "e"]
    add(story, "f")
    assert (await story.step()).new == ["f"]
    assert names(story.scheduler.running) == ["c", "d", "f"]
    story.scheduler.abort(story.scheduler.running.between(1, 2)[0])
    assert (await story.step()).new == ["b", "e"]
    assert not story.scheduler.passed_over


async def test_a_plan_names_who_was_passed_over_and_why() -> None:
    story = Story(max_loras=1)
    add(story, "a", LLAMA)
    blocked = add(story, "b", OTHER)
    plan = await story.scheduler.schedule()
    assert plan.passed_over == {blocked: ADAPTERS}
    assert plan.wait_reason is ADAPTERS, "nobody waits for anything else"


async def test_who_is_not_reached_is_not_passed_over() -> None:
    story = Story(max_loras=1, max_num_seqs=2)
    add(story, "a", LLAMA)
    add(story, "b")
    add(story, "c", OTHER)
    plan = await story.scheduler.schedule()
    assert plan.passed_over == {}
    assert plan.wait_reason is WaitReason.MAX_SEQS


async def test_one_that_lacks_blocks_still_stops_those_behind_it() -> None:
    story = Story(max_loras=1, num_blocks=6)
    add(story, "a", LLAMA)
    blocked = add(story, "b", OTHER)
    story.add("c", prompt(20, 500))
    late = add(story, "d", OTHER)
    add(story, "e")
    plan = await story.scheduler.schedule()
    assert names(plan.new) == ["a"]
    assert plan.wait_reason is WaitReason.NO_BLOCKS
    assert plan.passed_over == {blocked: ADAPTERS}
    assert late not in story.scheduler.passed_over


async def test_a_long_queue_of_them_does_not_hide_who_is_ready() -> None:
    story = Story(max_loras=1)
    add(story, "a", LLAMA)
    for number in range(100):
        add(story, f"b{number}", OTHER)
    add(story, "c")
    assert (await story.step()).new == ["a", "c"]


async def test_an_adapter_loaded_again_finds_nothing_of_the_old_one() -> None:
    story = Story(max_loras=2)
    for adapter, hit in ((LLAMA, 0), (LLAMA, 8), (OTHER, 0), (b"", 0)):
        request = story.add("a", prompt(10), adapter_digest=adapter, max_tokens=1)
        await story.run()
        assert request.num_cached_tokens == hit


async def test_a_log_tells_adapters_and_who_was_passed_over() -> None:
    story = Story(max_loras=1)
    entries: list[Entry] = []
    story.scheduler = RecordingScheduler(story.config, story.pool, entries.append)
    add(story, "a", LLAMA)
    add(story, "b", OTHER)
    await story.step()
    assert entries[0]["adapter"] == LLAMA.hex()
    assert entries[2]["passed_over"] == {"2": "adapters"}
    replay = LogReplay(Header("stand-in", story.config))
    for entry in entries:
        assert await replay.replay_entry(Field(entry)) == []
    with pytest.raises(ValueError, match="adapter must be a SHA-256 in hexadecimal"):
        await LogReplay(Header("stand-in", story.config)).replay_entry(
            Field(entries[0] | {"adapter": "ab"})
        )


# Traces


async def test_the_trace_of_a_request_shows_its_own_reason() -> None:
    story = TracedStory(max_loras=1, max_num_seqs=2)
    story.arrive("a", prompt(4), adapter_digest=LLAMA, max_tokens=4)
    story.arrive("b", prompt(4, 500), adapter_digest=OTHER, max_tokens=1)
    await story.watched_step()
    story.arrive("c", prompt(4, 600), max_tokens=2)
    await story.to_the_end()
    bar = story.waterfall("b").parts[0]
    assert bar == queue(
        0, 4, wait("adapters", 0, 2), wait("max_seqs", 2, 3), wait("adapters", 3, 4)
    )
    assert story.waterfall("c").parts[0] == queue(1, 1)


def test_own_reasons_lie_over_those_of_the_queue() -> None:
    starts = [(0, "next_step"), (10, "budget"), (30, "no_blocks")]
    own = [OwnWait(5, 20, ADAPTERS), OwnWait(40, 50, ADAPTERS)]
    assert overlay(starts, own) == [
        (0, "next_step"),
        (5, "adapters"),
        (20, "budget"),
        (30, "no_blocks"),
        (40, "adapters"),
        (50, "no_blocks"),
    ]
    assert overlay(starts, []) == starts


def test_waits_of_one_request_are_forgotten_one_by_one() -> None:
    story, waits = Story(), OwnWaits()
    request = add(story, "a")
    for now in range(0, 4 * MAX_WAITS, 2):
        waits.planned({request: ADAPTERS}, now)
        waits.planned({}, now + 1)
    waits.planned({request: ADAPTERS}, 5000)
    kept = waits.forget(request, 6000)
    assert len(kept) == MAX_WAITS
    assert kept[-1] == OwnWait(5000, 6000, ADAPTERS)
    assert not waits.forget(request, 7000)
