"""Fields of a request's body, and headers, that describe the request's program, the series of
requests of one run of an agent.

Clients of Continuum, a scheduler for agents, send the fields `job_id`, `is_last_step`,
`this_func_call` and `last_func_call`. Clients of vLLM send `session_id` and `vllm_xargs`. Agents
and inference routers send the headers.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from services.common.errors import InvalidArgument
from services.common.request.program import DeclaredProgram
from services.gateway.adapters.http.exchange.fields import Body, BodyNotes, Ignored

SESSION_HEADERS = ("X-Session-ID", "X-Dynamo-Session-ID", "Session-Id")
CLAUDE_CODE_HEADER = "X-Claude-Code-Session-Id"
"""The header with the id of an agent's session. The next two identify agents within the session."""
AGENT_HEADER = "X-Claude-Code-Agent-Id"
PARENT_AGENT_HEADER = "X-Claude-Code-Parent-Agent-Id"
PARENT_HEADER = "X-Dynamo-Parent-Session-ID"
FINAL_HEADER = "X-Dynamo-Session-Final"


class ProgramArguments(Body):
    """Fields about a program that clients may also send in `vllm_xargs`."""

    job_id: str | None = None
    session_id: str | None = None
    this_func_call: str | None = None
    # Not used, because the server knows which tool the program's previous request called.
    last_func_call: Ignored = None
    is_last_step: bool | None = None


def _no_others(value: Any) -> Any:
    """Refuses keys of `vllm_xargs` that ProgramArguments lacks, because in vLLM they are meant for
    extensions, which this server does not have.
    """
    if isinstance(value, dict) and (others := value.keys() - ProgramArguments.model_fields):
        raise PydanticCustomError(
            "not_supported",
            "cannot have the key {name}: the server has no extensions",
            {"name": min(others)},
        )
    return value


class ProgramFields(ProgramArguments):
    """The fields about a program that a body may have."""

    vllm_xargs: Annotated[ProgramArguments, BeforeValidator(_no_others)] | None = None
    _keep_seconds: int = PrivateAttr(0)

    @model_validator(mode="after")
    def _note(self, info: ValidationInfo) -> Self:
        if isinstance(info.context, BodyNotes):
            self._keep_seconds = info.context.keep_seconds
        return self

    @property
    def keep_seconds(self) -> int:
        """The longest time, in seconds, for which the client requests to keep the prompt cached, or
        0. It is known only if a BodyReader has read the body.
        """
        return self._keep_seconds


def program_of(body: ProgramFields, headers: Mapping[str, str]) -> DeclaredProgram | None:
    """Returns the program that a request describes in its body or in its headers, whose names are
    lower-case. Returns None if the request describes no program. Raises InvalidArgument with the
    name of the invalid field or header.
    """
    names = [(where, name) for where, name in _names(body, headers) if name]
    where, name = names[0] if names else ("job_id", "")
    for other, theirs in names[1:]:
        if theirs != name:
            raise InvalidArgument(f"{where} and {other} name two different programs", field=other)
    more = body.vllm_xargs or body
    tool, tool_field = body.this_func_call or more.this_func_call or "", "this_func_call"
    parent, parent_header = _parent(headers)
    is_final = headers.get(FINAL_HEADER.lower(), "").lower() == "true"
    ends = bool(body.is_last_step or more.is_last_step or is_final)
    if not (name or tool or parent or ends or body.keep_seconds):
        return None
    program = DeclaredProgram(name, parent, tool, ends, body.keep_seconds)
    try:
        program.check()
    except InvalidArgument as error:
        own = {
            "program.id": where,
            "program.parent_id": parent_header,
            "program.tool": tool_field,
            "program.ends": FINAL_HEADER if is_final else "is_last_step",
        }
        field = error.field or ""
        raise InvalidArgument(error.message.replace(field, own[field]), field=own[field]) from None
    return program


def parent_header(headers: Mapping[str, str]) -> str:
    return _parent(headers)[1]


def _names(body: ProgramFields, headers: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    yield "job_id", body.job_id
    yield "session_id", body.session_id
    if body.vllm_xargs is not None:
        yield "vllm_xargs.job_id", body.vllm_xargs.job_id
        yield "vllm_xargs.session_id", body.vllm_xargs.session_id
    for header in SESSION_HEADERS:
        yield header, headers.get(header.lower())
    if session := headers.get(CLAUDE_CODE_HEADER.lower()):
        yield CLAUDE_CODE_HEADER, _agent(session, headers.get(AGENT_HEADER.lower()))


def _parent(headers: Mapping[str, str]) -> tuple[str, str]:
    """Returns the id of the program that started this program, and the name of the header with the
    id. Without such a header, the parent is the session's first agent, which has no id.
    """
    if parent := headers.get(PARENT_HEADER.lower()):
        return parent, PARENT_HEADER
    session = headers.get(CLAUDE_CODE_HEADER.lower())
    if session and headers.get(AGENT_HEADER.lower()):
        return _agent(session, headers.get(PARENT_AGENT_HEADER.lower())), PARENT_AGENT_HEADER
    return "", PARENT_HEADER


def _agent(session: str, agent: str | None) -> str:
    return f"{session}/{agent}" if agent else session
