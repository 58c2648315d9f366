"""What requests must be answered, whatever happens to others: a function of the request alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.cli.replay.stand_in_grammar import StandInGrammar
from services.common.finish_reason import FinishReason
from services.common.sampling import SamplingParams
from tests.scheduler.paged_model import continuation, next_token
from tests.worlds.world import Arrival


def next_tokens(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """What the model says after these tokens, if nothing ends it."""
    return continuation(token_ids, num_tokens)


@dataclass(frozen=True, slots=True)
class ExpectedTurn:
    """The output of one turn, and why it ends."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def expected_turns(arrival: Arrival, max_model_len: int) -> list[ExpectedTurn]:
    """The turns of a session, in order, or the only one of another request."""
    known = list(arrival.token_ids)
    num_prompt, sampling = arrival.num_prompt_tokens, arrival.sampling
    turns = [_turn(known, num_prompt, sampling, arrival.grammar, max_model_len)]
    for turn in arrival.turns:
        # The last token of an answer was never computed, and is not part of what follows.
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
            reason = FinishReason.ERROR
        if reason is not None:
            return ExpectedTurn(tuple(token_ids[begin:]), reason)


def _end(
    token_ids: Sequence[int], num_prompt: int, sampling: SamplingParams, longest: int
) -> FinishReason | None:
    repetition = sampling.repetition_detection
    if token_ids[-1] in (*sampling.eos_token_ids, *sampling.stop_token_ids):
        return FinishReason.STOP
    if len(token_ids) >= longest:
        return FinishReason.LENGTH
    if (
        repetition is not None
        and len(token_ids) - num_prompt >= sampling.min_tokens
        and repetition.found_at_end(token_ids, num_prompt)
    ):
        return FinishReason.REPETITION
    return None
