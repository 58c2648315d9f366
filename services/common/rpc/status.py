"""Converts errors to gRPC statuses with google.rpc details, such as ErrorInfo, and back."""

import random
import re
from datetime import timedelta

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import errors
from services.common.errors import StepwellError

DOMAIN = "stepwell"

UNDECODABLE = "UNDECODABLE"
"""The error reason for a message that cannot be decoded because it was damaged in transit."""
_MAX_MESSAGE_BYTES = 1000
"""Limit on an error's message in UTF-8. A status has the message up to three times, and encoding it
takes up to three times the bytes. If metadata exceed 8 kB, grpc's clients see RESOURCE_EXHAUSTED.
"""
DETAILS_KEY = "grpc-status-details-bin"
"""The key of the status details in the trailing metadata."""
_PUSHBACK = "grpc-retry-pushback-ms"

_CONNECTION_ENDS = (
    (r"Hostname Verification", "presents a certificate whose names do not include its address"),
    (r"CERTIFICATE_VERIFY_FAILED.*expired", "presents a certificate that has expired"),
    (r"CERTIFICATE_VERIFY_FAILED", "presents a certificate that this service does not trust"),
    (r"WRONG_VERSION_NUMBER", "does not speak TLS"),
    (
        r"failed to connect.*Secure read",
        "ends each connection at once: the server may require another client certificate, or a "
        "proxy in between has no server",
    ),
    (
        r"failed to connect.*(Socket closed|Connection reset|Broken pipe)",
        "ends each connection at once: the server may require TLS or another client certificate, "
        "or a proxy in between has no server",
    ),
    (r"ping timeout", "does not answer pings"),
    (r"failed to connect", "cannot be reached"),
    (r"Connection timed out", "does not answer"),
    (r"Connection reset", "closed the connection"),
    (r"Socket closed", "closed the connection"),
)
"""Patterns for grpc's messages about connections, with their meanings. The first match counts."""

STATUS_OF: dict[type[errors.StepwellError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.PayloadTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}

_NOT_READ_BACK = (errors.PayloadTooLarge, errors.QuotaExceeded)
"""Kinds that `from_rpc_error` never returns, since no service sends them to another service."""

_KIND_OF: dict[grpc.StatusCode, type[errors.StepwellError]] = {
    **{status: kind for kind, status in STATUS_OF.items() if kind not in _NOT_READ_BACK},
    grpc.StatusCode.CANCELLED: errors.Aborted,
}


def status_code(error: errors.StepwellError) -> grpc.StatusCode:
    """The gRPC status of the first class in the error's MRO that has one."""
    kinds = (kind for kind in type(error).__mro__ if kind in STATUS_OF)
    return STATUS_OF[next(kinds, errors.InternalError)]


def sent_message(error: errors.StepwellError) -> str:
    """The error's message as it is sent: the end of a long message is omitted."""
    encoded = error.message.encode(errors="replace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: _MAX_MESSAGE_BYTES - len("…".encode())].decode(errors="ignore") + "…"


def to_rich_status(
    error: errors.StepwellError, retry_after_seconds: float | None = None
) -> status_pb2.Status:
    """The status of an error, with details. `retry_after_seconds` is the client's retry hint."""
    message = sent_message(error)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.error_reason, domain=DOMAIN)]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.QuotaExceeded):
        quota = error_details_pb2.QuotaFailure.Violation(
            subject=f"tenant:{error.tenant_id}", description=message
        )
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    if retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromTimedelta(timedelta(seconds=retry_after_seconds))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code: int = status_code(error).value[0]
    rich = status_pb2.Status(code=code, message=message)
    for detail in details:
        rich.details.add().Pack(detail)
    return rich


def trailing_metadata(error: errors.StepwellError) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata of an error, which has the status details and grpc's own retry delay.
    grpc retries only if the service config has a retryPolicy. A delay of -1 forbids a retry.
    """
    seconds = retry_hint_seconds(error)
    details = to_rich_status(error, seconds).SerializeToString()
    if error.may_retry is False:
        return (DETAILS_KEY, details), (_PUSHBACK, "-1")
    if seconds is None:
        return ((DETAILS_KEY, details),)
    return (DETAILS_KEY, details), (_PUSHBACK, str(round(1000 * seconds)))


RpcError = grpc.aio.AioRpcError | grpc.Call
"""The error of a failed call, in grpc's asyncio client or in grpc's blocking client."""


def from_rpc_error(rpc_error: RpcError) -> errors.StepwellError:
    """Converts a failed call's status to an error, with the details that the server sent."""
    kind = _KIND_OF.get(rpc_error.code(), errors.InternalError)
    message = rpc_error.details() or rpc_error.code().name
    reason = field = retry_after_seconds = None
    rich = rpc_status.from_call(rpc_error)
    for packed in rich.details if rich is not None else ():
        if packed.Unpack(info := error_details_pb2.ErrorInfo()):
            reason = info.reason
        elif packed.Unpack(bad := error_details_pb2.BadRequest()):
            field = bad.field_violations[0].field if bad.field_violations else None
        elif packed.Unpack(retry := error_details_pb2.RetryInfo()):
            retry_after_seconds = retry.retry_delay.ToTimedelta().total_seconds()
    return kind(message, field=field, reason=reason, retry_after_seconds=retry_after_seconds)


def from_peer(peer: str, rpc_error: RpcError) -> errors.StepwellError:
    """Like `from_rpc_error`, but messages of connection errors name the peer, such as "the worker
    at 10.0.0.7:9003 closed the connection". If the peer could not decode a message, the message was
    damaged in transit, and the error is Unavailable.
    """
    if rpc_status.from_call(rpc_error) is None:
        if rpc_error.code() is grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(f"{peer} {_connection_end(rpc_error.details() or '')}")
        if rpc_error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.Unavailable(f"{peer} does not answer")
    error = from_rpc_error(rpc_error)
    return errors.Unavailable(error.message) if error.error_reason == UNDECODABLE else error


def _connection_end(details: str) -> str:
    meanings = (meaning for words, meaning in _CONNECTION_ENDS if re.search(words, details))
    return next(meanings, f"cannot be reached: {details}")


JITTER = 0.25
"""Limit on the random addition to a retry hint, as a fraction of the hint. Due to the addition,
clients that were rejected together do not retry together.
"""


def retry_hint_seconds(error: StepwellError) -> float | None:
    """Seconds after which the client should retry, at least the error's `retry_after_seconds`. None
    if the error has no retry time or a retry does not help.
    """
    if error.retry_after_seconds is None or error.may_retry is False:
        return None
    return error.retry_after_seconds * random.uniform(1, 1 + JITTER)
