"""The token at which a sequence ends, and the finish reason."""

from typing import Any

from services.common.request.finish import Finish, FinishReason, append_until_end, ending_token_ids
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams

PROMPT = [5, 6, 5, 6]
EOS, STOP = 8, 9
STOPPED = Finish(FinishReason.STOP)
LENGTH = Finish(FinishReason.LENGTH)
REPETITION = Finish(FinishReason.REPETITION)
TWICE = RepetitionDetection(2, 1, 2)


def end_of(
    output: list[int], *, known: tuple[int, ...] = (), longest: int = 100, **sampling: Any
) -> tuple[list[int], Finish | None]:
    """Appends `output` to the prompt and the `known` tokens. Returns the part of `output` that was
    kept, and the Finish of the sequence.
    """
    params = SamplingParams(eos_token_ids=(EOS,), stop_token_ids=(EOS, STOP), **sampling)
    tokens, most, ending = [*PROMPT, *known], len(PROMPT) + longest, ending_token_ids(params)
    end = append_until_end(tokens, output, len(PROMPT), most, ending, params)
    return tokens[len(PROMPT) + len(known) :], end


def test_output_goes_on_without_a_reason_to_end() -> None:
    assert end_of([]) == ([], None)
    assert end_of([1, 2, 3], longest=4) == ([1, 2, 3], None)


def test_the_first_ending_token_ends_the_output() -> None:
    assert end_of([1, EOS, 2, STOP]) == ([1, EOS], STOPPED)
    assert end_of([1, STOP, 2, EOS]) == ([1, STOP], Finish(FinishReason.STOP, STOP))


def test_only_new_tokens_end_the_output() -> None:
    assert end_of([1], known=(EOS,)) == ([1], None)
    assert end_of([1, EOS], known=(EOS,)) == ([1, EOS], STOPPED)


def test_no_token_ends_the_output_before_min_tokens() -> None:
    assert end_of([1, EOS, 2, EOS], min_tokens=2) == ([1, EOS], STOPPED)
    assert end_of([1, EOS, 2, EOS], min_tokens=3) == ([1, EOS, 2, EOS], STOPPED)
    assert end_of([EOS], known=(1,), min_tokens=3) == ([EOS], None)


def test_the_length_ends_it_even_before_min_tokens() -> None:
    assert end_of([1, 2, 3, 4], longest=3, min_tokens=4) == ([1, 2, 3], LENGTH)


def test_an_ending_token_comes_before_length_and_length_before_repetition() -> None:
    assert end_of([1, EOS], longest=2) == ([1, EOS], STOPPED)
    assert end_of([1, 1], longest=2, repetition_detection=TWICE) == ([1, 1], LENGTH)


def test_the_token_that_completes_a_repetition_ends_the_output() -> None:
    repeated = end_of([7, 1, 2, 1, 2, 3], repetition_detection=TWICE)
    assert repeated == ([7, 1, 2, 1, 2], REPETITION)
    repeated = end_of([7, 7, 1, 1], repetition_detection=TWICE, min_tokens=3)
    assert repeated == ([7, 7, 1, 1], REPETITION)


def test_a_pattern_of_the_prompt_does_not_end_the_output() -> None:
    assert end_of([5, 6, 3], repetition_detection=TWICE) == ([5, 6, 3], None)


def test_requests_with_the_same_tokens_share_one_set() -> None:
    one, other = SamplingParams(stop_token_ids=(1, 2)), SamplingParams(eos_token_ids=(1, 2))
    assert ending_token_ids(one) is ending_token_ids(other)
