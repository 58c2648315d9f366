"""Creates the RequestRecord of each HTTP request, and adds the request's ids to the answer."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.adapters.http.exchange.ignored_fields import HEADER, header_value
from services.gateway.adapters.http.exchange.request_state import ARRIVAL, ARRIVED, HEADERS
from services.gateway.adapters.telemetry.request_record import (
    CANCELLED,
    CLIENT_CLOSED_REQUEST,
    REQUEST_ID,
    TRACE_ID,
    Call,
    RequestRecord,
)
from services.gateway.adapters.telemetry.request_recorder import RequestRecorder

_MAX_PATH = 256
_REQUEST_ID, _TRACE_ID = REQUEST_ID.lower().encode(), TRACE_ID.lower().encode()
_IGNORED = HEADER.lower().encode()


class RequestRecords:
    """Creates each request's RequestRecord, for logs, traces and metrics, in
    `request.state.record`, and ends it with the answer. Adds headers to every answer: the request's
    id, the id of its trace, and the names of body fields that have no effect.
    """

    def __init__(
        self,
        app: ASGIApp,
        recorder: RequestRecorder,
        operations: Mapping[str, str],
        counted: ASGIApp | None = None,
    ) -> None:
        """`operations` maps each path that generates to its operation in OpenTelemetry's GenAI
        conventions. `counted` is the application for requests that QuickRefusals has already
        checked and counted. By default it is `app`.
        """
        self._app = app
        self._counted = counted or app
        self._operations = operations
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        operation = self._operations.get(scope["path"], "") if scope["method"] == "POST" else ""
        record = self._recorder.begin(
            call_of(scope), operation, headers_of(scope), state.get(ARRIVED)
        )
        state["record"] = record

        async def send_with_names(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = str(message["status"])
                message["headers"] = [*message["headers"], *names_of(record)]
                if record.ignored_fields:
                    value = header_value(record.ignored_fields).encode()
                    message["headers"].append((_IGNORED, value))
            await send(message)

        app = self._counted if ARRIVAL in state else self._app
        try:
            await app(scope, receive, send_with_names)
        finally:
            if not record.status:
                record.status = CLIENT_CLOSED_REQUEST
                record.failed(
                    CANCELLED, "the client disconnected or cancelled the request", is_failure=False
                )
            self._recorder.end(record)


def names_of(record: RequestRecord) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    return (_REQUEST_ID, record.request_id.encode()), (_TRACE_ID, record.trace_id.encode())


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Returns a map from lower-case header names to values. If a header is repeated, its first
    value counts.
    """
    state = scope["state"]
    headers: Mapping[str, str] | None = state.get(HEADERS)
    if headers is None:
        headers = state[HEADERS] = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
    return headers


def call_of(scope: Scope) -> Call:
    # Not the decoded path, because it may contain a line break, which would spoil logs.
    path = scope.get("raw_path", b"").decode("ascii", errors="backslashreplace")[:_MAX_PATH]
    client = scope.get("client")
    return Call("http", scope["method"], path, f"{client[0]}:{client[1]}" if client else "")
