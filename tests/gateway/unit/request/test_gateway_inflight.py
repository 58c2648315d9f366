"""What the reader of a sequence receives, even if replicas are lost."""

from itertools import count

from services.common.request.finish import Finish, FinishReason
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.gateway.core.request.delivery import received
from services.gateway.core.request.inflight import Mailbox, ended
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason

ROUTE = RoutingDecision("a", RoutingReason.ONLY, 1)


def make(**sampling) -> Mailbox:
    request = EngineRequest("r", [1, 2, 3, 4, 5], SamplingParams(**sampling), 0, "", 0)
    return Mailbox([request], count(), lambda inflight: inflight.release(), count().__next__)


def rows(*token_ids: int) -> LogprobRows:
    return LogprobRows.of(1, token_ids, [-1.0] * len(token_ids), [1] * len(token_ids))


def nothing() -> None:
    return None


async def test_deltas_are_merged_until_they_are_read() -> None:
    mailbox = make(max_tokens=9)
    (inflight,) = mailbox.inflights
    inflight.admitted(2)
    inflight.tokens([7])
    inflight.tokens([8, 9])
    ((index, delta),) = await received(mailbox)
    assert (index, delta.token_ids, delta.num_cached_tokens) == (0, [7, 8, 9], 2)
    inflight.finished(Finish(FinishReason.LENGTH))
    ((_, delta),) = await received(mailbox)
    assert delta.token_ids == []
    assert delta.finish == Finish(FinishReason.LENGTH)


async def test_prompt_logprobs_that_come_twice_are_told_once() -> None:
    """The first replica is lost in the middle of the prompt, which the next one begins anew."""
    mailbox = make(max_tokens=9, prompt_logprobs=0)
    (inflight,) = mailbox.inflights
    inflight.sent(nothing, ROUTE)
    inflight.prompt_logprobs(rows(2, 3))
    ((_, delta),) = await received(mailbox)
    assert delta.prompt_logprobs == rows(2, 3)
    inflight.sent(nothing, ROUTE)
    inflight.prompt_logprobs(rows(2))
    inflight.prompt_logprobs(rows(3, 4, 5))
    ((_, delta),) = await received(mailbox)
    assert delta.prompt_logprobs == rows(4, 5)


async def test_a_closed_mailbox_drops_what_lives_once() -> None:
    dropped: list[str] = []
    mailbox = make(max_tokens=9)
    (inflight,) = mailbox.inflights
    inflight.sent(lambda: dropped.append("gone"), ROUTE)
    mailbox.close()
    mailbox.close()
    assert dropped == ["gone"]


async def test_a_whole_answer_is_known_by_its_tokens() -> None:
    def end_of(tokens: list[int], **sampling) -> Finish | None:
        (inflight,) = make(**sampling).inflights
        inflight.output_token_ids = tokens
        return ended(inflight)

    assert end_of([], max_tokens=1) is None
    assert end_of([7], max_tokens=2) is None
    assert end_of([7, 8], max_tokens=2) == Finish(FinishReason.LENGTH)
    assert end_of([7, 0], max_tokens=9, eos_token_ids=(0,)) == Finish(FinishReason.STOP)
    assert end_of([7, 8], max_tokens=9, stop_token_ids=(8,)) == Finish(FinishReason.STOP, 8)
    assert end_of([7, 8], max_tokens=9, stop_token_ids=(8,), min_tokens=3) is None
    twice = RepetitionDetection(2, 1, 2)
    repeats = Finish(FinishReason.REPETITION)
    assert end_of([5, 7, 7], max_tokens=9, repetition_detection=twice) == repeats
    assert end_of([5, 7, 7, 8], max_tokens=9, repetition_detection=twice) is None
    assert end_of([5, 7, 7], max_tokens=9, repetition_detection=twice, min_tokens=4) is None
    length = Finish(FinishReason.LENGTH)
    assert end_of([5, 7, 7], max_tokens=3, repetition_detection=twice) == length
