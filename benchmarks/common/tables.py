"""Tables in Markdown, for documents to quote as they are."""

from collections.abc import Iterable, Sequence


def table_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number_text(value: float | None, digits: int) -> str:
    """The value with `digits` after the point; a dash where nothing was measured."""
    return "—" if value is None else f"{value:.{digits}f}"
