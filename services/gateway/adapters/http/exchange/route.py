"""A route of an HTTP application: its path, its handler, and the schemas of its requests and
answers.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import ASGIApp

from services.gateway.adapters.http.openapi.answers import Error

Handler = Callable[[Request], Awaitable[ASGIApp]]
"""Returns the ASGI application that sends the answer."""

READ = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """A header that a route reads, and the JSON Schema of its value."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """A route and its entry in the OpenAPI document. The entry's description is the handler's
    docstring, and its operation has the handler's name.
    """

    path: str
    handler: Handler
    answer: type[BaseModel] | str
    """The model of a JSON answer with status 200, or the media type of a text answer."""
    methods: tuple[str, ...] = READ
    tag: str = "server"
    needs_key: bool = True
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    """The model of each event, if the answer can be streamed."""
    errors: tuple[int, ...] = ()
    """Error statuses of this route. The OpenAPI document adds the statuses that every route has,
    and the statuses of routes that need a key or have a body.
    """
    error: type[BaseModel] = Error
    """The model of all error bodies, in the API's schema."""
    has_named_events: bool = False
    """Whether events have names. If so, the last event has the common schema; otherwise it is
    `[DONE]`.
    """
    other_answers: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    """Maps other statuses to the models of their answers, if these are not OpenAI errors."""
    headers: tuple[RequestHeader, ...] = ()
    is_limited: bool = False
    """Whether requests count towards their tenant's limits. If so, answers have headers with what
    remains of the limits.
    """
