"""The expected answers to requests. The tokens of an answer depend only on its own request, not on
other requests or events.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.request.finish import FinishReason
from services.common.request.sampling import SamplingParams
from services.scheduler.core.kv_transfer import KVLoadFailurePolicy
from services.scheduler.core.request import Request
from tests.scenarios.stand_in_grammar import StandInGrammar
from tests.scheduler.paged_model import continuation, next_token
from tests.worlds.world import Arrival, Incident, World


def next_tokens(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The model's next `num_tokens` tokens after `token_ids`, without any stop condition."""
    return continuation(token_ids, num_tokens)


@dataclass(frozen=True, slots=True)
class ExpectedTurn:
    """The output tokens of a turn of a session (request with input in turns), and why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def expected_turns(arrival: Arrival, max_model_len: int) -> list[ExpectedTurn]:
    """The turns of a session, in order. Other requests have one turn."""
    known = list(arrival.token_ids)
    num_prompt, sampling = arrival.num_prompt_tokens, arrival.sampling
    turns = [_turn(known, num_prompt, sampling, arrival.grammar, max_model_len)]
    for turn in arrival.turns:
        # A turn's last output token is not computed, and not part of the next turn's input.
        known += [*turns[-1].token_ids[:-1], *turn.token_ids]
        turns.append(_turn(known, len(known), turn.sampling, None, max_model_len))
    return turns


def _turn(
    known: Sequence[int],
    num_prompt: int,
    sampling: SamplingParams,
    grammar: StandInGrammar | None,
    max_model_len: int,
) -> ExpectedTurn:
    token_ids, begin = list(known), len(known)
    longest = max_model_len
    if sampling.max_tokens is not None:
        longest = min(longest, num_prompt + sampling.max_tokens)
    while True:
        position, token = len(token_ids) - num_prompt, next_token(token_ids)
        breaks = grammar is not None and position == grammar.break_at
        if grammar is not None:
            token = grammar.sample(token, position)
        token_ids.append(token)
        reason = _end(token_ids, num_prompt, sampling, longest)
        if breaks:
            reason = FinishReason.NO_CONFORMING_TOKEN
        if reason is not None:
            return ExpectedTurn(tuple(token_ids[begin:]), reason)


def _end(
    token_ids: Sequence[int], num_prompt: int, sampling: SamplingParams, longest: int
) -> FinishReason | None:
    repetition = sampling.repetition_detection
    is_long_enough = len(token_ids) - num_prompt >= sampling.min_tokens
    if is_long_enough and token_ids[-1] in (*sampling.eos_token_ids, *sampling.stop_token_ids):
        return FinishReason.STOP
    if len(token_ids) >= longest:
        return FinishReason.LENGTH
    if is_long_enough and repetition and repetition.found_at_end(token_ids, num_prompt):
        return FinishReason.REPETITION
    return None


def check_answer(
    world: World, arrival: Arrival, request: Request, delivered: Sequence[int]
) -> None:
    """Asserts that the delivered tokens of an ended request are the expected ones up to its end,
    and that its finish reason is possible.
    """
    turns = expected_turns(arrival, world.config.max_model_len)
    ends, whole = [0], list[int]()
    for turn in turns:
        whole += turn.token_ids
        ends.append(len(whole))
    assert delivered == whole[: len(delivered)], arrival.name
    reason = request.finish_reason
    match reason:
        case FinishReason.ABORT if arrival.close_at is not None:
            pass
        case FinishReason.ABORT:
            is_paused = any(event.incident is Incident.PAUSE_ABORT for event in world.events)
            assert arrival.abort_at is not None or is_paused
        case FinishReason.QUEUE_TIMEOUT:
            assert arrival.must_start_within is not None
            assert not delivered
        case FinishReason.NAN_IN_LOGITS:
            assert arrival.nan_after is not None
        case FinishReason.STEP_FAILED:
            assert arrival.breaks_workers_at is not None
        case FinishReason.KV_LOAD_FAILED:
            assert world.config.kv_load_failure_policy is KVLoadFailurePolicy.FAIL
        case FinishReason.GRAMMAR_ERROR:
            assert arrival.grammar is not None
            assert arrival.grammar.error
            assert not delivered
        case FinishReason.ERROR if arrival.items and len(delivered) not in ends[1:]:
            # A preempted request may end in this way if another request has the same item (such as
            # an image) in another size.
            assert "has another size" in request.error
        case _:
            assert len(delivered) in ends[1:], arrival.name
            turn = turns[ends.index(len(delivered)) - 1]
            assert reason is turn.finish_reason, arrival.name
