"""X-Request-Id: a name for each HTTP request, on its answer too."""

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.core.request import is_request_id

HEADER = "X-Request-Id"


class RequestIds:
    """Names requests as the client's header does, or anew where it has none that can be used.

    The application finds the name in `request.state.request_id`, and may put another one there
    before it answers. Every answer carries it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(HEADER, "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if is_request_id(given) else secrets.token_hex(12)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        await self._app(scope, receive, send_with_id)
