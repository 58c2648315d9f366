"""Finds stop strings in a stream of text. The first stop string that is complete ends the text, and
is removed from it, or shown completely if `include` is true.

Text that may be the start of a stop string is held back. If one character completes several stop
strings, the longest is used, so that the result does not depend on how the text is split.

The algorithm is Knuth, Morris and Pratt's (1977). The state of a stop string is the length of its
longest prefix with which the text ends. Each character updates the states in constant time on
average. The largest state is also the length of the held-back text.
"""

from collections.abc import Sequence


class StopPatterns:
    """The stop strings of one request, which all answers of the request share."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.patterns = [_Pattern(stop) for stop in sorted(stops, key=len, reverse=True)]
        self.first_characters = frozenset(stop[0] for stop in stops)


class StopStrings:
    """Finds the stop strings of a request in the text of one answer."""

    def __init__(self, stops: StopPatterns, *, include: bool) -> None:
        """If `include` is true, the stop string that ends the text is part of the shown text."""
        self._stops = stops
        self._include = include
        self._states = [0] * len(stops.patterns)
        self._held = ""

    def feed(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Adds text. Returns the text that can be shown, and the stop string that ended the text,
        or None if the text has not ended. If `may_end` is false, stop strings that are complete in
        this text do not end it.
        """
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text, None
        num_before = len(self._held)
        self._held += text
        for place, character in enumerate(text, start=num_before + 1):
            stop = self._advance(character)
            if stop is not None and may_end:
                shown = self._held[: place if self._include else place - len(stop)]
                self._held = ""
                return shown, stop
        num_shown = len(self._held) - max(self._states)
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        return shown, None

    def flush(self) -> str:
        """Returns the text that is still held back at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Updates every state with one character. Returns the longest stop string that the
        character completes, or None.
        """
        states = self._states
        complete = None
        for number, pattern in enumerate(self._stops.patterns):
            state = states[number]
            if state or pattern.text[0] == character:
                state = states[number] = pattern.next_state(state, character)
                if complete is None and state == len(pattern.text):
                    complete = pattern.text
        return complete


class _Pattern:
    """One stop string, with the part of its border table that was needed so far.

    `_borders[i]` is the length of the longest proper prefix of `text[:i + 1]` that is also a suffix
    of `text[:i + 1]`. The table grows with the largest state reached, so a long stop string costs
    nothing until the text resembles it.
    """

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0]

    def next_state(self, state: int, character: str) -> int:
        """Returns the state after one more character."""
        text, borders = self.text, self._borders
        while state and (state == len(text) or text[state] != character):
            state = borders[state - 1]
        if text[state] == character:
            state += 1
        if state > len(borders):
            self._grow()
        return state

    def _grow(self) -> None:
        text, borders = self.text, self._borders
        character, border = text[len(borders)], borders[-1]
        while border and text[border] != character:
            border = borders[border - 1]
        borders.append(border + (text[border] == character))
