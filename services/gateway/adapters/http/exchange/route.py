"""A route of an HTTP application: its path, its handler, and all that it takes and answers."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import ASGIApp

from services.gateway.adapters.http.openapi.answers import Error

Handler = Callable[[Request], Awaitable[ASGIApp]]
"""Returns what sends the answer."""

READ = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """A header that a route reads, and the JSON Schema of its value."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """What is served at a path, and what its OpenAPI document says. The handler's docstring is the
    description, its name the operation's.
    """

    path: str
    handler: Handler
    answer: type[BaseModel] | str
    """The JSON of a 200, or the media type of one that is text."""
    methods: tuple[str, ...] = READ
    tag: str = "server"
    needs_key: bool = True
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    """The JSON of each event, where the answer may be streamed."""
    errors: tuple[int, ...] = ()
    """Statuses besides those that any route, a key or a body may cause."""
    error: type[BaseModel] = Error
    """The JSON of these and of all other errors, in the form of the API."""
    has_named_events: bool = False
    """Whether events have names, and the last of them is one like the others."""
    other_answers: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    """JSON of other statuses that is no OpenAI error."""
    headers: tuple[RequestHeader, ...] = ()
    is_limited: bool = False
    """Whether it counts towards its tenant's limits: answers say what is left of them."""
