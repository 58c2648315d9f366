"""Tables in Markdown, which documents can quote unchanged."""

from collections.abc import Iterable, Sequence


def table_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with text in the first column and numbers in all other columns."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number_text(value: float | None, digits: int) -> str:
    """The text of a value with `digits` decimals. The text is a dash if nothing was measured."""
    return "—" if value is None else f"{value:.{digits}f}"
