"""The errors of all services. Each kind has one gRPC status.

    StepwellError
    ├── InvalidArgument      the request is invalid in any state; names the field
    │   └── OutOfRange       the request is well formed but exceeds a limit of this service
    ├── NotFound             no such model, pool or request
    ├── Unauthenticated      the key is missing or wrong
    ├── PermissionDenied     the caller is authenticated but not permitted
    ├── PayloadTooLarge      the body exceeds the size limit
    ├── ResourceExhausted    rejected before queueing, or evicted from the queue; has a retry time
    │   └── QuotaExceeded    exceeds a limit of the tenant, under any load
    ├── FailedPrecondition   the service's state forbids the call, such as blocks in use
    ├── Aborted              the request was taken over or cancelled after it was accepted
    ├── Unavailable          a component is down or draining; has a retry time
    │   └── DeadlineExceeded the caller's deadline passed before the response
    └── InternalError        a defect in this service

Services subclass these kinds and set `reason`, a machine-readable name that is sent in
`google.rpc.ErrorInfo`. `services.common.rpc.status` maps kinds to gRPC statuses.
"""

from typing import ClassVar


class StepwellError(Exception):
    """Has a sentence for people, a `reason` for programs, and optionally the invalid field."""

    reason: ClassVar[str] = "UNKNOWN"
    http_status: ClassVar[int | None] = None
    """The HTTP status of this error. None selects the status of the error's kind."""
    may_retry: bool | None = None
    """Whether a retry of the same request may succeed. If None, the gRPC status decides."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        retry_after_seconds: float | None = None,
        may_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_seconds = retry_after_seconds
        self.error_reason = reason or type(self).reason
        if may_retry is not None:
            self.may_retry = may_retry

    @property
    def metric_reason(self) -> str:
        """The value of the metric label `reason` that counts this error."""
        return self.error_reason.lower()


class InvalidArgument(StepwellError):
    """The request is invalid in any state of the system. `field` names the invalid field."""

    reason = "INVALID_ARGUMENT"


class OutOfRange(InvalidArgument):
    reason = "OUT_OF_RANGE"


class NotFound(StepwellError):
    reason = "NOT_FOUND"


class Unauthenticated(StepwellError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(StepwellError):
    reason = "PERMISSION_DENIED"


class PayloadTooLarge(StepwellError):
    reason = "PAYLOAD_TOO_LARGE"


class ResourceExhausted(StepwellError):
    reason = "RESOURCE_EXHAUSTED"


class QuotaExceeded(ResourceExhausted):
    """The tenant exceeds one of its own limits. `quota` names the limit, such as "requests"."""

    reason = "RATE_LIMIT_EXCEEDED"

    def __init__(
        self,
        message: str,
        *,
        tenant_id: str = "",
        quota: str = "",
        field: str | None = None,
        reason: str | None = None,
        retry_after_seconds: float | None = None,
        may_retry: bool | None = None,
    ) -> None:
        super().__init__(
            message,
            field=field,
            reason=reason,
            retry_after_seconds=retry_after_seconds,
            may_retry=may_retry,
        )
        self.tenant_id = tenant_id
        self.quota = quota


class FailedPrecondition(StepwellError):
    """The service's state forbids the call: blocks are in use, a step is out of sequence, or the
    caller's generation number of a pool or worker is stale.
    """

    reason = "FAILED_PRECONDITION"


class Aborted(StepwellError):
    """The request was accepted, and later taken over or cancelled."""

    reason = "ABORTED"


class Unavailable(StepwellError):
    """A required component is down or draining. A client may retry after `retry_after_seconds`."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(Unavailable):
    """The caller's deadline passed before the response was complete."""

    reason = "DEADLINE_EXCEEDED"
    may_retry = False


class InternalError(StepwellError):
    """A defect in this service, not in the request."""

    reason = "INTERNAL"
