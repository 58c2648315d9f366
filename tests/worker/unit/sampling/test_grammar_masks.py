"""An output that a grammar constrains conforms to the grammar, for any logits."""

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from services.common.request import grammar_compiler
from services.common.request.sampling import SamplingParams
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind
from services.worker.sampling import grammar
from services.worker.sampling.grammar import GrammarMask, Grammars, model_compiler
from services.worker.sampling.sampler import Sampler, SamplerOutput
from tests.gateway.tiny_tokenizer import write_marked_tokenizer
from tests.structured_forms import FORMS, Form, of_grammar, of_regex, of_schema
from tests.worker.rank_threads import RankThread, on_ranks

DEMO = Path(__file__).parents[4] / "models" / "demo"
EOS = 2
VOCAB_SIZE = 4096 + 40
"""The tokenizer has 4096 tokens. A model may have more logits than that."""
LONGEST = 400
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
FREE = SamplingParams(seed=5)


def made_grammars() -> Grammars:
    return Grammars(partial(model_compiler, DEMO, VOCAB_SIZE, [EOS]))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return made_grammars()


def logits(position: int, num_rows: int = 1) -> torch.Tensor:
    row = np.random.default_rng(position).normal(0, 3, VOCAB_SIZE).astype(np.float32)
    return torch.from_numpy(np.tile(row, (num_rows, 1)))


def constrained(form: str, seed: int, **others: object) -> SamplingParams:
    wanted = FORMS[form].wanted
    return SamplingParams(
        seed=seed,
        eos_token_ids=(EOS,),
        structured_outputs=wanted,
        **others,  # type: ignore[arg-type]
    )


def continued(
    grammars: Grammars, params: SamplingParams, output: list[int], longest: int = LONGEST
) -> list[int]:
    """The whole output of a request that enters the batch with `output` as its first part."""
    sampler, prompt = Sampler(1, VOCAB_SIZE, grammars), [7, 8, 9]
    sampler.add(0, params, np.array(prompt + output, np.int32), len(prompt))
    output = list(output)
    while len(output) < longest and output[-1:] != [EOS]:
        sampled = sampler.sample(logits(len(output)), np.array([0]))
        assert not len(sampled.nan_rows)
        assert not len(sampled.refused_rows)
        output += sampled.token_ids.tolist()
    return output


