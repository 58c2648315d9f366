"""Refuses requests that a full server would refuse, before anything else is done with them."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import InvalidArgument, StepwellError, Unauthenticated
from services.gateway.adapters.auth import ApiKeys
from services.gateway.adapters.http.deadline import deadline_of
from services.gateway.adapters.http.errors import error_response
from services.gateway.adapters.observation import Observer
from services.gateway.core.gate import Gate
from services.gateway.core.inference import Inference


class EarlyRefusals:
    """Answers POST requests to `paths` while there is no room for them: their bodies are not read,
    and the application does not see them. Under overload most requests end here.

    A request that the application refuses for another reason, such as a wrong key, is passed on.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Collection[str],
        keys: ApiKeys,
        gate: Gate,
        inference: Inference,
        observer: Observer,
    ) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._keys = keys
        self._gate = gate
        self._inference = inference
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            refusal = self._refusal(scope)
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> StepwellError | None:
        headers = Headers(scope=scope)
        try:
            self._keys.check(headers.get("authorization", ""))
            deadline = deadline_of(headers)
        except (Unauthenticated, InvalidArgument):
            return None
        try:
            with self._observer.counting_refusals():
                self._gate.check()
                self._inference.check_room(deadline)
        except StepwellError as error:
            return error
        return None
