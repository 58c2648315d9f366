"""Draws a program (an agent's session) on a time axis: its turns (requests), and the pauses between
two turns.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from services.cli.amounts import count_text, seconds_text

_LEFT = 44
"""Number of characters before the bars."""


def program_lines(program: str, traces: Sequence[dict[str, Any]], width: int) -> list[str]:
    """A headline, and one line for each turn and for each pause before a turn. `traces` are the
    summaries of the turns from /traces.
    """
    turns = sorted(traces, key=lambda trace: float(trace["started_unix_seconds"]))
    start = min(_begin(trace) for trace in turns)
    end = max(float(trace["started_unix_seconds"]) + float(trace["seconds"]) for trace in turns)
    which = "turn" if len(turns) == 1 else "turns"
    lines = [f"{program}: {len(turns)} {which} traced, {seconds_text(end - start)}"]
    scale = max(width - _LEFT, 10) / max(end - start, 1e-9)
    for trace in turns:
        for text, begin, seconds, mark in _parts(trace):
            at = round((begin - start) * scale)
            bar = mark * max(1, round(seconds * scale))
            lines.append(f"{text:<{_LEFT}}{' ' * at}{bar}"[:width].rstrip())
    return lines


def _begin(trace: dict[str, Any]) -> float:
    return float(trace["started_unix_seconds"]) - float(trace["turn"]["pause_seconds"] or 0.0)


def _parts(trace: dict[str, Any]) -> Iterator[tuple[str, float, float, str]]:
    """Yields text, begin, duration and bar of the pause before a turn, then of the turn itself."""
    turn, started = trace["turn"], float(trace["started_unix_seconds"])
    if (pause := turn["pause_seconds"]) is not None:
        tool = turn["tool"] or "no tool"
        yield f"  pause {seconds_text(pause):>9}  {tool}"[:_LEFT], _begin(trace), pause, "·"
    text = f"turn {turn['number']:<3} {seconds_text(trace['seconds']):>9}"
    if pause is not None:
        text += f"  context {count_text(turn['context_tokens'])}"
        if turn["recomputed_tokens"]:
            text += f", {count_text(turn['recomputed_tokens'])} again"
    yield text[:_LEFT], started, float(trace["seconds"]), "█"
