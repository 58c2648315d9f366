"""The errors of all services, in kinds that have one gRPC status each.

    StepwellError
    ├── InvalidArgument      the request is wrong in any state; names the field
    │   └── OutOfRange       it is well formed but longer than what is served
    ├── NotFound             no such model, pool or request
    ├── Unauthenticated      no key, or a wrong one
    ├── PermissionDenied     the caller is known, and may not do this
    ├── PayloadTooLarge      the body is larger than what is read
    ├── ResourceExhausted    refused before queueing, or evicted from the queue; says when to retry
    │   └── QuotaExceeded    over a limit of the tenant's own, under any load
    ├── FailedPrecondition   the state does not allow it: fenced, out of sequence, in use
    ├── Aborted              taken over or cancelled after it was accepted
    ├── Unavailable          a part is away or draining; says when to try again
    │   └── DeadlineExceeded no answer came in the time that the caller gave
    └── InternalError        a defect here

A core subclasses the kind that fits and sets `reason`, the machine-readable name that travels in
`google.rpc.ErrorInfo`. The map to statuses is `services.common.rpc.status`.
"""

from typing import ClassVar


class StepwellError(Exception):
    """One sentence for people, a `reason` for machines, maybe the field at fault."""

    reason: ClassVar[str] = "UNKNOWN"
    may_retry: bool | None = None
    """Whether the same request may succeed later; None: as its status says."""

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


class InvalidArgument(StepwellError):
    """The request is wrong in any state of the system; `field` names what is at fault."""

    reason = "INVALID_ARGUMENT"


class OutOfRange(InvalidArgument):
    """Well formed, but longer or larger than what is served here."""

    reason = "OUT_OF_RANGE"


class NotFound(StepwellError):
    """No model, pool or request has that name."""

    reason = "NOT_FOUND"


class Unauthenticated(StepwellError):
    """No key, or one that is not known."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(StepwellError):
    """The caller is known, and may not do this."""

    reason = "PERMISSION_DENIED"


class PayloadTooLarge(StepwellError):
    """The body is larger than what is read."""

    reason = "PAYLOAD_TOO_LARGE"


class ResourceExhausted(StepwellError):
    """Refused before it was queued, or evicted from the queue before it was scheduled."""

    reason = "RESOURCE_EXHAUSTED"


class QuotaExceeded(ResourceExhausted):
    """The tenant is over a limit of its own. `quota` names what is limited, such as "requests"."""

    reason = "RATE_LIMIT_EXCEEDED"

    def __init__(
        self,
        message: str,
        *,
        tenant_id: str = "",
        quota: str = "",
        field: str | None = None,
        retry_after_seconds: float | None = None,
        may_retry: bool | None = None,
    ) -> None:
        super().__init__(
            message, field=field, retry_after_seconds=retry_after_seconds, may_retry=may_retry
        )
        self.tenant_id = tenant_id
        self.quota = quota


class FailedPrecondition(StepwellError):
    """The state does not allow it: a stale generation, a number out of sequence, blocks in use."""

    reason = "FAILED_PRECONDITION"


class Aborted(StepwellError):
    """Accepted, and then taken over or cancelled."""

    reason = "ABORTED"


class Unavailable(StepwellError):
    """A part that is needed is away or draining. `retry_after_seconds` says when to try again."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(Unavailable):
    """The deadline that the caller set passed before the answer was complete."""

    reason = "DEADLINE_EXCEEDED"
    may_retry = False


class InternalError(StepwellError):
    """A defect here, not in the request."""

    reason = "INTERNAL"
