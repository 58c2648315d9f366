"""Goodput: requests per second that met every service level objective (DistServe, OSDI 2024)."""

from collections.abc import Mapping

from services.cli.bench.core.record import RequestRecord

OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_objective(text: str) -> tuple[str, float]:
    """Parses `ttft:200` into a figure and milliseconds. `e2e` is `e2el`. Raises ValueError."""
    name, _, value = text.partition(":")
    name = "e2el" if name == "e2e" else name
    try:
        millis = float(value)
    except ValueError:
        millis = 0.0
    if name not in OBJECTIVES or not millis > 0:
        raise ValueError(
            f"must be one of {', '.join(OBJECTIVES)} with milliseconds, such as ttft:200, "
            f"not {text!r}"
        )
    return name, millis


def is_good(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether a request succeeded and met every objective. A figure that does not exist, such as
    TPOT of an answer with one token, meets its objective.
    """
    if not record.is_ok:
        return False
    figures = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
    return all((figures[name] or 0.0) * 1000 <= millis for name, millis in objectives.items())
