"""Body fields that have no effect. A header of the answer names them, and each is logged once."""

import difflib
import logging
from collections.abc import Iterable, Sequence
from urllib.parse import quote

logger = logging.getLogger(__name__)

HEADER = "X-Stepwell-Ignored-Fields"
IGNORE, REFUSE = "ignore", "refuse"

_MAX_NAME = 64
"""Limit on the characters of a field name in the header and the log. Longer names are cut."""
_MAX_VALUE = 512
"""Limit on the characters of all names in the header. Names beyond it are only counted."""
_MAX_LOGGED = 256
"""Limit on the number of logged names, since clients can send any number of invented names."""
_PLAIN = "[]{}()<>$@!*+:;/?"


def field_name(location: Iterable[int | str]) -> str:
    """Converts a location that pydantic reports to a dotted name such as
    `stream_options.include_usage`. List indices and tags of alternatives are omitted. All
    characters of the name are safe in a header and in a log line.
    """
    parts = (part for part in location if isinstance(part, str) and not part.startswith("<"))
    return ".".join(quote(part[:_MAX_NAME], safe=_PLAIN, errors="replace") for part in parts)


def header_value(names: Sequence[str]) -> str:
    """Lists as many names as fit into the header, and adds the number of omitted names."""
    shown: list[str] = []
    size = 0
    for name in names:
        size += len(name) + 2
        if size > _MAX_VALUE:
            return ", ".join([*shown, f"and {len(names) - len(shown)} more"])
        shown.append(name)
    return ", ".join(shown)


class IgnoredFieldLog:
    """Logs each ignored field of each route once, up to a bound."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, path: str, names: Iterable[str], known: Iterable[str]) -> None:
        """Logs each new name, with a similar name in `known`, the fields of the body, as a
        suggestion.
        """
        for name in names:
            if (path, name) in self._logged or len(self._logged) >= _MAX_LOGGED:
                continue
            self._logged.add((path, name))
            meant = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f"; did the client mean {meant[0]}?" if meant and meant[0] != name else ""
            logger.warning("%s: the field %s of a request's body has no effect%s", path, name, hint)
            if len(self._logged) == _MAX_LOGGED:
                logger.warning("further fields without effect are not logged")
