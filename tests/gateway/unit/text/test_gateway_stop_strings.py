"""Stop strings in text that arrives in pieces."""

import time

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.text.stop_strings import StopPatterns, StopStrings

WORD = st.text("ab", min_size=1, max_size=4)


def run(
    stops: list[str], pieces: list[str], num_least: int = 0, *, include: bool = False
) -> tuple[str, str | None]:
    """Feeds the pieces. The first `num_least` pieces cannot end the text."""
    watcher = StopStrings(StopPatterns(stops), include=include)
    shown = ""
    for number, piece in enumerate(pieces):
        text, stop = watcher.feed(piece, may_end=number >= num_least)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + watcher.flush(), None


def oracle(stops: list[str], text: str, first: int = 0) -> tuple[str, str | None]:
    """Finds the first position after `first` at which a stop string ends. Returns the text before
    the longest stop string that ends there, and this stop string.
    """
    for end in range(first + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(WORD, min_size=1, max_size=3), st.lists(WORD, max_size=12), st.integers(0, 4))
def test_the_cut_of_the_text_does_not_matter(stops: list[str], pieces: list[str], num_least: int):
    least = "".join(pieces[:num_least])
    assert run(stops, pieces, num_least) == oracle(stops, "".join(pieces), len(least))


@given(st.lists(WORD, min_size=1, max_size=3), st.lists(WORD, max_size=12))
def test_nothing_is_held_back_that_cannot_become_a_stop_string(stops: list[str], pieces: list[str]):
    watcher, text, shown = StopStrings(StopPatterns(stops), include=False), "", ""
    for piece in pieces:
        text += piece
        new, stop = watcher.feed(piece)
        shown += new
        if stop is not None:
            return
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_is_found_across_pieces():
    assert run(["STOP"], ["a S", "T", "OP b"]) == ("a ", "STOP")


def test_it_may_begin_before_the_text_may_end():
    assert run(["STOP"], ["a ST", "OP b"], 1) == ("a ", "STOP")
    assert run(["STOP"], ["a STOP", " b STOP c"], 1) == ("a STOP b ", "STOP")


def test_what_only_begins_like_one_is_shown_in_the_end():
    assert run(["STOP"], ["a ST"]) == ("a ST", None)


def test_it_stays_in_the_text_on_request():
    assert run(["STOP"], ["a S", "TOP b"], include=True) == ("a STOP", "STOP")


def test_time_is_linear_in_the_text_however_long_the_stop_strings_are():
    others = ["c" * 1000 + str(number) for number in range(63)]
    stops = StopPatterns(["a" * 1023 + "b", *others])
    watcher = StopStrings(stops, include=False)
    began = time.process_time()
    for _ in range(900):
        assert watcher.feed("aaaa")[1] is None
    # A comparison with every prefix of every stop string would take 11 s.
    assert time.process_time() - began < 2
