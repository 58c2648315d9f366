"""Refuses requests that a full server cannot serve, before their bodies are read."""

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import InvalidArgument, StepwellError
from services.gateway.adapters.http.exchange.deadline import deadline_of
from services.gateway.adapters.http.exchange.errors import error_response
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.caller import ANYONE
from services.gateway.core.gate import Gate
from services.gateway.core.request.inference import Inference
from services.gateway.options.option import Options


class EarlyRefusals:
    """Refuses POST requests to `paths` while the server has no room for them. Bodies of refused
    requests are not read, and the application does not run. Under overload most requests end here.

    Two kinds of requests are always forwarded to the application: requests with an invalid header,
    which the application refuses, and requests that need no room, for example because their
    idempotency key already has an answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Collection[str],
        gate: Gate,
        inference: Inference,
        options: Options,
        observer: Observer,
    ) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._gate = gate
        self._inference = inference
        self._options = options
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] in self._paths:
            refusal = self._refusal(scope)
            if refusal is not None:
                await error_response(refusal, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> StepwellError | None:
        state = scope["state"]
        caller = state.get("caller", ANYONE)
        try:
            record: RequestRecord = state["record"]
            deadline = deadline_of(record.headers, record.timeline.began)
            needs_room = self._options.needs_room(record.headers, caller)
        except InvalidArgument:
            return None
        try:
            with self._observer.counting_refusals(record, caller):
                self._gate.check()
                if needs_room:
                    self._inference.check_room(caller, deadline)
        except StepwellError as error:
            return error
        return None
