"""The output of `stepwell trace --program`: an agent's requests, and the pauses between them."""

from typing import Any

from services.cli.views.program_view import program_lines


def trace(number: int, start: float, seconds: float, **turn: Any) -> dict[str, Any]:
    none = {"tool": "", "pause_seconds": None, "context_tokens": 0, "recomputed_tokens": 0}
    of = none | {"number": number} | turn
    return {"started_unix_seconds": 1000 + start, "seconds": seconds, "turn": of}


def test_turns_and_pauses_are_in_proportion() -> None:
    second = trace(
        2, 3.0, 1.0, tool="grep", pause_seconds=1.0, context_tokens=1500, recomputed_tokens=96
    )
    lines = program_lines("job-17", [second, trace(1, 0.0, 2.0)], 84)
    assert lines == [
        "job-17: 2 turns traced, 4.00 s",
        f"{'turn 1      2.00 s':<44}{'█' * 20}",
        f"{'  pause    1.00 s  grep':<44}{' ' * 20}{'·' * 10}",
        f"{'turn 2      1.00 s  context 1.50k, 96 again':<44}{' ' * 30}{'█' * 10}",
    ]


def test_a_line_is_no_wider_than_the_terminal() -> None:
    turns = [trace(n, 2.0 * n, 1.5, tool="x" * 99, pause_seconds=0.5) for n in range(9)]
    assert max(map(len, program_lines("p", turns, 60))) <= 60
    assert program_lines("p", [trace(1, 0.0, 0.0)], 10)[0] == "p: 1 turn traced, 0 s"
