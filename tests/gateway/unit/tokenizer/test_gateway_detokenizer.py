"""The incremental detokenizer, whose text does not depend on how the tokens are split."""

import codecs
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.core.text.detokenizer import new_detokenizer
from tests.gateway.tiny_tokenizer import write_marked_tokenizer, write_tokenizer

# Texts with characters of one to four bytes, combining characters, and any others.
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
    """A prompt of token ids may end inside a character, which the output completes."""
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
    # If the character consists of byte tokens, it is sent only with the token that follows them.
    assert [piece.strip() for piece in fed if piece.strip()] in (["a", "🙂", "b"], ["a", "🙂b"])


def test_a_cut_character_at_the_end_is_dropped(tokenizer: HfTokenizer):
    ids = encode(tokenizer, "ab🙂")[:-1]
    detokenizer = new_detokenizer(tokenizer, [], skip_special_tokens=True)
    assert (detokenizer.feed(ids) + detokenizer.flush()).strip() == "ab"


def test_bytes_that_are_no_text_are_replaced_and_never_block(tokenizer: HfTokenizer):
    """Models may generate any bytes. The time for stray bytes is proportional to their number."""
    (stray,) = (t for t in range(300) if tokenizer.token_bytes(t) == b"\xff")
    detokenizer = new_detokenizer(tokenizer, [], skip_special_tokens=True)
    text = "".join(detokenizer.feed([stray]) for _ in range(10_000))
    text += detokenizer.feed(encode(tokenizer, "the"))
    assert text.rstrip().endswith("the")
    assert set(text.strip()) <= set("\ufffdthe ")


def whole(tokenizer: HfTokenizer, ids: list[int], *, skip_special_tokens: bool) -> str:
    """transformers' text of all tokens, without an incomplete character at the end."""
    raw = b"".join(
        tokenizer.token_bytes(token)
        for token in ids
        if not (skip_special_tokens and token in tokenizer.special_ids)
    )
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(raw)
    num_cut = len(decoder.getstate()[0])
    decode = tokenizer._tokenizer.decode
    if not num_cut or tokenizer.is_byte_level:
        text = decode(ids, skip_special_tokens=skip_special_tokens)
        return text[:-1] if num_cut else text
    # Each byte of the incomplete character is one token. Special tokens may follow each of these.
    while num_cut:
        num_cut -= ids[-1] in tokenizer.byte_values
        ids = ids[:-1]
    return decode(ids, skip_special_tokens=skip_special_tokens)


BYTES = st.lists(
    st.one_of(
        st.integers(0, 290),
        st.sampled_from(
            [[0xE4, 0xB8, 0xAD], [0xF0, 0x9F, 0x99, 0x82], [0xE4], [0xB8], [0xFF], [0x20], [0x41]]
        ),
        st.sampled_from(["end", "unknown"]),
    ),
    max_size=24,
)


@settings(max_examples=400, deadline=None)
@example(drawn=[[0xE4, 0xB8, 0xAD], [0xFF], 270], cuts=[], skips=True)
@example(drawn=[[0xE4], "end", [0xB8], [0xAD], 270], cuts=[], skips=True)
@example(drawn=[[0x20], [0x20], 270], cuts=[], skips=True)
@given(drawn=BYTES, cuts=st.lists(st.integers(0, 200), max_size=30), skips=st.booleans())
def test_any_tokens_in_any_cut_are_what_transformers_makes_of_them(
    tokenizer: HfTokenizer, drawn: list, cuts: list[int], skips: bool
):
    """Most tokens are single bytes, not always valid UTF-8. Runs of them are decoded together."""
    of_byte = {tokenizer.token_bytes(t): t for t in reversed(range(300)) if tokenizer.token_name(t)}
    special = {"end": 0, "unknown": 9999}
    ids: list[int] = []
    for item in drawn:
        match item:
            case str():
                ids.append(special[item])
            case list():
                ids += [of_byte[bytes([byte])] for byte in item]
            case _:
                ids.append(item)
    detokenizer = new_detokenizer(tokenizer, [], skip_special_tokens=skips)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    fed = "".join(detokenizer.feed(ids[a:b]) for a, b in itertools.pairwise(bounds))
    text = fed + detokenizer.flush()
    assert text == whole(tokenizer, ids, skip_special_tokens=skips)
    assert detokenizer.num_characters == len(text)


def test_a_run_of_bytes_is_decided_by_its_last(tmp_path: Path):
    """If one byte of a run of byte tokens is stray, `decode` replaces all characters of the run. So
    none of them may be sent before the run has ended.
    """
    tokenizer = load_tokenizer(write_marked_tokenizer(tmp_path))
    run = [token for token in encode(tokenizer, "世界") if token in tokenizer.byte_values]
    after = encode(tokenizer, "a")
    (stray,) = (t for t in range(300) if tokenizer.token_bytes(t) == b"\xff")
    for ids, text in ((run, "世界"), ([*run, stray], "\ufffd" * 7)):
        detokenizer = new_detokenizer(tokenizer, after, skip_special_tokens=True)
        assert [detokenizer.feed([token]) for token in ids] == [""] * len(ids)
        assert detokenizer.feed(after).rstrip("a").strip() == text


def test_bytes_are_told_from_text_that_looks_like_them(tmp_path: Path):
    """A tokenizer whose decoder has no byte fallback decodes the token <0x41> as this text."""
    directory = write_marked_tokenizer(tmp_path)
    path = directory / "tokenizer.json"
    described = json.loads(path.read_text())
    steps = described["decoder"]["decoders"]
    described["decoder"]["decoders"] = [s for s in steps if s["type"] != "ByteFallback"]
    path.write_text(json.dumps(described))
    tokenizer = load_tokenizer(directory)
    ids = [tokenizer._backend.token_to_id("<0x41>")]
    detokenizer = new_detokenizer(tokenizer, [], skip_special_tokens=True)
    assert detokenizer.feed(ids) + detokenizer.flush() == "<0x41>"
    assert tokenizer.token_bytes(ids[0]) == b"<0x41>"


def test_special_tokens_are_left_out_or_kept(tmp_path: Path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    ids = [*encode(tokenizer, "the"), 0, *encode(tokenizer, " world")]
    without = new_detokenizer(tokenizer, [], skip_special_tokens=True)
    having = new_detokenizer(tokenizer, [], skip_special_tokens=False)
    assert without.feed(ids) == "the world"
    assert having.feed(ids) == "the<|end|> world"
