"""The fields and headers by which a request declares the agent program to which it belongs."""

from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.common.request.program import DeclaredProgram
from services.gateway.adapters.http.exchange.program_fields import ProgramFields, program_of

CLAUDE_CODE = {"x-claude-code-session-id": "s"}


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {}, None),
        ({"last_func_call": "ls"}, {}, None),
        ({"job_id": "a"}, {}, DeclaredProgram("a")),
        ({"session_id": "a"}, {}, DeclaredProgram("a")),
        ({"vllm_xargs": {"session_id": "a"}}, {}, DeclaredProgram("a")),
        ({"job_id": "a", "session_id": "a"}, {"session-id": "a"}, DeclaredProgram("a")),
        ({}, {"x-session-id": "a"}, DeclaredProgram("a")),
        ({}, {"x-dynamo-session-id": "a"}, DeclaredProgram("a")),
        ({}, {"session-id": "a"}, DeclaredProgram("a")),
        ({}, {"x-session-id": ""}, None),
        ({}, CLAUDE_CODE, DeclaredProgram("s")),
        ({}, CLAUDE_CODE | {"x-claude-code-agent-id": "1"}, DeclaredProgram("s/1", "s")),
        (
            {},
            CLAUDE_CODE | {"x-claude-code-agent-id": "2", "x-claude-code-parent-agent-id": "1"},
            DeclaredProgram("s/2", "s/1"),
        ),
        (
            {"job_id": "a"},
            {"x-dynamo-parent-session-id": "b", "x-dynamo-session-final": "True"},
            DeclaredProgram("a", "b", ends=True),
        ),
        ({"job_id": "a", "is_last_step": True}, {}, DeclaredProgram("a", ends=True)),
        ({"job_id": "a", "is_last_step": False}, {}, DeclaredProgram("a")),
        ({"job_id": "a", "this_func_call": "ls"}, {}, DeclaredProgram("a", tool="ls")),
        (
            {"vllm_xargs": {"job_id": "a", "is_last_step": True, "this_func_call": "ls"}},
            {},
            DeclaredProgram("a", tool="ls", ends=True),
        ),
    ],
)
def test_fields_and_headers_name_the_program(
    body: dict[str, Any], headers: dict[str, str], expected: DeclaredProgram | None
) -> None:
    assert program_of(ProgramFields(**body), headers) == expected


@pytest.mark.parametrize(
    ("body", "headers", "field"),
    [
        ({"job_id": "a", "session_id": "b"}, {}, "session_id"),
        ({"job_id": "a"}, {"x-session-id": "b"}, "X-Session-ID"),
        ({"session_id": "x" * 257}, {}, "session_id"),
        ({}, {"session-id": "a\tb"}, "Session-Id"),
        ({"is_last_step": True}, {}, "is_last_step"),
        ({"this_func_call": "ls"}, {}, "this_func_call"),
        ({}, {"x-dynamo-session-final": "true"}, "X-Dynamo-Session-Final"),
        ({"job_id": "a"}, {"x-dynamo-parent-session-id": "a"}, "X-Dynamo-Parent-Session-ID"),
    ],
)
def test_contradictions_are_refused_by_name(
    body: dict[str, Any], headers: dict[str, str], field: str
) -> None:
    with pytest.raises(InvalidArgument, match=field) as error:
        program_of(ProgramFields(**body), headers)
    assert error.value.field == field
