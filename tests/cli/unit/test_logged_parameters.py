"""A step log contains all sampling parameters that the scheduler reads. A replay restores them."""

import ast
from pathlib import Path

SERVICES = Path(__file__).parents[3] / "services"
CORE = SERVICES / "scheduler" / "core"
ENDS = SERVICES / "common" / "request" / "finish.py"
RECORDER, REPLAY = (
    CORE / "step_log" / "log_entry.py",
    SERVICES / "cli" / "replay" / "entry_parts.py",
)


def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def parameters_read(path: Path) -> set[str]:
    """The attributes that a source file reads from a variable or attribute `sampling`."""
    return {
        node.attr
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and ast.unparse(node.value).split(".")[-1] == "sampling"
    }


def test_each_parameter_that_the_scheduler_decides_by_is_logged_and_replayed() -> None:
    decided_by = set[str]().union(
        *(parameters_read(path) for path in (ENDS, *CORE.glob("**/*.py")) if path != RECORDER)
    )
    (made,) = [
        node
        for node in nodes(REPLAY)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SamplingParams"
    ]
    assert {"max_tokens", "eos_token_ids"} <= decided_by <= parameters_read(RECORDER)
    assert {keyword.arg for keyword in made.keywords} == parameters_read(RECORDER)
