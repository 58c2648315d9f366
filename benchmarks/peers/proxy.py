"""A proxy between two services that reads each message and may change it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

import grpc

from benchmarks.peers.faults import BrokenCallError, Clean
from benchmarks.peers.methods import METHODS, Direction, Lane, streams_both_ways
from services.common.rpc.addresses import is_unix_address, unix_path
from services.common.rpc.channel import open_channel
from services.common.rpc.local_server import LocalServer
from services.common.rpc.local_stream import streams_path
from services.common.rpc.server import SERVER_OPTIONS

_Context = Any
BROKEN = "the fault-injecting proxy ended the call"
"""The status message of calls that the proxy ends."""


class Rule(Protocol):
    """Decides which messages are sent in place of each received message."""

    async def passed_on(self, lane: Lane, message: bytes) -> list[bytes]:
        """The messages to send in place of `message`. Raises BrokenCallError to end the call."""


class PeerProxy:
    """Accepts the calls that a service makes to `target`, and forwards them to `target`.

    The proxy forwards every method over gRPC. At a Unix socket it also forwards the local streams,
    which replace gRPC for methods that stream both ways. Statuses are forwarded unchanged. Each
    message passes through `rule` as bytes. `rule` can be replaced at any time.
    """

    def __init__(self, target: str) -> None:
        self.rule: Rule = Clean()
        self.num_messages: dict[Lane, int] = {}
        """Maps each lane (method and direction) to its number of received messages."""
        self._target = target
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((_AllMethods(self),))
        self._local = LocalServer()
        self._calls: set[asyncio.Task[Any]] = set()

    async def start(self, address: str) -> str:
        """Listens at host:port (port 0 selects a free port) or unix:PATH. Returns the address."""
        self._channel = open_channel(self._target)
        if is_unix_address(address):
            self._server.add_insecure_port(address)
            for method in filter(streams_both_ways, METHODS):
                self._local.handlers[method] = self.handler(method)
            self._local.start(streams_path(unix_path(address)))
            await self._server.start()
            return address
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return f"{address.rpartition(':')[0]}:{port}"

    def break_calls(self) -> None:
        for call in list(self._calls):
            call.cancel()

    async def close(self) -> None:
        await self._local.stop(0)
        await self._server.stop(0)
        await self._channel.close()

    def handler(self, method: str) -> Any:
        """The handler of a method, unary or streaming, because both are equal on the wire."""

        async def forward(messages: AsyncIterator[bytes], context: _Context) -> None:
            call = asyncio.ensure_future(self._forward(method, messages, context))
            self._calls.add(call)
            try:
                await call
            except (BrokenCallError, asyncio.CancelledError):
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                await context.abort(grpc.StatusCode.UNAVAILABLE, BROKEN)
            finally:
                call.cancel()
                self._calls.discard(call)

        return grpc.stream_stream_rpc_method_handler(forward, bytes, bytes)

    async def _forward(
        self, method: str, messages: AsyncIterator[bytes], context: _Context
    ) -> None:
        call = self._call(method, context)
        writer = asyncio.create_task(self._ask(method, messages, call))
        reader = asyncio.create_task(self._answer(method, call, context))
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_EXCEPTION)
            for task in (reader, writer):
                if task.done():
                    task.result()
            await reader
        except grpc.aio.AioRpcError as error:
            metadata = tuple(error.trailing_metadata() or ())
            await context.abort(error.code(), error.details() or "", metadata)
        finally:
            for task in (writer, reader):
                task.cancel()
            await asyncio.wait({writer, reader})
            call.cancel()

    def _call(self, method: str, context: _Context) -> Any:
        begin: Any = self._channel.stream_stream(method)
        if streams_both_ways(method):
            return begin()
        metadata = tuple(context.invocation_metadata() or ())
        kept = [(key, value) for key, value in metadata if not key.startswith("user-agent")]
        return begin(timeout=context.time_remaining(), metadata=kept)

    async def _ask(self, method: str, messages: AsyncIterator[bytes], call: Any) -> None:
        with suppress(asyncio.InvalidStateError):  # the call has ended; its reader detects that
            async for message in messages:
                for sent in await self._through(Lane(method, Direction.REQUEST), message):
                    await call.write(sent)
            await call.done_writing()

    async def _answer(self, method: str, call: Any, context: _Context) -> None:
        async for message in call:
            for sent in await self._through(Lane(method, Direction.RESPONSE), message):
                await context.write(sent)

    async def _through(self, lane: Lane, message: bytes) -> list[bytes]:
        self.num_messages[lane] = self.num_messages.get(lane, 0) + 1
        return await self.rule.passed_on(lane, message)


class _AllMethods(grpc.GenericRpcHandler):
    """Serves a method of any name."""

    def __init__(self, proxy: PeerProxy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._proxy.handler(handler_call_details.method)
