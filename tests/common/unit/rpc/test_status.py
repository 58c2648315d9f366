"""Each error has a gRPC status, and a client catches the error that the server raised."""

import asyncio
import importlib
import json
import pkgutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

import services
from services.common import errors
from services.common.rpc.channel import open_channel
from services.common.rpc.server import StatusInterceptor
from services.common.rpc.status import (
    JITTER,
    STATUS_OF,
    UNDECODABLE,
    from_peer,
    from_rpc_error,
    status_code,
    to_rich_status,
    trailing_metadata,
)
from services.worker.backends.device import UnsuitableDevice
from services.worker.backends.out_of_memory import NotEnoughMemory
from services.worker.core.errors import KVCacheTooSmall, NoSpeculation, NoTier
from services.worker.models.errors import ModelError
from services.worker.platforms.cpu_kernels import KernelsUnavailable
from tests.scheduler.cuttable_proxy import CuttableProxy

ENDS_A_START = (
    ModelError,
    KVCacheTooSmall,
    NoSpeculation,
    NoTier,
    NotEnoughMemory,
    KernelsUnavailable,
    UnsuitableDevice,
)
"""Errors that end the worker before it serves, so that no client can catch them."""


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
    """A servicer that raises an error: in Check at once, in Watch after its first answer."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.num_calls = 0

    async def Check(self, request: object, context: object) -> None:  # noqa: ARG002, N802
        self.num_calls += 1
        raise self._error

    async def Watch(  # noqa: N802
        self,
        request: object,  # noqa: ARG002
        context: object,  # noqa: ARG002
    ) -> object:
        yield health_pb2.HealthCheckResponse()
        raise self._error


@asynccontextmanager
async def refusing(
    error: Exception, raising: Raising | None = None, options: Sequence[tuple[str, str]] = ()
) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """A client of a server whose handlers raise `error`."""
    server = grpc.aio.server(interceptors=[StatusInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(raising or Raising(error), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop(0)


async def caught(error: Exception, *, streaming: bool) -> errors.StepwellError:
    """The error that a client catches when a handler raises `error`."""
    async with refusing(error) as stub:
        return await _call(stub, streaming=streaming)


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
    if kind in (errors.PayloadTooLarge, errors.QuotaExceeded):
        assert type(error) is errors.ResourceExhausted, "they share a status"
    else:
        assert type(error) is kind
    assert error.message == "what went wrong"
    assert error.error_reason == kind.reason
    assert error.field == "sampling.top_p"
    if kind is errors.DeadlineExceeded:
        assert error.retry_after_seconds is None, "trying again does not help"
    else:
        assert error.retry_after_seconds is not None
        assert 1.5 <= error.retry_after_seconds <= 1.5 * (1 + JITTER)


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
@pytest.mark.parametrize("letter", ["x", "é", "\N{CJK UNIFIED IDEOGRAPH-65E5}", "\ud800"])
async def test_a_long_message_is_cut_and_keeps_its_status(letter: str, streaming: bool) -> None:
    """An error of a grammar can contain the whole grammar."""
    raised = errors.QuotaExceeded(
        "grammar: " + 40_000 * letter,
        field="structured_outputs",
        reason="GRAMMAR",
        tenant_id="acme",
        retry_after_seconds=1.0,
    )
    error = await caught(raised, streaming=streaming)
    assert (type(error), error.error_reason) == (errors.ResourceExhausted, "GRAMMAR")
    assert error.field == "structured_outputs"
    assert error.message.startswith("grammar: ")
    assert error.message.endswith("…")
    assert 990 < len(error.message.encode()) <= 1000


async def trailing(error: errors.StepwellError) -> dict[str, str | bytes]:
    """The trailing metadata of a call that ends with an error."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async with refusing(error) as stub:
            await stub.Check(health_pb2.HealthCheckRequest())
    return dict(failed.value.trailing_metadata())


