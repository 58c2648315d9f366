"""Sends each HTTP request to the application of the model that its path or its body names."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import StepwellError
from services.gateway.adapters.access import Access, authorization_of
from services.gateway.adapters.http.exchange.errors import error_response
from services.gateway.adapters.http.exchange.parse import MAX_BRACKETS, MAX_KEYS
from services.gateway.adapters.http.exchange.request_records import headers_of
from services.gateway.adapters.http.exchange.request_state import HAS_MODEL_PATH, HELD_BODY
from services.gateway.adapters.http.transport.body_budget import BodyBudget
from services.gateway.client_settings import ClientSettings
from services.gateway.core.caller import Caller
from services.gateway.core.request.inference import Inference
from services.gateway.models.body_model import model_in

PREFIX = "/models/"


@dataclass(frozen=True, slots=True)
class ModelApp:
    inference: Inference
    app: ASGIApp


class HttpByModel:
    """An application that forwards each request to the application of one model.

    A path /models/NAME/… has the model's name, and the model's application receives the rest of the
    path. Otherwise the JSON body names the model or one of its adapters. All other requests belong
    to the first model, also those with an unknown name or an invalid body, which it refuses.
    """

    def __init__(
        self, models: Sequence[ModelApp], access: Access, budget: BodyBudget, limits: ClientSettings
    ) -> None:
        """Only bodies of callers that `access` accepts are read. `budget` bounds their bytes."""
        self._first = models[0].app
        self._models = models
        self._access = access
        self._budget = budget
        self._max_body_bytes = limits.max_body_bytes
        # The JsonMeter refuses bodies with more.
        self._max_tokens = limits.max_items_per_request + MAX_KEYS + 2 * MAX_BRACKETS
        longest_first = sorted(models, key=lambda one: -len(one.inference.model_name))
        self._prefixes = [(f"{PREFIX}{one.inference.model_name}", one.app) for one in longest_first]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith(PREFIX):
            for prefix, app in self._prefixes:
                if path.startswith(f"{prefix}/"):
                    scope.setdefault("state", {})[HAS_MODEL_PATH] = True
                    await app({**scope, "path": path.removeprefix(prefix)}, receive, send)
                    return
        caller = await self._reader(scope) if scope["method"] == "POST" else None
        if caller is None:
            await self._first(scope, receive, send)
            return
        async with AsyncExitStack() as held:
            try:
                reserved = self._budget.hold(self._num_bytes(scope), caller.caller_id)
                await held.enter_async_context(reserved)
            except StepwellError as error:
                await error_response(error, scope)(scope, receive, send)
                return
            scope["state"][HELD_BODY] = held
            name, again = await self._read(receive)
            await self._app_of(name)(scope, again, send)

    async def _reader(self, scope: Scope) -> Caller | None:
        """Returns the caller if the body is JSON of an allowed size, and the API key is valid."""
        scope.setdefault("state", {})
        headers = headers_of(scope)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" or self._num_bytes(scope) > self._max_body_bytes:
            return None
        try:
            return await self._access.authenticate(authorization_of(headers))
        except StepwellError:
            return None

    def _num_bytes(self, scope: Scope) -> int:
        declared = headers_of(scope).get("content-length", "")
        return int(declared) if declared.isdigit() else self._max_body_bytes

    def _app_of(self, name: str | None) -> ASGIApp:
        apps = (one.app for one in self._models if name in one.inference.names())
        return next(apps, self._first)

    async def _read(self, receive: Receive) -> tuple[str | None, Callable[[], Awaitable[Message]]]:
        """Reads the body up to the model's name. Returns the name, and a `receive` that begins with
        what was read, as one message.
        """
        body, name = bytearray(), None
        has_ended, is_whole = False, False
        while name is None and not has_ended and len(body) <= self._max_body_bytes:
            is_first = not body
            message = await receive()
            body += message.get("body", b"")
            is_whole = message["type"] == "http.request" and not message.get("more_body", False)
            has_ended = is_whole or message["type"] == "http.disconnect"
            if is_first or has_ended:
                name = await model_in(bytes(body), self._max_tokens)
        begun: list[Message] = [
            {"type": "http.request", "body": bytes(body), "more_body": not is_whole}
        ]

        async def again() -> Message:
            return begun.pop() if begun else await receive()

        return name, again
