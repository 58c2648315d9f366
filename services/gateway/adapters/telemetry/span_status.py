"""The span status of a call, by OpenTelemetry's conventions for HTTP and gRPC.

A server span has the status ERROR for an error of the server, and no status for an error of the
client.
"""

from collections.abc import Mapping

from grpc import StatusCode as GrpcCode
from opentelemetry.trace import Status, StatusCode

from services.common.telemetry import names
from services.gateway.adapters.telemetry.request_record import CLIENT_CLOSED_REQUEST, RequestRecord

_MAX_CHARACTERS = 256
_SERVER_ERRORS = frozenset(
    code.name
    for code in (
        *(GrpcCode.UNKNOWN, GrpcCode.DEADLINE_EXCEEDED, GrpcCode.UNIMPLEMENTED),
        *(GrpcCode.INTERNAL, GrpcCode.UNAVAILABLE, GrpcCode.DATA_LOSS),
    )
)


def span_status(record: RequestRecord) -> Status:
    if not _is_server_error(record):
        return Status(StatusCode.UNSET)
    return Status(StatusCode.ERROR, record.error_message[:_MAX_CHARACTERS])


def status_attributes(record: RequestRecord) -> Mapping[str, str | int]:
    """Returns the attributes with the status code, if one was sent, and the error. `error.type` is
    set only for errors of the server.
    """
    attributes: dict[str, str | int] = {}
    if record.call.protocol == "grpc" and record.status:
        attributes[names.ATTR_RPC_RESPONSE_STATUS_CODE] = record.status
    elif record.status not in ("", CLIENT_CLOSED_REQUEST):
        attributes[names.ATTR_HTTP_RESPONSE_STATUS_CODE] = int(record.status)
    if _is_server_error(record):
        attributes[names.GENAI_ERROR_TYPE] = record.error_type or record.status
    elif record.error_type:
        attributes[names.ATTR_CLIENT_ERROR] = record.error_type
        attributes[names.ATTR_CLIENT_ERROR_MESSAGE] = record.error_message[:_MAX_CHARACTERS]
    return attributes


def _is_server_error(record: RequestRecord) -> bool:
    """Whether the call ended with a server error. The record's error is checked in addition to the
    status, because a stream that fails later has already sent the status 200.
    """
    if record.call.protocol == "grpc":
        return record.status in _SERVER_ERRORS
    return record.status.startswith("5") or (record.status.startswith("2") and record.is_failure)
