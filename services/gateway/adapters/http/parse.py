"""From the bytes of a body to a body object, or to an error that names the field."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from services.common.errors import InvalidArgument, PayloadTooLarge

B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, model: type[B], max_bytes: int) -> B:
    """Reads and checks the body. One that is too large is refused before it is buffered."""
    return parse_body(await _read(request, max_bytes), model)


def parse_body(raw: bytes, model: type[B]) -> B:
    """Checks a body. Raises InvalidArgument that names the first field at fault."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error) from error


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than the {max_bytes} bytes that are read")


def _refusal(error: ValidationError) -> InvalidArgument:
    problem = _worst(error.errors(include_url=False, include_input=False))
    kind, location = problem["type"], _path(problem["loc"])
    if kind == "json_invalid":
        return InvalidArgument(f"the body is not JSON: {problem['ctx']['error']}")
    if kind == "model_type":
        where = location or "the body"
        return InvalidArgument(f"{where} must be a JSON object", field=location or None)
    if kind == "extra_forbidden":
        return InvalidArgument(
            f"{location} is no known parameter", field=location, reason="UNKNOWN_PARAMETER"
        )
    if kind == "missing":
        return InvalidArgument(f"{location} is missing", field=location, reason="MISSING_PARAMETER")
    if kind == "not_supported":
        return InvalidArgument(
            f"{location} is not supported: {problem['msg']}",
            field=location,
            reason="UNSUPPORTED_PARAMETER",
        )
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    return InvalidArgument(f"{location}: {message}", field=location)


def _worst(problems: list[Any]) -> Any:
    """The first problem; of the alternatives of one field, the one that got furthest."""
    first = problems[0]["loc"][:1]
    same = [problem for problem in problems if problem["loc"][:1] == first]
    return max(same, key=lambda problem: sum(isinstance(part, int) for part in problem["loc"]))


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from pydantic's location, without its names for alternatives."""
    path = ""
    for place, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif place == 0:
            path = part
        elif _is_field(part):
            path += f".{part}"
    return path


def _is_field(part: str) -> bool:
    """Whether a part of a location is a field's name: alternatives are written like types."""
    return part.isidentifier() and part not in ("str", "int", "float", "bool", "TextPart")
