"""The one map between errors and gRPC statuses, in both directions. Details follow google.rpc:
ErrorInfo (reason, domain), BadRequest (field), RetryInfo (delay).
"""

from datetime import timedelta

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import errors

DOMAIN = "stepwell"

_CONNECTION_ENDS = (
    ("ping timeout", "answers no ping"),
    ("failed to connect", "is not there"),
    ("Connection reset", "closed the connection"),
    ("Socket closed", "closed the connection"),
)
"""Parts of grpc's messages about connections, and what they mean."""

STATUS_OF: dict[type[errors.StepwellError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PayloadTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}

_KIND_OF: dict[grpc.StatusCode, type[errors.StepwellError]] = {
    **{status: kind for kind, status in STATUS_OF.items() if kind is not errors.PayloadTooLarge},
    grpc.StatusCode.CANCELLED: errors.Aborted,
}


def status_code(error: errors.StepwellError) -> grpc.StatusCode:
    """The status of an error: that of the nearest class in its ancestry that has one."""
    kinds = (kind for kind in type(error).__mro__ if kind in STATUS_OF)
    return STATUS_OF[next(kinds, errors.InternalError)]


def to_rich_status(error: errors.StepwellError) -> status_pb2.Status:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.error_reason, domain=DOMAIN)]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromTimedelta(timedelta(seconds=error.retry_after_seconds))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code: int = status_code(error).value[0]
    rich = status_pb2.Status(code=code, message=error.message)
    for detail in details:
        rich.details.add().Pack(detail)
    return rich


def from_rpc_error(rpc_error: grpc.aio.AioRpcError) -> errors.StepwellError:
    """The error that a server raised; for other failures of a call, one by the status."""
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


def from_peer(peer: str, rpc_error: grpc.aio.AioRpcError) -> errors.StepwellError:
    """As `from_rpc_error`, but errors of the connection itself become a sentence about the peer,
    such as "the worker at 10.0.0.7:9003 closed the connection".
    """
    if rpc_status.from_call(rpc_error) is None:
        if rpc_error.code() is grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(f"{peer} {_connection_end(rpc_error.details() or '')}")
        if rpc_error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.Unavailable(f"{peer} does not answer")
    return from_rpc_error(rpc_error)


def _connection_end(details: str) -> str:
    """What happened to a connection; grpc's message is quoted if it is not known."""
    meanings = (meaning for words, meaning in _CONNECTION_ENDS if words in details)
    return next(meanings, f"is gone: {details}")
