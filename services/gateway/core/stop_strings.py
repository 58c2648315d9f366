"""Stop strings in a stream of text: found wherever the stream is cut, never shown by accident.

Text that may turn out to be the start of a stop string is held back. A match is the one that ends
first, and of those the longest, so that the result does not depend on how the text was cut.
"""

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one sequence."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """`include` leaves the stop string itself in the text."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown, and the stop string that ended it, if one did."""
        self._held += text
        match = self._first_match()
        if match is None:
            keep = self._num_held_back()
            shown = self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
            return shown, None
        end, stop = match
        shown = self._held[: end if self._include else end - len(stop)]
        self._held = ""
        return shown, stop

    def flush(self) -> str:
        """What is held back, once nothing can follow."""
        held, self._held = self._held, ""
        return held

    def _first_match(self) -> tuple[int, str] | None:
        found = [
            (start + len(stop), order, stop)
            for order, stop in enumerate(self._stops)
            if (start := self._held.find(stop)) >= 0
        ]
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max((_overlap(self._held, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
