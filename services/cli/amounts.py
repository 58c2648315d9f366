"""Formats durations and counts for people."""

_MINUTE = 60.0


def seconds_text(seconds: float) -> str:
    """A duration with three significant digits, such as 1.23 s, 45.6 ms or 789 µs."""
    if seconds < 5e-10:
        return "0 s"
    if seconds >= _MINUTE:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor or unit == "µs":
            return f"{_digits(seconds / factor)} {unit}"
    raise AssertionError("unreachable")


def count_text(number: float) -> str:
    """A count with three significant digits, such as 999, 12.3k or 4.56M."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{_digits(number / factor)}{unit}"
    return f"{number:.0f}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
