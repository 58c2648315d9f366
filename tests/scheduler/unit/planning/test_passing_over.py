"""Requests that wait for an adapter or a grammar are skipped, but keep their queue positions."""

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.common.request.finish import FinishReason
from services.scheduler.adapters.telemetry.own_waits import MAX_WAITS, OwnWait, OwnWaits, overlay
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.output import ModelRunnerOutput, WaitReason
from services.scheduler.core.request import Request
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from services.scheduler.core.timelines.phase_parts import ReasonStart
from tests.scheduler.engine_bench import Bench, running
from tests.scheduler.paged_model import continuation
from tests.scheduler.story import Story, names, prompt
from tests.scheduler.traced_story import TracedStory
from tests.scheduler.unit.telemetry.test_request_traces import queue, wait

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
    assert names(story.scheduler.queues.waiting) == ["b", "e"]
    assert names(story.scheduler.queues.passed_over) == ["b", "e"]
    add(story, "f")
    assert (await story.step()).new == ["f"]
    assert names(story.scheduler.running) == ["c", "d", "f"]
    story.scheduler.abort(story.scheduler.running.between(1, 2)[0])
    assert (await story.step()).new == ["b", "e"]
    assert not story.scheduler.queues.passed_over


async def test_a_plan_names_who_was_passed_over_and_why() -> None:
    story = Story(max_loras=1)
    add(story, "a", LLAMA)
    blocked = add(story, "b", OTHER)
    plan = await story.scheduler.schedule()
    assert plan.passed_over == {blocked: ADAPTERS}
    assert plan.wait_reason is ADAPTERS, "no request waits for anything else"


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
    assert late not in story.scheduler.queues.passed_over


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


async def test_a_wait_for_a_grammar_shows_though_no_step_is_planned() -> None:
    story = TracedStory()
    request = story.arrive("a", prompt(4), grammar=GrammarStatus.COMPILING, max_tokens=1)
    story.wait(2)
    story.scheduler.grammar_compiled(request)
    await story.to_the_end()
    assert story.waterfall("a").parts[0] == queue(0, 2, wait("grammar", 0, 2))


