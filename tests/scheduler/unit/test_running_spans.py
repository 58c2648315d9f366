"""The spans of requests that have not ended, queried while the requests wait and run."""

from collections.abc import Awaitable, Callable

import pytest

from services.common.telemetry import names
from services.common.telemetry.span_collector import SpanCollector
from services.scheduler.core.ports import PoolLost
from tests.scheduler.seen_spans import Seen, seen
from tests.scheduler.story import prompt
from tests.scheduler.traced_story import SECOND, Bar, TracedStory, bar_of, trace_id_of

_OTHER_PARENT = 7


def so_far(story: TracedStory, name: str) -> list[Seen]:
    """A request's spans so far. An unsampled request's spans get the parent `_OTHER_PARENT`."""
    collector = SpanCollector("scheduler")
    traceparent = f"00-{trace_id_of(name):032x}-{_OTHER_PARENT:016x}-01"
    story.tracer.so_far(name, traceparent, collector.tracing)
    return seen(collector.take())


def tree(spans: list[Seen]) -> Bar:
    (root,) = [span for span in spans if span.name == names.SPAN_REQUEST]
    return bar_of(root, spans)


def running(spans: list[Seen]) -> list[str]:
    return [span.name for span in spans if span.attributes.get(names.ATTR_IS_RUNNING)]


async def test_a_request_in_the_queue_waits_for_what_the_steps_say() -> None:
    story = TracedStory(max_num_seqs=1)
    story.arrive("a", prompt(4), max_tokens=9)
    story.arrive("b", prompt(4, 500), sampled=False)
    await story.watched_step()
    story.wait(0.5)
    spans = so_far(story, "b")
    waited = Bar("wait.max_seqs", 0, 1.5)
    queue = Bar(names.SPAN_REQUEST_QUEUE, 0, 1.5, (waited,))
    assert tree(spans) == Bar(names.SPAN_REQUEST, 0, 1.5, (queue,))
    assert running(spans) == [names.SPAN_REQUEST, names.SPAN_REQUEST_QUEUE]
    (root,) = [span for span in spans if span.name == names.SPAN_REQUEST]
    assert root.parent == _OTHER_PARENT


async def test_a_prefill_has_its_chunks_and_the_one_in_flight() -> None:
    story = TracedStory(max_num_batched_tokens=4)
    story.arrive("a", prompt(12))
    await story.watched_step()
    await story.plan()
    story.wait(0.25)
    spans = so_far(story, "a")
    assert tree(spans).parts[1] == Bar(
        names.SPAN_REQUEST_PREFILL,
        0,
        1.25,
        (Bar(names.SPAN_PREFILL_CHUNK, 0, 1), Bar(names.SPAN_PREFILL_CHUNK, 1, 1.25)),
    )
    (root,) = [span for span in spans if span.name == names.SPAN_REQUEST]
    assert root.parent == 1  # the request is sampled, and its traceparent names this parent


async def test_a_decoding_says_how_many_tokens_it_has_so_far() -> None:
    story = TracedStory()
    story.arrive("a", prompt(4), max_tokens=9)
    for _ in range(4):
        await story.watched_step()
    spans = so_far(story, "a")
    (decode,) = [span for span in spans if span.name == names.SPAN_REQUEST_DECODE]
    assert (decode.start_unix_nanos, decode.end_unix_nanos) == (1 * SECOND, 4 * SECOND)
    assert decode.attributes[names.ATTR_NUM_OUTPUT_TOKENS] == 3
    assert decode.attributes[names.ATTR_IS_RUNNING] is True
    assert running(spans) == [names.SPAN_REQUEST, names.SPAN_REQUEST_DECODE]


async def test_what_has_ended_and_what_never_came_has_no_spans() -> None:
    story = TracedStory()
    story.arrive("a", prompt(4), max_tokens=1)
    await story.to_the_end()
    assert so_far(story, "a") == so_far(story, "b") == []


async def alone(story: TracedStory) -> None:
    story.arrive("a", prompt(8), max_tokens=4)


async def preempted(story: TracedStory) -> None:
    story.arrive("a", prompt(8), max_tokens=4)
    story.arrive("b", prompt(4, 500), max_tokens=3)
    story.arrive("c", prompt(4, 700), max_tokens=2)


async def paused(story: TracedStory) -> None:
    story.arrive("a", prompt(4), max_tokens=4)
    await story.watched_step()
    in_flight = await story.plan()
    story.tracer.paused()
    story.complete(in_flight)
    story.arrive("b", prompt(4, 500), max_tokens=2)
    story.wait(5)
    story.tracer.resumed()


async def recovered(story: TracedStory) -> None:
    story.arrive("a", prompt(4), max_tokens=4)
    await story.watched_step()
    await story.plan()
    story.wait(3)
    victims = list(story.scheduler.running)
    story.lose()
    story.tracer.lost(victims, PoolLost("the pool was lost"))
    story.wait(2)
    story.tracer.recovered()


class AskedStory(TracedStory):
    """A TracedStory that queries the spans of all requests each time its clock advances, and checks
    that the parts of each request add up to its time so far.
    """

    num_asked = 0

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        for request in self.scheduler.requests:
            bar = tree(so_far(self, request.request_id))
            assert bar.end * SECOND == self.now
            assert_adds_up(bar)
            self.num_asked += 1


def assert_adds_up(bar: Bar) -> None:
    if not bar.parts:
        return
    ends = [bar.start, *(part.end for part in bar.parts)]
    assert [part.start for part in bar.parts] == ends[:-1]
    assert ends[-1] == bar.end
    for part in bar.parts:
        assert_adds_up(part)


@pytest.mark.parametrize("tell", [alone, preempted, paused, recovered])
async def test_to_be_asked_for_changes_nothing_of_what_is_left_in_the_end(
    tell: Callable[[TracedStory], Awaitable[None]],
) -> None:
    config = {"max_num_batched_tokens": 8, "num_blocks": 4}
    asked, quiet = AskedStory(**config), TracedStory(**config)
    for story in (asked, quiet):
        await tell(story)
        await story.to_the_end()
    assert asked.num_asked > 3

    def left(story: TracedStory) -> list[object]:
        return [
            (span.name, span.start_unix_nanos, span.end_unix_nanos, span.attributes)
            for span in story.spans()
            if span.name != names.SPAN_STEP
        ]

    assert left(asked) == left(quiet)
