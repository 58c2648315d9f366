"""An answer does not depend on how its tokens are divided into deltas."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.request.finish import Finish, FinishReason
from services.common.request.sampling import SamplingParams
from services.common.request.seeds import child_seed
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.core.request.choice import Choice
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.generation import Answer
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.request import ClientRequest, EngineRequest, Prompt
from services.gateway.core.text.parsing.catalog import TOOL_FORMATS
from services.gateway.core.text.parsing.output_form import OutputForm
from services.gateway.core.text.stop_strings import StopPatterns
from tests.gateway.tiny_tokenizer import write_marked_tokenizer, write_tokenizer

EOS = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("model")))


def make_choice(tokenizer: HfTokenizer, **fields) -> Choice:
    sampling = SamplingParams(
        max_tokens=100,
        eos_token_ids=(EOS,),
        logprobs=fields.pop("logprobs", None),
        min_tokens=fields.pop("min_tokens", 0),
        stop_token_ids=fields.pop("stop_token_ids", ()),
    )
    request = ClientRequest("r", (Prompt([5]),), sampling, **fields)
    sequence = EngineRequest("r", [5], sampling, 0, "", 0)
    return Choice(0, tokenizer, request, sequence, StopPatterns(request.stop))


def encode(tokenizer: HfTokenizer, text: str) -> list[int]:
    return tokenizer._backend.encode(text, add_special_tokens=False).ids


def rows(token_ids: list[int]) -> LogprobRows:
    return LogprobRows.of(1, token_ids, [-1.0] * len(token_ids), [1] * len(token_ids))


def play(choice: Choice, groups: list[list[int]], finish: Finish, *, logprobs: bool) -> Answer:
    answer = Answer()
    for place, group in enumerate(groups):
        delta = Delta(token_ids=list(group), logprobs=rows(group) if logprobs else None)
        if place == len(groups) - 1:
            delta.finish = finish
        answer.add(choice.accept(delta))
        if choice.finish_reason is not None:
            break
    return answer


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("the stop🙂é", max_size=30),
    cuts=st.lists(st.integers(1, 5), max_size=30),
    stop=st.lists(st.sampled_from(["stop", "he", "🙂é", "x"]), max_size=2),
    logprobs=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_the_grouping_of_tokens_does_not_matter(
    tokenizer, text: str, cuts: list[int], stop: list[str], logprobs: bool, min_tokens: int
):
    tokens = [*encode(tokenizer, text), EOS]
    groups, rest = [], tokens
    for cut in cuts:
        groups.append(rest[:cut])
        rest = rest[cut:]
    groups = [group for group in [*groups, rest] if group]
    options = {
        "stop": tuple(stop),
        "logprobs": 0 if logprobs else None,
        "min_tokens": min(min_tokens, len(tokens)),
    }
    finish = Finish(FinishReason.STOP)
    grouped = play(make_choice(tokenizer, **options), groups, finish, logprobs=logprobs)
    single = play(
        make_choice(tokenizer, **options), [[t] for t in tokens], finish, logprobs=logprobs
    )
    assert (grouped.text, grouped.token_ids, grouped.offsets) == (
        single.text,
        single.token_ids,
        single.offsets,
    )
    assert grouped.logprobs == single.logprobs
    assert replace(grouped.last, text="", token_ids=[], offsets=None, logprobs=None) == replace(
        single.last, text="", token_ids=[], offsets=None, logprobs=None
    )


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [(FinishReason.STOP, '{"a": "1"}'), (FinishReason.LENGTH, '{"a": "1"')],
)
def test_only_a_call_that_the_model_ended_looks_complete(
    tokenizer, reason: FinishReason, arguments: str
):
    form = OutputForm(tools=TOOL_FORMATS["qwen3_coder"])
    tokens = encode(tokenizer, "<tool_call><function=f><parameter=a>1</parameter>")
    choice = make_choice(tokenizer, output_form=form)
    answer = play(choice, [tokens], Finish(reason), logprobs=False)
    assert [call.arguments for call in answer.message.calls] == [arguments]


def test_a_stop_string_ends_the_answer_at_its_token(tokenizer):
    tokens = encode(tokenizer, "a xyz b")
    choice = make_choice(tokenizer, stop=("xy",))
    answer = play(choice, [tokens], Finish(FinishReason.LENGTH), logprobs=False)
    assert answer.text == "a "
    assert answer.last.finish_reason is FinishReason.STOP
    assert answer.last.stop_reason == "xy"
    assert tokenizer.decode(answer.token_ids, skip_special_tokens=True) == "a xy"
    assert choice.num_output_tokens == len(answer.token_ids)


@pytest.mark.parametrize(("min_tokens", "text"), [(2, ""), (3, "xyz")])
def test_no_stop_string_ends_in_the_first_min_tokens(tokenizer, min_tokens: int, text: str):
    """The stop string occurs twice. Its first occurrence ends with the third token."""
    tokens = encode(tokenizer, "xyzxyz")
    assert len(tokens) == 6
    answer = play(
        make_choice(tokenizer, stop=("xyz",), min_tokens=min_tokens),
        [tokens],
        Finish(FinishReason.LENGTH),
        logprobs=False,
    )
    assert (answer.text, answer.last.stop_reason) == (text, "xyz")


def test_a_stop_string_of_byte_tokens_at_the_end_ends_the_answer(tmp_path):
    marked = load_tokenizer(write_marked_tokenizer(tmp_path))
    for last, finish in (([], FinishReason.LENGTH), ([EOS], FinishReason.STOP)):
        tokens = [*encode(marked, "the\n"), *last]
        answer = play(make_choice(marked, stop=("\n",)), [tokens], Finish(finish), logprobs=False)
        assert (answer.text, answer.last.stop_reason) == (" the", "\n")
        assert answer.last.finish_reason is FinishReason.STOP


def test_the_stop_token_is_not_shown_unless_asked_for(tokenizer):
    a, b = encode(tokenizer, "ab")
    finish = Finish(FinishReason.STOP, stop_token_id=b)
    hidden = make_choice(tokenizer, stop_token_ids=(b,))
    shown = make_choice(tokenizer, stop_token_ids=(b,), include_stop_str_in_output=True)
    assert play(hidden, [[a, b]], finish, logprobs=False).text == "a"
    assert play(shown, [[a, b]], finish, logprobs=False).text == "ab"


def test_the_first_of_n_has_the_seed_itself_and_all_differ():
    assert child_seed(42, 0) == 42
    assert child_seed(-1, 0) == 2**64 - 1
    seeds = {child_seed(seed, child) for seed in range(50) for child in range(50)}
    assert len(seeds) == 50 * 49 + 50


def test_the_bytes_of_tokens_are_the_text(tokenizer: HfTokenizer):
    text = "the 世界 🙂"
    joined = b"".join(tokenizer.token_bytes(token) for token in encode(tokenizer, text))
    assert joined.decode() == text
    assert tokenizer.token_bytes(10_000) == b""
