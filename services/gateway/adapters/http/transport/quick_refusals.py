"""Refuses requests by their headers, as soon as the headers arrive."""

import json
import time
from collections.abc import Iterable, Mapping
from contextvars import Context
from dataclasses import dataclass
from functools import lru_cache

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from services.common.errors import StepwellError
from services.gateway.adapters.access import Access, authorization_of
from services.gateway.adapters.http.exchange import errors
from services.gateway.adapters.http.exchange.deadline import deadline_of
from services.gateway.adapters.http.exchange.errors import status_of
from services.gateway.adapters.http.exchange.request_records import call_of, headers_of, names_of
from services.gateway.adapters.http.exchange.request_state import ARRIVAL, ARRIVED
from services.gateway.adapters.http.transport.hosts import HostNames, hosts_of
from services.gateway.adapters.telemetry.metrics import Metrics
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.adapters.telemetry.request_recorder import RequestRecorder
from services.gateway.core.caller import Caller
from services.gateway.core.gate import Gate
from services.gateway.core.request.inference import Inference

_KEPT_BODIES = 256


def raw_error_response(
    error: StepwellError, scope: Scope, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Returns the bytes of a complete error answer, after which the connection stays open.
    `headers` are added to the error's own headers.
    """
    said = errors.described(error)
    fixed, body = _encoded(errors.error_writer(scope), said)
    own = "".join(
        [f"{name.lower()}: {value}\r\n" for name, value in errors.error_headers(error).items()]
    )
    further = [b"%b: %b\r\n" % header for header in headers]
    return b"".join([STATUS_LINE[said.status], *further, fixed, own.encode(), b"\r\n", body])


@lru_cache(maxsize=_KEPT_BODIES)
def _encoded(write: errors.ErrorBody, error: errors.Described) -> tuple[bytes, bytes]:
    """Returns the headers that describe an error's body, and the body. Results are cached, because
    most refusals under overload are identical.
    """
    body = json.dumps(write(error)).encode()
    return _headers(body).encode(), body


def raw_refusal(status: int, message: str) -> bytes:
    """Returns the bytes of an error answer in OpenAI's schema, for a request whose path is not
    known yet. The connection must be closed after the answer.
    """
    body = json.dumps(errors.openai_body(errors.plain(status, message))).encode()
    head = f"{_headers(body)}connection: close\r\n\r\n"
    return STATUS_LINE[status] + head.encode() + body


def _headers(body: bytes) -> str:
    return f"content-length: {len(body)}\r\ncontent-type: {errors.MEDIA_TYPE}\r\n"


Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class QuickRefusals:
    """Refuses POST requests to paths that generate while the server has no room for them. A quick
    refusal costs a fraction of a refusal by the application, because no body is read and no task is
    created. A request that is admitted is counted at once, so that a burst of requests cannot
    exceed the limits.

    The application, which applies these rules, too, decides about some requests: requests that must
    be refused for another reason than lack of room, requests with one of `left_headers`, and
    requests whose API key `access` does not recognize.
    """

    operations: Mapping[str, str]
    """Maps each path that generates to its operation in traces and metrics."""
    hosts: HostNames
    access: Access
    gate: Gate
    inference: Inference
    observer: Observer
    recorder: RequestRecorder
    metrics: Metrics
    max_body_bytes: int
    left_headers: frozenset[str]
    """Headers that only the application can check, in lower case, such as `origin`."""

    def decide(self, scope: Scope, default_headers: Iterable[Header]) -> bytes | None:
        """Returns the bytes of the complete answer to a refused request, with `default_headers`
        added to the answer's own headers. Returns None for a request that the application must
        serve or refuse.

        If the request was admitted and counted, its host, API key and declared size have been
        checked, and its state contains its Arrival and its caller.
        """
        if scope["method"] != "POST" or scope["path"] not in self.operations:
            return None
        headers = headers_of(scope)
        arrived = scope["state"][ARRIVED]
        try:
            caller = self._caller(scope, headers)
            deadline = deadline_of(headers, arrived)
        except StepwellError:
            return None
        if caller is None:
            return None
        scope["state"]["caller"] = caller
        try:
            self.gate.check()
            scope["state"][ARRIVAL] = self.inference.arriving(caller, deadline)
        except StepwellError as error:
            # A separate context, so that this request's id does not appear in later log lines of
            # the connection.
            names = Context().run(self._refuse, error, scope, headers, caller)
            return raw_error_response(error, scope, [*default_headers, *names])
        return None

    def _caller(self, scope: Scope, headers: Mapping[str, str]) -> Caller | None:
        """Returns the caller of a request, or None if the application must determine the caller.
        Raises Unauthenticated if the API key is invalid.
        """
        hosts = hosts_of(scope)
        declared = headers.get("content-length", "")
        if (
            not self.left_headers.isdisjoint(headers)
            or len(hosts) != 1
            or not self.hosts.allow(hosts[0])
            or (declared.isdigit() and int(declared) > self.max_body_bytes)
        ):
            return None
        return self.access.recognize(authorization_of(headers))

    def _refuse(
        self, error: StepwellError, scope: Scope, headers: Mapping[str, str], caller: Caller
    ) -> tuple[Header, ...]:
        path, status, arrived = scope["path"], status_of(error), scope["state"][ARRIVED]
        record = self.recorder.begin(call_of(scope), self.operations[path], headers, arrived)
        record.caller, record.status = caller, str(status)
        self.observer.refused(record, error)
        self.recorder.end(record)
        seconds = (time.perf_counter_ns() - arrived) / 1e9
        self.metrics.answered(path, scope["method"], status, seconds)
        return names_of(record)
