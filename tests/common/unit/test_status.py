"""Errors and statuses: the map is complete, and what one service raises another one catches."""

import importlib
import pkgutil
from collections.abc import Awaitable, Callable

import grpc
import pytest
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

import services
from services.common import errors
from services.common.channel import open_channel
from services.common.server import StatusInterceptor
from services.common.status import (
    STATUS_OF,
    from_peer,
    from_rpc_error,
    status_code,
    to_rich_status,
)
from services.worker.backends.device import UnsuitableDevice
from services.worker.backends.out_of_memory import NotEnoughMemory
from services.worker.core.errors import KVCacheTooSmall
from services.worker.models.errors import ModelError
from services.worker.platforms.cpu_kernels import KernelsUnavailable

ENDS_A_START = (
    ModelError,
    KVCacheTooSmall,
    NotEnoughMemory,
    KernelsUnavailable,
    UnsuitableDevice,
)
"""They end the worker before it serves."""


def all_errors() -> list[type[errors.StepwellError]]:
    """Every kind of error that any service defines."""
    for package in pkgutil.walk_packages(services.__path__, "services."):
        if package.name.endswith(("errors", "ports")):
            importlib.import_module(package.name)
    found, todo = [], [errors.StepwellError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += kind.__subclasses__()
    return found[1:]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_and_a_reason(kind: type[errors.StepwellError]) -> None:
    travels = not issubclass(kind, ENDS_A_START)
    assert travels == any(ancestor in STATUS_OF for ancestor in kind.__mro__)
    assert kind.reason != errors.StepwellError.reason
    assert kind.reason == kind.reason.upper()


def test_reasons_of_the_kinds_are_their_own() -> None:
    reasons = [kind.reason for kind in STATUS_OF]
    assert len(set(reasons)) == len(reasons)


def test_the_nearest_ancestor_decides() -> None:
    class Special(errors.OutOfRange):
        reason = "SPECIAL"

    assert status_code(Special("x")) is grpc.StatusCode.OUT_OF_RANGE
    assert status_code(errors.StepwellError("x")) is grpc.StatusCode.INTERNAL
    assert to_rich_status(Special("x")).code == code_pb2.OUT_OF_RANGE


class Raising(health_pb2_grpc.HealthServicer):
    """Raises, before or after its first answer."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def Check(self, request: object, context: object) -> None:  # noqa: ARG002, N802
        raise self._error

    async def Watch(  # noqa: N802
        self,
        request: object,  # noqa: ARG002
        context: object,  # noqa: ARG002
    ) -> object:
        yield health_pb2.HealthCheckResponse()
        raise self._error


async def caught(error: Exception, *, streaming: bool) -> errors.StepwellError:
    """What a client catches when a handler raises."""
    server = grpc.aio.server(interceptors=[StatusInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(Raising(error), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            return await _call(health_pb2_grpc.HealthStub(channel), streaming=streaming)
    finally:
        await server.stop(0)


async def _call(stub: health_pb2_grpc.HealthStub, *, streaming: bool) -> errors.StepwellError:
    try:
        if streaming:
            async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                pass
        else:
            await stub.Check(health_pb2.HealthCheckRequest())
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("it did not fail")


Catch = Callable[[Exception], Awaitable[errors.StepwellError]]


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
@pytest.mark.parametrize("kind", STATUS_OF, ids=lambda kind: kind.__name__)
async def test_an_error_arrives_as_it_was_raised(
    kind: type[errors.StepwellError], streaming: bool
) -> None:
    raised = kind("what went wrong", field="sampling.top_p", retry_after_seconds=1.5)
    error = await caught(raised, streaming=streaming)
    if kind is errors.PayloadTooLarge:
        assert type(error) is errors.ResourceExhausted, "they share a status"
    else:
        assert type(error) is kind
    assert error.message == "what went wrong"
    assert error.error_reason == kind.reason
    assert (error.field, error.retry_after_seconds) == ("sampling.top_p", 1.5)


async def test_a_reason_of_its_own_travels() -> None:
    error = await caught(errors.FailedPrecondition("x", reason="BLOCKS_IN_USE"), streaming=False)
    assert error.error_reason == "BLOCKS_IN_USE"
    assert (error.field, error.retry_after_seconds) == (None, None)


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
async def test_a_defect_is_internal_and_tells_no_secrets(
    streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error = await caught(KeyError("secret"), streaming=streaming)
    assert type(error) is errors.InternalError
    assert "secret" not in error.message
    assert "KeyError" in error.message
    assert "defect while serving" in caplog.text


async def test_an_address_without_a_server_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        error = await _call(health_pb2_grpc.HealthStub(channel), streaming=False)
    assert type(error) is errors.Unavailable
    assert error.message


async def test_a_deadline_that_passes_is_unavailable() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=0.05, wait_for_ready=True
            )
    assert isinstance(from_rpc_error(failed.value), errors.Unavailable)
    await server.stop(0)


async def test_what_is_not_served_is_a_defect() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        error = await _call(health_pb2_grpc.HealthStub(channel), streaming=False)
    assert type(error) is errors.InternalError
    await server.stop(0)


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: unix:/tmp/w.sock: connect: "
            "No such file or directory (2)",
            "the worker is not there",
        ),
        ("Stream removed (recvmsg:Connection reset by peer)", "the worker closed the connection"),
        ("Stream removed (ping timeout)", "the worker answers no ping"),
        ("TLS handshake failed", "the worker is gone: TLS handshake failed"),
    ],
)
def test_grpcs_message_about_a_connection_becomes_a_sentence(details: str, sentence: str) -> None:
    metadata = grpc.aio.Metadata()
    failed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, details=details)
    error = from_peer("the worker", failed)
    assert type(error) is errors.Unavailable
    assert error.message == sentence