def test_own_reasons_lie_over_those_of_the_queue() -> None:
    holder = (7, "other")
    starts = [
        ReasonStart(0, "next_step"),
        ReasonStart(10, "budget", *holder),
        ReasonStart(30, "no_blocks", *holder),
    ]
    own = [OwnWait(5, 20, ADAPTERS), OwnWait(40, 50, ADAPTERS)]
    assert overlay(starts, own) == [
        ReasonStart(0, "next_step"),
        ReasonStart(5, "adapters"),
        ReasonStart(20, "budget", *holder),
        ReasonStart(30, "no_blocks", *holder),
        ReasonStart(40, "adapters"),
        ReasonStart(50, "no_blocks", *holder),
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


# Grammars


async def test_who_waits_for_its_grammar_is_overtaken_and_keeps_its_place() -> None:
    story = Story(max_num_seqs=2)
    waiting = add(story, "a", grammar=GrammarStatus.COMPILING)
    add(story, "b", max_tokens=1)
    plan = await story.scheduler.schedule()
    assert names(plan.new) == ["b"]
    assert plan.passed_over == {waiting: WaitReason.GRAMMAR}
    story.take_in(plan, story.model.run_plan(plan))
    story.scheduler.grammar_compiled(waiting)
    add(story, "c")
    assert (await story.step()).new == ["a", "c"]


async def test_while_all_wait_for_grammars_there_is_no_work() -> None:
    story = Story()
    first = add(story, "a", grammar=GrammarStatus.COMPILING)
    assert not story.scheduler.has_work
    assert names(story.scheduler.queues.passed_over) == ["a"]
    second = add(story, "b", grammar=GrammarStatus.COMPILING)
    await story.step()
    story.scheduler.abort(second)
    assert not story.scheduler.has_work
    story.scheduler.grammar_compiled(first)
    assert story.scheduler.has_work
    assert (await story.step()).new == ["a"]


async def test_a_grammar_that_cannot_be_compiled_ends_the_request_alone() -> None:
    story = Story()
    failing = [add(story, name, grammar=GrammarStatus.COMPILING) for name in "ab"]
    other = add(story, "c", max_tokens=2)
    reasons = [FinishReason.GRAMMAR_ERROR, FinishReason.ERROR]
    for request, reason in reversed(list(zip(failing, reasons, strict=True))):
        story.scheduler.grammar_compiled(request, f"{request.request_id}: no such rule", reason)
    told = await story.step()
    assert list(told.tokens) == ["c", "a", "b"], "in the order of their arrival"
    assert [request.finish_reason for request in failing] == reasons
    assert [request.error for request in failing] == ["a: no such rule", "b: no such rule"]
    await story.run()
    assert other.num_output_tokens == 2


async def test_a_refused_token_ends_the_request_and_is_delivered() -> None:
    story = Story()
    requests = [add(story, name, grammar=GrammarStatus.READY) for name in "ab"]
    for _ in range(3):
        await story.step()
    plan = await story.scheduler.schedule()
    output = story.model.run_plan(plan)
    refused = replace(output, refused_tokens={1: 0})
    update = story.scheduler.update_from_output(plan, refused)
    assert list(update.ended) == requests[1:]
    assert update.token_ids[1] == output.token_ids[1]
    assert requests[1].finish_reason is FinishReason.NO_CONFORMING_TOKEN
    assert names(story.scheduler.running) == ["a"]
    story.pool.core.check()


@pytest.mark.parametrize(
    ("errors", "reason", "message"),
    [
        (
            {},
            FinishReason.NO_CONFORMING_TOKEN,
            "no token of the vocabulary conforms to the grammar after 3 tokens of this answer",
        ),
        (
            {0: "too many states"},
            FinishReason.GRAMMAR_ERROR,
            "the grammar cannot be continued after 3 tokens of this answer: too many states",
        ),
    ],
)
async def test_an_end_by_its_grammar_says_why_and_brings_no_token(
    errors: dict[int, str], reason: FinishReason, message: str
) -> None:
    story = Story()
    failing, other = (add(story, name, grammar=GrammarStatus.READY) for name in "ab")
    for _ in range(3):
        await story.step()
    plan = await story.scheduler.schedule()
    output = story.model.run_plan(plan)
    output.token_ids = [[], *output.token_ids[1:]]
    refused = replace(output, refused_tokens={0: 0}, grammar_errors=errors)
    update = story.scheduler.update_from_output(plan, refused)
    assert [delivered.request for delivered in update] == [failing, other]
    assert update.token_ids[0] == []
    assert failing.finish_reason is reason
    assert failing.error == f"structured_outputs: {message}"
    assert other.finish_reason is None
    story.pool.core.check()


async def test_what_comes_after_the_end_may_be_refused() -> None:
    story = Story(num_speculative_tokens=2)
    request = add(story, "a", grammar=GrammarStatus.READY, max_tokens=1)
    plan = await story.scheduler.schedule()
    output = ModelRunnerOutput([[7, 8, 9]], draft_token_ids=[[]], refused_tokens={0: 1})
    story.scheduler.update_from_output(plan, output)
    assert (request.finish_reason, request.token_ids[4:]) == (FinishReason.LENGTH, [7])


async def test_the_engine_sleeps_until_a_grammar_is_compiled_and_tells_that_one_failed() -> None:
    async with running(Bench()) as bench:
        ready = bench.add("a", prompt(5), grammar=GrammarStatus.COMPILING)
        failing = bench.add("b", prompt(5, 500), grammar=GrammarStatus.COMPILING)
        await bench.until_idle()
        bench.engine.changes.grammar_compiled(failing, "no such rule")
        await bench.until_ended("b")
        await bench.until_idle()
        bench.engine.changes.grammar_compiled(ready)
        await bench.until_ended("a")
        assert bench.inbox.tokens == {"a": continuation(prompt(5), 8), "b": []}
        assert failing.finish_reason is FinishReason.ERROR


async def test_a_log_tells_grammars_and_what_they_refuse() -> None:
    story = Story()
    entries: list[Entry] = []
    story.scheduler = RecordingScheduler(story.config, story.pool, entries.append)
    first = add(story, "a", grammar=GrammarStatus.COMPILING)
    story.scheduler.grammar_compiled(first)
    second = add(story, "b", grammar=GrammarStatus.COMPILING)
    story.scheduler.grammar_compiled(second, "no such rule", FinishReason.GRAMMAR_ERROR)
    plan = await story.scheduler.schedule()
    assert story.scheduler.end_failed() == [second]
    output = replace(
        story.model.run_plan(plan), refused_tokens={0: 0}, grammar_errors={0: "too many states"}
    )
    story.scheduler.update_from_output(plan, output)
    assert [entry["call"] for entry in entries] == [
        *("add", "grammar_compiled", "add", "grammar_compiled", "schedule"),
        *("end_failed", "update_from_output"),
    ]
    replay = LogReplay(Header("stand-in", story.config))
    for entry in entries:
        assert await replay.replay_entry(Field(entry)) == []
    for wrong in ({"1": 0}, {"x": 0}, {"0": 2}):
        replay = LogReplay(Header("stand-in", story.config))
        for entry in entries[:-1]:
            await replay.replay_entry(Field(entry))
        with pytest.raises(ValueError, match="refused_tokens"):
            await replay.replay_entry(Field(entries[-1] | {"refused_tokens": wrong}))
    assert entries[-1]["ended"][0][1] == "grammar_error"
    replay = LogReplay(Header("stand-in", story.config))
    for entry in entries[:-1]:
        await replay.replay_entry(Field(entry))
    without = {name: value for name, value in entries[-1].items() if name != "grammar_errors"}
    assert [difference.field for difference in await replay.replay_entry(Field(without))] == [
        "ended"
    ]
