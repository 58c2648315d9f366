"""Records of gRPC calls, for logs and traces."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

import grpc

from services.common.errors import StepwellError
from services.common.rpc.server import Context
from services.common.rpc.status import status_code
from services.gateway.adapters.telemetry.request_record import (
    CALL_RECORD,
    CANCELLED,
    REQUEST_ID,
    TRACE_ID,
    Call,
    RequestRecord,
    is_failure,
)
from services.gateway.adapters.telemetry.request_recorder import RequestRecorder


class CallRecords:
    """Begins and ends the RequestRecords of gRPC calls."""

    def __init__(self, recorder: RequestRecorder) -> None:
        self._recorder = recorder

    @contextmanager
    def recording(
        self, method: str, operation: str, context: Context, *, in_trailer: bool = True
    ) -> Iterator[RequestRecord]:
        """Records a gRPC call, or one turn of a GenerateSession call, while the `with` block runs.
        Sets the context variable CALL_RECORD to the record. If `in_trailer` is true, the record's
        request id and trace id are sent in the trailing metadata. It is false for turns, because a
        GenerateSession call has several records.
        """
        call = Call("grpc", "POST", method, client_of(context))
        record = self._recorder.begin(call, operation, metadata_of(context))
        CALL_RECORD.set(record)
        code = grpc.StatusCode.OK
        try:
            yield record
        except StepwellError as error:
            code = status_code(error)
            record.failed(error.error_reason.lower(), error.message, is_failure=is_failure(error))
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            record.failed(
                CANCELLED, "the client disconnected or cancelled the request", is_failure=False
            )
            raise
        except Exception as error:
            code = grpc.StatusCode.INTERNAL
            record.failed(type(error).__name__, "a defect", is_failure=True)
            raise
        finally:
            record.status = code.name
            names = ((REQUEST_ID.lower(), record.request_id), (TRACE_ID.lower(), record.trace_id))
            if in_trailer:
                context.set_trailing_metadata((*(context.trailing_metadata() or ()), *names))
            self._recorder.end_soon(record)


def metadata_of(context: Context) -> dict[str, str]:
    """Returns a call's metadata as a map from names to values, without binary values."""
    metadata = context.invocation_metadata() or ()
    return {name: value for name, value in metadata if isinstance(value, str)}


def client_of(context: Context) -> str:
    """Returns the client's address and port. The result is empty for a Unix socket."""
    kind, _, address = unquote(context.peer() or "").partition(":")
    return address if kind in ("ipv4", "ipv6") else ""