async def test_grpc_itself_is_told_when_to_try_again() -> None:
    hinted = await trailing(errors.ResourceExhausted("full", retry_after_seconds=0.2))
    assert 200 <= int(hinted["grpc-retry-pushback-ms"]) <= 250
    assert "grpc-retry-pushback-ms" not in await trailing(errors.Unavailable("away"))
    late = errors.DeadlineExceeded("late", retry_after_seconds=1.0)
    assert (await trailing(late))["grpc-retry-pushback-ms"] == "-1"


async def test_a_client_with_a_retry_policy_comes_back_after_the_hint_unless_it_must_not() -> None:
    policy = {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.01s",
                    "maxBackoff": "0.01s",
                    "backoffMultiplier": 1,
                    "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
                },
            }
        ]
    }
    options = (("grpc.service_config", json.dumps(policy)),)
    for may_retry, num_calls in ((None, 3), (False, 1)):
        error = errors.ResourceExhausted("full", retry_after_seconds=0.1, may_retry=may_retry)
        raising = Raising(error)
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError):
            async with refusing(error, raising, options) as stub:
                await stub.Check(health_pb2.HealthCheckRequest())
        assert raising.num_calls == num_calls
        assert time.monotonic() - began >= 0.1 * (num_calls - 1)


async def test_a_tenants_limit_names_the_tenant() -> None:
    error = errors.QuotaExceeded("enough", tenant_id="acme", quota="tokens")
    rich = to_rich_status(error)
    failure = error_details_pb2.QuotaFailure()
    assert rich.details[1].Unpack(failure)
    assert [violation.subject for violation in failure.violations] == ["tenant:acme"]


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
            "the worker cannot be reached",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:9000: "
            "recvmsg:Connection reset by peer (104)",
            "the worker ends each connection at once: the server may require TLS or another client "
            "certificate, or a proxy in between has no server",
        ),
        ("Stream removed (recvmsg:Connection reset by peer)", "the worker closed the connection"),
        ("Stream removed (recvmsg:Connection timed out)", "the worker does not answer"),
        ("Stream removed (ping timeout)", "the worker does not answer pings"),
        ("TLS handshake failed", "the worker cannot be reached: TLS handshake failed"),
    ],
)
def test_grpcs_message_about_a_connection_becomes_a_sentence(details: str, sentence: str) -> None:
    metadata = grpc.aio.Metadata()
    failed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, details=details)
    error = from_peer("the worker", failed)
    assert type(error) is errors.Unavailable
    assert error.message == sentence


def test_a_message_that_the_peer_cannot_decode_is_no_fault_of_a_request() -> None:
    refused = errors.InvalidArgument("a message to /it cannot be decoded", reason=UNDECODABLE)
    details = grpc.aio.Metadata(*trailing_metadata(refused))
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), details, details=refused.message
    )
    assert type(from_peer("the worker", failed)) is errors.Unavailable


async def test_a_connection_that_ends_under_a_write_was_closed_by_the_peer() -> None:
    async def answer_once(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        yield await anext(requests)
        await asyncio.Event().wait()  # reads no more, so that further writes of the client wait

    async def write_on() -> None:
        while True:
            await call.write(bytes(100_000))

    server = grpc.aio.server()
    handlers = {"Call": grpc.stream_stream_rpc_method_handler(answer_once)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Pool", handlers),))
    proxy = CuttableProxy(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    async with open_channel(await proxy.start()) as channel:
        call = channel.stream_stream("/Pool/Call")()
        await call.write(b"first")
        await call.read()
        writer = asyncio.create_task(write_on())
        await asyncio.sleep(0)
        proxy.cut()
        # Once the call has ended, a write may raise InvalidStateError, while a read has the status.
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await writer
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
    error = from_peer("the kvpool", failed.value)
    assert type(error) is errors.Unavailable
    assert error.message == "the kvpool closed the connection"
    await proxy.close()
    await server.stop(0)
