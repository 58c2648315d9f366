"""Tokens to text, whatever the cut."""

import itertools
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.adapters.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.core.detokenizer import new_detokenizer
from tests.gateway.tiny_tokenizer import write_marked_tokenizer, write_tokenizer

# Every kind of character: of one to four bytes, combining, of no plane in particular.
TEXT = st.text(
    st.one_of(
        st.sampled_from("the stop 世界 é🙂👩‍👩‍👧 ١ ￼"), st.characters(exclude_categories=["Cs"])
    ),
    min_size=1,
    max_size=40,
)


@pytest.fixture(scope="module", params=[write_tokenizer, write_marked_tokenizer])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return load_tokenizer(request.param(tmp_path_factory.mktemp("model")))


def encode(tokenizer: HfTokenizer, text: str) -> list[int]:
    return tokenizer._backend.encode(text, add_special_tokens=False).ids


def pieces(tokenizer: HfTokenizer, prompt: list[int], ids: list[int], cuts: list[int]):
    detokenizer = new_detokenizer(tokenizer, prompt, skip_special_tokens=True)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    fed = [detokenizer.feed(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*fed, detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@example(text="\ufffd", cuts=[])
@given(text=TEXT, cuts=st.lists(st.integers(0, 200), max_size=30))
def test_any_text_in_any_cut_comes_out_whole(tokenizer: HfTokenizer, text: str, cuts: list[int]):
    ids = encode(tokenizer, text)
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    made = pieces(tokenizer, [], ids, cuts)
    assert "".join(made) == expected
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in made)


@settings(max_examples=100, deadline=None)
@given(text=TEXT, place=st.integers(0, 200))
def test_the_output_goes_on_where_the_prompt_ends(tokenizer: HfTokenizer, text: str, place: int):
    """Even inside a character: the output completes what a prompt of token ids began."""
    ids = encode(tokenizer, text)
    split = place % (len(ids) + 1)
    detokenizer = new_detokenizer(tokenizer, ids[:split], skip_special_tokens=True)
    text_after = detokenizer.feed(ids[split:]) + detokenizer.flush()
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith(text_after)


def test_a_character_of_four_bytes_waits_for_its_last(tokenizer: HfTokenizer):
    ids = encode(tokenizer, "a🙂b")
    detokenizer = new_detokenizer(tokenizer, [], skip_special_tokens=True)
    fed = [detokenizer.feed([token]) for token in ids]
    assert "".join(fed).strip() == "a🙂b"
    assert all(piece.strip() in ("", "a", "🙂", "b") for piece in fed)


def test_a_cut_character_at_the_end_is_dropped(tokenizer: HfTokenizer):
    ids = encode(tokenizer, "ab🙂")[:-1]
    detokenizer = new_detokenizer(tokenizer, [], skip_special_tokens=True)
    assert (detokenizer.feed(ids) + detokenizer.flush()).strip() == "ab"


def test_bytes_that_are_no_text_are_replaced_and_never_block(tokenizer: HfTokenizer):
    """A model may write anything; ten thousand stray bytes cost ten thousand steps, no more."""
    (stray,) = (t for t in range(300) if tokenizer.token_bytes(t) == b"\xff")
    detokenizer = new_detokenizer(tokenizer, [], skip_special_tokens=True)
    text = "".join(detokenizer.feed([stray]) for _ in range(10_000))
    text += detokenizer.feed(encode(tokenizer, "the"))
    assert text.rstrip().endswith("the")
    assert set(text.strip()) <= set("\ufffdthe ")


def test_special_tokens_are_left_out_or_kept(tmp_path: Path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    ids = [*encode(tokenizer, "the"), 0, *encode(tokenizer, " world")]
    without = new_detokenizer(tokenizer, [], skip_special_tokens=True)
    having = new_detokenizer(tokenizer, [], skip_special_tokens=False)
    assert without.feed(ids) == "the world"
    assert having.feed(ids) == "the<|end|> world"
