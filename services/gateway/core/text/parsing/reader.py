"""A text that arrives in pieces, and the operations with which readers of formats read it."""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""An operation that reads text. It is a generator, which yields when it needs more text, and
returns the operation's result.
"""
Take = Callable[[str], None]
"""A function that receives text in pieces."""

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"{}\[\]]+')
"""Matches JSON text outside of strings, up to the next quote or bracket."""
_IN_STRING = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
"""Maps a quote character to a pattern that matches the content of a string in such quotes, up to
the next quote or backslash.
"""
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")


class Malformed(Exception):
    """The text does not match its format."""


class Reader:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._has_ended = False
        self.was_cut = False
        """Whether the text was cut before the model ended it."""
        self._recorded: list[str] | None = None

    def record(self) -> None:
        """Starts to record the text that is read, which is content if it turns out not to be a
        call.
        """
        self._recorded = []

    def recorded(self) -> str:
        """Ends the recording. Returns the recorded text."""
        recorded, self._recorded = self._recorded or [], None
        return "".join(recorded)

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, *, is_cut: bool = False) -> None:
        self._has_ended = True
        self.was_cut = is_cut

    def peek(self, count: int) -> Reading[str]:
        """Returns the next `count` characters, or fewer at the text's end, without reading them."""
        while len(self._text) - self._at < count and not self._has_ended:
            yield
        return self._text[self._at : self._at + count]

    def skip(self, count: int) -> None:
        """Reads `count` characters, which a `peek` must have returned before."""
        self._pass(self._at + count)

    def unread(self, text: str) -> None:
        """Undoes the reading of `text`, so that it is read again next."""
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:
            self._text = text + self._text[self._at :]
            self._at = 0

    def skip_space(self) -> Reading[str]:
        """Skips white space. Returns the next character without reading it, or "" at the text's
        end.
        """
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._pass(match.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if self._has_ended:
                return ""
            yield

    def starts_with(self, *literals: str) -> Reading[str]:
        """If the text continues with one of these literals, reads and returns it. Otherwise returns
        an empty string. If one literal is a prefix of another, the longer literal must be first.
        """
        while True:
            ahead = self._text[self._at : self._at + max(map(len, literals))]
            for literal in literals:
                if ahead.startswith(literal):
                    self._pass(self._at + len(literal))
                    return literal
                if not self._has_ended and literal.startswith(ahead):
                    break
            else:
                return ""
            yield

    def until(self, markers: tuple[str, ...], take: Take) -> Reading[str]:
        """Reads up to and including the first occurrence of any marker. The text before it is
        passed to `take`. Returns the marker, or "" if the text ended without one.
        """
        pattern, starts = _search(markers)
        while True:
            match = pattern.search(self._text, self._at)
            if match is not None:
                self._take_to(match.start(), take)
                self._pass(match.end())
                return match[0]
            held = 0 if self._has_ended else _num_held(self._text, self._at, markers, starts)
            self._take_to(len(self._text) - held, take)
            if self._has_ended:
                return ""
            yield

    def text_until(self, markers: tuple[str, ...]) -> Reading[tuple[str, str]]:
        """Like `until`, but returns the text before the marker, and the marker."""
        pieces: list[str] = []
        marker = yield from self.until(markers, pieces.append)
        return "".join(pieces), marker

    def rest(self, take: Take) -> Reading[None]:
        """Passes all remaining text to `take`."""
        while True:
            self._take_to(len(self._text), take)
            if self._has_ended:
                return
            yield

    def matching(self, pattern: re.Pattern[str], take: Take) -> Reading[str]:
        """Reads the longest text that a pattern of the form `[...]*` or `[...]+` matches, and
        passes it to `take`. Returns the next character without reading it, or "" at the text's end.
        """
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None:
                self._take_to(match.end(), take)
            if self._at < len(self._text):
                return self._text[self._at]
            if self._has_ended:
                return ""
            yield

    def json_value(self, take: Take) -> Reading[None]:
        """Reads one JSON value and passes its text to `take`, without a complete check of the
        syntax. Raises Malformed if the next text is no value, or the text ends inside the value.
        """
        first = yield from self.skip_space()
        if first == '"':
            yield from self.quoted(take)
        elif first in ("{", "["):
            yield from self._json_nested(take)
        else:
            yield from self._json_scalar(take)

    def json_text(self) -> Reading[str]:
        """Reads one JSON value and returns its text."""
        pieces: list[str] = []
        yield from self.json_value(pieces.append)
        return "".join(pieces)

    def _json_nested(self, take: Take) -> Reading[None]:
        depth = 0
        while True:
            character = yield from self.matching(_PLAIN, take)
            if not character:
                raise Malformed
            if character == '"':
                yield from self.quoted(take)
                continue
            depth += 1 if character in "{[" else -1
            self._take_to(self._at + 1, take)
            if depth == 0:
                return

    def quoted(self, take: Take) -> Reading[None]:
        """Reads a quoted string and passes it to `take`. The next character must be the quote. A
        backslash escapes the next character. Raises Malformed if the text ends inside the string.
        """
        quote = self._text[self._at]
        self._take_to(self._at + 1, take)
        while True:
            character = yield from self.matching(_IN_STRING[quote], take)
            if not character:
                raise Malformed
            if character == quote:
                self._take_to(self._at + 1, take)
                return
            yield from self.peek(2)
            self._take_to(min(self._at + 2, len(self._text)), take)

    def _json_scalar(self, take: Take) -> Reading[None]:
        pieces: list[str] = []
        yield from self.matching(_SCALAR, pieces.append)
        if not pieces:
            raise Malformed
        take("".join(pieces))

    def _take_to(self, end: int, take: Take) -> None:
        if end > self._at:
            take(self._text[self._at : end])
            self._pass(end)

    def _pass(self, end: int) -> None:
        if self._recorded is not None:
            self._recorded.append(self._text[self._at : end])
        self._at = end


def drop(_text: str) -> None:
    """A `Take` that ignores the text."""


@lru_cache(64)
def _search(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    """Returns a pattern that matches any marker, and the set of all proper prefixes of markers."""
    ordered = sorted(markers, key=len, reverse=True)
    starts = frozenset(marker[:count] for marker in markers for count in range(1, len(marker)))
    return re.compile("|".join(map(re.escape, ordered))), starts


def _num_held(text: str, at: int, markers: tuple[str, ...], starts: frozenset[str]) -> int:
    """Returns the number of characters at the end of the text that may be the start of a marker."""
    longest = min(max(map(len, markers)) - 1, len(text) - at)
    for count in range(longest, 0, -1):
        if text[-count:] in starts:
            return count
    return 0
