"""Refuses requests by their headers, in the event-loop iteration in which the headers arrive."""

import time
from collections.abc import Iterable, Mapping
from contextvars import Context
from dataclasses import dataclass

from starlette.types import Scope

from services.common.errors import StepwellError
from services.gateway.adapters.http.exchange.deadline import deadline_of
from services.gateway.adapters.http.exchange.errors import raw_error_response, status_of
from services.gateway.adapters.http.exchange.request_records import call_of, headers_of, names_of
from services.gateway.adapters.http.exchange.request_state import ARRIVAL, ARRIVED
from services.gateway.adapters.http.transport.hosts import HostNames, hosts_of
from services.gateway.adapters.keys.auth import ApiKeys, authorization_of
from services.gateway.adapters.telemetry.metrics import Metrics
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.adapters.telemetry.request_recorder import RequestRecorder
from services.gateway.core.gate import Gate
from services.gateway.core.idempotency.key import FIELD
from services.gateway.core.limits.rule import LimitSet
from services.gateway.core.request.inference import Inference
from services.gateway.core.tenant import Tenant

Header = tuple[bytes, bytes]
_LEFT = frozenset((FIELD.lower(), "origin"))
"""Headers that only the application can check. Requests with them are not refused here."""


@dataclass(frozen=True, slots=True)
class QuickRefusals:
    """Refuses POST requests to generating paths while there is no room for them. This costs a
    fraction of a refusal by the application: no body is read and no task is created. A request that
    is not refused counts from here on, so a burst cannot exceed the limits.

    The application decides about all other requests, by the same rules: requests that are refused
    for another reason, whose key is not in memory, whose tenant has limits per minute or on
    concurrency, that have an `Origin` header, or that have an idempotency key.
    """

    operations: Mapping[str, str]
    """The GenAI operation of each generating path."""
    hosts: HostNames
    keys: ApiKeys
    gate: Gate
    inference: Inference
    observer: Observer
    recorder: RequestRecorder
    metrics: Metrics
    max_body_bytes: int

    def decide(self, scope: Scope, default_headers: Iterable[Header]) -> bytes | None:
        """Returns the complete answer to a refused request, with `default_headers` besides its own
        headers. Returns None for a request that goes to the application.

        For a request that was counted, the host, key and declared size have been checked, and its
        state contains its Arrival and its tenant.
        """
        if scope["method"] != "POST" or scope["path"] not in self.operations:
            return None
        headers = headers_of(scope)
        arrived = scope["state"][ARRIVED]
        try:
            tenant = self._tenant(scope, headers)
            deadline = deadline_of(headers, arrived)
        except StepwellError:
            return None
        if tenant is None:
            return None
        scope["state"]["tenant"] = tenant
        try:
            self.gate.check()
            scope["state"][ARRIVAL] = self.inference.arriving(tenant, deadline)
        except StepwellError as error:
            # In a separate context, so that later log lines of the connection are not attributed to
            # this request.
            names = Context().run(self._refuse, error, scope, headers, tenant)
            return raw_error_response(error, scope, [*default_headers, *names])
        return None

    def _tenant(self, scope: Scope, headers: Mapping[str, str]) -> Tenant | None:
        """Returns the tenant of a request, or None if the application must determine the tenant.
        Raises Unauthenticated.
        """
        hosts = hosts_of(scope)
        declared = headers.get("content-length", "")
        if (
            not _LEFT.isdisjoint(headers)
            or len(hosts) != 1
            or not self.hosts.allow(hosts[0])
            or (declared.isdigit() and int(declared) > self.max_body_bytes)
        ):
            return None
        tenant = self.keys.recognize(authorization_of(headers))
        return tenant if tenant is not None and LimitSet.of(tenant).is_empty else None

    def _refuse(
        self, error: StepwellError, scope: Scope, headers: Mapping[str, str], tenant: Tenant
    ) -> tuple[Header, ...]:
        """Counts and logs a refusal; returns the headers with the request's and the trace's id."""
        path, status, arrived = scope["path"], status_of(error), scope["state"][ARRIVED]
        record = self.recorder.begin(call_of(scope), self.operations[path], headers, arrived)
        record.tenant, record.status = tenant, str(status)
        self.observer.refused(record, error)
        self.recorder.end(record)
        seconds = (time.perf_counter_ns() - arrived) / 1e9
        self.metrics.answered(path, scope["method"], status, seconds)
        return names_of(record)
