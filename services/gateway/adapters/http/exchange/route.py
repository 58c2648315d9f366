"""A route of an HTTP application: its path, its handler, and the schemas of its requests and
answers.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import ASGIApp

from services.gateway.adapters.http.openapi.answers import Error
from services.gateway.adapters.http.openapi.errors import ErrorAnswer

Handler = Callable[[Request], Awaitable[ASGIApp]]
"""Returns the ASGI application that sends the answer."""

READ = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """A header that a route reads, and the JSON Schema of its value."""

    name: str
    description: str
    schema: Mapping[str, Any]
    errors: Mapping[int, ErrorAnswer] = field(default_factory=dict)
    """Error answers that only requests with this header can get."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route and its entry in the OpenAPI document. The summary is the first sentence of the
    handler's docstring, and the operation's id is the handler's name.
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
    """Error statuses of this route. The OpenAPI document adds further statuses to every route, to
    routes that need an API key, and to routes with a body.
    """
    error: type[BaseModel] = Error
    """The model of all error bodies, in the API's schema."""
    has_named_events: bool = False
    """Whether the events of a stream have names. If not, the stream ends with `[DONE]`."""
    other_answers: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    """Maps further statuses to the models of their answers, which are not error bodies."""
    headers: tuple[RequestHeader, ...] = ()
    is_polled: bool = False
    """Whether monitors poll the route. Polled routes are not counted in metrics, as in vLLM."""
    is_limited: bool = False
    """Whether requests count towards their caller's limits. If true, headers of the answer contain
    the remaining amounts.
    """


computed_route = partial(Route, methods=("POST",), errors=(404, 504), is_limited=True)
"""Makes a route that runs the model."""
body_route = partial(Route, methods=("POST",), errors=(404,))
"""Makes a route that does not run the model, but whose body names a model."""
