"""An argument parser that suggests similar flags for an unknown one."""

import argparse
import difflib
from collections.abc import Sequence

_MAX_SIMILAR = 2


class ArgumentParser(argparse.ArgumentParser):
    """Calls `error` for an unrecognized argument, with a sentence that includes a suggestion."""

    def parse_args(  # type: ignore[override]  # a namespace of another class is not wanted
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return parsed

    def _hint(self, unknown: str) -> str:
        if not unknown.startswith("-"):
            return "; a value follows its flag, see --help"
        known = [flag for action in self._actions for flag in action.option_strings]
        similar = difflib.get_close_matches(unknown.partition("=")[0], known, _MAX_SIMILAR)
        return f"; similar are {', '.join(similar)}" if similar else ""