def text_of(output: list[int]) -> str:
    assert output[-1] == EOS, "the output has not ended"
    return TOKENIZER.decode(output[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_conforms_for_any_logits(
    form: str, temperature: float, grammars: Grammars
) -> None:
    for seed in range(3 if temperature else 1):
        output = continued(grammars, constrained(form, seed, temperature=temperature), [])
        assert FORMS[form].accepts(text_of(output)), text_of(output)


@pytest.mark.parametrize("form", ["person", "words", "choices", "gbnf"])
def test_a_request_that_enters_again_with_its_output_goes_on_as_before(
    form: str, grammars: Grammars
) -> None:
    params = constrained(form, 1)
    whole = continued(grammars, params, [])
    others = made_grammars()  # the grammars of another worker
    for start in range(len(whole)):
        assert continued(others, params, whole[:start]) == whole


BOUNDED = of_schema(
    {
        "type": "array",
        "items": {"type": "string", "minLength": 3, "maxLength": 17, "pattern": "^[^z]+$"},
    }
)


@pytest.mark.parametrize("form", [*FORMS.values(), BOUNDED], ids=[*FORMS, "bounded"])
def test_masks_allow_exactly_the_tokens_that_conform(form: Form, grammars: Grammars) -> None:
    text = (DEMO / "tokenizer.json").read_text()
    one_by_one = LLTokenizer(text, n_vocab=VOCAB_SIZE, eos_token=[EOS], slices=[])
    rng = np.random.default_rng(4)
    for _ in range(3):
        matcher = grammars.matcher(form.wanted)
        oracle = LLMatcher(one_by_one, grammar_compiler._grammar(form.wanted), log_level=0)
        for _ in range(40):
            mask = matcher.compute_bitmask()
            assert mask == oracle.compute_bitmask()
            allowed = np.flatnonzero(
                np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            )
            token_id = int(rng.choice(allowed))
            if token_id == EOS:
                break
            matcher.consume_token(token_id)
            oracle.consume_token(token_id)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_marked", [False, True])
def test_a_checked_token_is_allowed_where_the_mask_has_it(
    form: str, *, is_marked: bool, grammars: Grammars, tmp_path: Path
) -> None:
    size = VOCAB_SIZE
    if is_marked:
        directory = write_marked_tokenizer(tmp_path)
        size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
        grammars = Grammars(partial(model_compiler, directory, size, []))
    words, output = np.zeros(-(-size // 32), np.int32), list[int]()
    rng = np.random.default_rng(5)
    for _ in range(20):
        checked = GrammarMask(grammars, FORMS[form].wanted, output, words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=size)
        unmasked = grammars.matcher(FORMS[form].wanted)
        unmasked.consume_tokens(output)
        allowed = [grammar._is_in_mask(unmasked, token_id) for token_id in range(size)]
        assert bits.astype(bool).tolist() == allowed
        output.append(int(rng.choice(np.flatnonzero(bits))))
        checked.append(output[-1])
        if checked.is_complete:
            return


@pytest.mark.parametrize("form", ["person", "words", "gbnf", "choices"])
@pytest.mark.parametrize("confidence", [0.0, 0.7, 1.0])
def test_greedy_tokens_are_the_same_drawn_before_their_masks(
    form: str, confidence: float, grammars: Grammars
) -> None:
    """Requests with log-probabilities draw after their masks are known, other requests before. Both
    must get the same tokens. With probability `confidence`, the logits of a position prefer a token
    of another output that conforms.
    """
    wanted = continued(grammars, constrained(form, 3), [])
    rng, sampler = np.random.default_rng(6), Sampler(2, VOCAB_SIZE, grammars)
    for row, others in enumerate(({}, {"logprobs": 0})):
        params = constrained(form, 1, temperature=0, **others)
        sampler.add(row, params, np.array([7], np.int32), 1)
    for position in range(60):
        both = logits(position, 2)
        if position < len(wanted) and rng.random() < confidence:
            both[:, wanted[position]] += 50
        tokens = sampler.sample(both, np.arange(2)).token_ids
        assert tokens[0] == tokens[1]
        if tokens[0] == EOS:
            break


def test_masks_are_made_again_while_tokens_drawn_first_do_not_conform(grammars: Grammars) -> None:
    (good,), (bad,) = TOKENIZER.encode("a").ids, TOKENIZER.encode("b").ids
    words = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    mask = GrammarMask(grammars, of_regex("a{1,400}").wanted, [], words)
    mask.draws_first = True
    assert mask.is_made, "the next token has its mask"

    def num_masks_after(token_id: int) -> int:
        mask.append(good)
        assert not mask.is_made
        assert mask.allows(token_id) is (token_id == good)
        count = int(mask.is_made)
        while mask.is_made:
            mask.append(good)
            count += mask.is_made
        return count

    assert [num_masks_after(token_id) for token_id in (good, bad, bad, bad, bad)] == [
        *(0, 1 + 3, 1 + 15, 1 + 63, 1 + 63)
    ]
    assert [num_masks_after(token_id) for token_id in (good, good, bad)] == [0, 0, 1 + 15]


def test_requests_without_a_form_sample_what_they_sample_alone(grammars: Grammars) -> None:
    params = [FREE, constrained("person", 1), FREE, constrained("words", 2)]
    mixed, alone = Sampler(4, VOCAB_SIZE, grammars), Sampler(1, VOCAB_SIZE)
    for row, of_row in enumerate(params):
        mixed.add(row, of_row, np.array([7], np.int32), 1)
    alone.add(0, FREE, np.array([7], np.int32), 1)
    for position in range(12):
        tokens = mixed.sample(logits(position, 4), np.arange(4)).token_ids
        (expected,) = alone.sample(logits(position), np.array([0])).token_ids
        assert tokens[0] == tokens[2] == expected


def sampled(grammars: Grammars, params: SamplingParams, output: str = "") -> SamplerOutput:
    sampler, token_ids = Sampler(1, VOCAB_SIZE, grammars), TOKENIZER.encode(output).ids
    sampler.add(0, params, np.array([7, *token_ids], np.int32), 1)
    return sampler.sample(logits(0), np.array([0]))


def test_a_complete_output_ends_though_it_lacks_tokens(grammars: Grammars) -> None:
    params = constrained("phone", 0, min_tokens=50)
    assert sampled(grammars, params, "+41 123-4567").token_ids.tolist() == [EOS]


def test_an_output_that_may_go_on_does_not_end_before_its_tokens(grammars: Grammars) -> None:
    params = SamplingParams(
        seed=0,
        eos_token_ids=(EOS,),
        min_tokens=50,
        logit_bias_token_ids=(EOS,),
        logit_bias_values=(100.0,),
        structured_outputs=of_regex("a+").wanted,
    )
    assert set(TOKENIZER.decode(sampled(grammars, params, "aa").token_ids.tolist())) == {"a"}


def test_a_row_without_tokens_after_other_parameters_is_refused_and_not_nan(
    grammars: Grammars,
) -> None:
    (dot,) = TOKENIZER.encode(".").ids
    output = sampled(grammars, constrained("phone", 0, allowed_token_ids=(dot,)))
    assert (output.refused_rows.tolist(), output.nan_rows.tolist()) == ([0], [])
    assert output.grammar_errors == {}


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_row_without_a_token_does_not_compile_its_form_again(
    *, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, params = made_grammars(), constrained("phone", 0)
    kept.prepare(FORMS["phone"].wanted)
    monkeypatch.setattr(kept, "_compile", None)
    if is_refused:
        params = replace(params, allowed_token_ids=(VOCAB_SIZE - 1,))
    sampler = Sampler(1, VOCAB_SIZE, kept)
    sampler.add(0, params, np.array([7], np.int32), 1)
    row = logits(0) if is_refused else torch.full((1, VOCAB_SIZE), torch.nan)
    output = sampler.sample(row, np.array([0]))
    assert len(output.refused_rows if is_refused else output.nan_rows) == 1


def test_logits_without_a_distribution_are_nan_with_a_form_too(grammars: Grammars) -> None:
    sampler = Sampler(1, VOCAB_SIZE, grammars)
    sampler.add(0, constrained("phone", 0), np.array([7], np.int32), 1)
    output = sampler.sample(torch.full((1, VOCAB_SIZE), torch.nan), np.array([0]))
    assert (output.refused_rows.tolist(), output.nan_rows.tolist()) == ([], [0])


def test_log_probabilities_are_those_of_what_the_form_leaves(grammars: Grammars) -> None:
    rows = sampled(grammars, constrained("choices", 0, logprobs=20)).logprobs[0]
    possible = np.exp(rows.logprobs[0, 1:].astype(np.float64))
    assert possible.sum() == pytest.approx(1, abs=1e-5)
    texts = [TOKENIZER.decode([token]) for token in rows.token_ids[0, 1:][possible > 0].tolist()]
    assert {text[:1] for text in texts} == {"y", "n", "a"}


def test_a_form_that_cannot_be_compiled_refuses_every_token(grammars: Grammars) -> None:
    wanted = StructuredOutputs(StructuredOutputsKind.REGEX, "(")
    output = sampled(grammars, SamplingParams(seed=0, structured_outputs=wanted))
    assert output.refused_rows.tolist() == [0]
    assert output.grammar_errors[0].startswith("regex: ")
    assert "unclosed group" in output.grammar_errors[0]


def test_an_output_continues_when_the_shared_automaton_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The automaton of this expression gets one more state with each token, and may have 20,000
    states, which several outputs exceed together.
    """
    shared, num_unshared = made_grammars(), 0
    unshared_matcher = shared.unshared_matcher

    def counted(wanted: StructuredOutputs) -> LLMatcher:
        nonlocal num_unshared
        num_unshared += 1
        return unshared_matcher(wanted)

    monkeypatch.setattr(shared, "unshared_matcher", counted)
    form = of_regex(".*a.{200}b.{200}c")
    for seed in range(4):
        params = SamplingParams(seed=seed, structured_outputs=form.wanted)
        output = continued(shared, params, [], longest=60)
        if num_unshared:
            assert output == continued(made_grammars(), params, [], longest=60)
            return
    raise AssertionError("the automaton did not reach its limit")


def test_a_form_that_takes_long_to_compile_is_not_compiled_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shared automaton has reached its limit, so the output ends with an error."""
    monkeypatch.setattr(grammar, "_MAX_SECONDS_IN_STEP", 0.0)
    params = SamplingParams(seed=0, structured_outputs=HOSTILE["many states"].wanted)
    shared = made_grammars()
    shared.prepare(HOSTILE["many states"].wanted)
    samplers = [Sampler(1, VOCAB_SIZE, shared) for _ in range(4)]
    compiled = shared._compile

    def elsewhere(wanted: StructuredOutputs) -> grammar._Compiled:
        assert threading.current_thread() is not threading.main_thread()
        return compiled(wanted)

    monkeypatch.setattr(shared, "_compile", elsewhere)
    for seed, sampler in enumerate(samplers):
        sampler.add(0, replace(params, seed=seed), np.array([7], np.int32), 1)
        for position in range(60):
            output = sampler.sample(logits(position), np.array([0]))
            if len(output.refused_rows):
                error = "lexer error: too many states: 20000 >= 20000"
                assert output.grammar_errors == {0: error}
                return
    raise AssertionError("the automaton did not reach its limit")


def is_served(grammars: Grammars, form: Form, seed: int) -> bool:
    sampler = Sampler(1, VOCAB_SIZE, grammars)
    params = SamplingParams(seed=seed, structured_outputs=form.wanted)
    sampler.add(0, params, np.array([7], np.int32), 1)
    outputs = (sampler.sample(logits(position), np.array([0])) for position in range(60))
    return not any(len(output.refused_rows) for output in outputs)


def test_a_full_automaton_of_a_slow_form_does_not_fail_later_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request that exceeds the limit ends with an error. Then a thread compiles the form
    again.
    """
    monkeypatch.setattr(grammar, "_MAX_SECONDS_IN_STEP", 0.0)
    shared, form = made_grammars(), HOSTILE["many states"]
    seed = next(seed for seed in range(10) if not is_served(shared, form, seed))
    deadline = time.monotonic() + 30
    while not is_served(shared, form, seed):
        assert time.monotonic() < deadline


def test_ranks_that_measured_other_times_refuse_the_same_tokens() -> None:
    """To rank 1 the form is slow, so it cannot replace the full automaton within a step."""
    params = SamplingParams(seed=0, structured_outputs=HOSTILE["many states"].wanted)

    def on_rank(joined: RankThread) -> list[object]:
        shared = Grammars(partial(model_compiler, DEMO, VOCAB_SIZE, [EOS]), joined.ranks)
        shared.prepare(HOSTILE["many states"].wanted)
        for wanted, kept in shared._cached.items():
            shared._cached[wanted] = replace(kept, seconds=joined.ranks.rank)
        sampler = Sampler(4, VOCAB_SIZE, shared)
        for row in range(4):
            sampler.add(row, replace(params, seed=row), np.array([7], np.int32), 1)
        for position in range(60):
            output = sampler.sample(logits(position, 4), np.arange(4))
            if len(output.refused_rows):
                assert output.grammar_errors.keys() == set(output.refused_rows.tolist())
                return [*output.token_ids.tolist(), output.refused_rows.tolist()]
        raise AssertionError("the automaton did not reach its limit")

    first, second = on_ranks(2, on_rank)
    assert first == second


def test_forms_that_take_long_to_compile_are_kept_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a preempted request resumes in a step, it needs its compiled grammar again."""
    kept = made_grammars()
    forms = [of_regex(f"a{{{number}}}").wanted for number in range(1, 41)]
    monkeypatch.setattr(grammar, "_MAX_SECONDS_IN_STEP", 0.0)
    for form in forms:
        kept.prepare(form)
    monkeypatch.setattr(kept, "_compile", None)
    for form in forms:
        kept.prepare(form)


HOSTILE = {
    "nested repeats": of_regex("((x{1,100}){1,100}){1,100}y"),
    "many states": of_regex(".*a.{200}b.{200}c"),
    "large classes": of_regex(r"(.{1,1000}y){1,60}"),
    "long text": of_schema({"type": "string", "minLength": 5000, "maxLength": 100_000}),
    "many properties": of_schema(
        {
            "type": "object",
            "properties": {f"key{i}": {"type": ["string", "null"]} for i in range(300)},
        }
    ),
    "ambiguous": of_grammar('start: s\ns: s s | "x"', lambda text: set(text) == {"x"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_form_makes_a_token_expensive(name: str, grammars: Grammars) -> None:
    """The output may end with an error instead, so that it does not delay others."""
    sampler, took = Sampler(1, VOCAB_SIZE, grammars), list[float]()
    params = SamplingParams(seed=0, structured_outputs=HOSTILE[name].wanted)
    sampler.add(0, params, np.array([7], np.int32), 1)
    for position in range(150):
        row = logits(position)
        began = time.thread_time()
        output = sampler.sample(row, np.array([0]))
        took.append(time.thread_time() - began)
        if len(output.refused_rows):
            break
    assert max(took) < 0.05


def test_a_tokenizer_with_marks_and_bytes_works_too(tmp_path: Path) -> None:
    directory = write_marked_tokenizer(tmp_path / "marked")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    grammars = Grammars(partial(model_compiler, directory, size, []))
    (end,) = tokenizer.encode("<|end|>", add_special_tokens=False).ids
    form = FORMS["words"]
    sampler, output = Sampler(1, size, grammars), list[int]()
    params = SamplingParams(seed=3, structured_outputs=form.wanted, eos_token_ids=(end,))
    sampler.add(0, params, np.array([5], np.int32), 1)
    while len(output) < 60 and output[-1:] != [end]:
        row = torch.from_numpy(np.random.default_rng(len(output)).normal(0, 3, (1, size)))
        output += sampler.sample(row.float(), np.array([0])).token_ids.tolist()
    assert output[-1] == end
    assert form.accepts(tokenizer.decode([5, *output[:-1]])[1:])


def test_the_only_possible_text_is_forced(grammars: Grammars) -> None:
    wanted = StructuredOutputs(StructuredOutputsKind.REGEX, "the tortoise (walks|runs) home")
    sampler = Sampler(2, VOCAB_SIZE, grammars)
    params = SamplingParams(temperature=0, eos_token_ids=(EOS,), structured_outputs=wanted)
    sampler.add(0, params, np.array([7, 8], np.int32), 2)
    sampler.add(1, FREE, np.array([7, 8], np.int32), 2)
    forced = sampler.forced_tokens(0)
    assert len(forced) >= 1
    assert "the tortoise ".startswith(TOKENIZER.decode(forced))
    assert sampler.forced_tokens(1) == []
