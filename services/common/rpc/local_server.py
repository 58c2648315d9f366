"""The server side of streams over a Unix socket."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from inspect import isasyncgenfunction
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.rpc import code_pb2, status_pb2

from services.common.rpc.addresses import remove_abandoned
from services.common.rpc.local_stream import FrameKind, LocalStream, opened, too_large
from services.common.rpc.message_limits import LOOKAHEAD_BYTES, MAX_MESSAGE_BYTES
from services.common.rpc.status import DETAILS_KEY

logger = logging.getLogger(__name__)

_BACKLOG = 64
_OPENING_SECONDS = 10.0
"""Time within which a client must name a method after it has connected."""
_ACCEPT_PAUSE_SECONDS = 1.0
"""How long no connections are accepted after a failure, such as a lack of file descriptors."""
_OK = status_pb2.Status()
_STOPPED = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="the server stops")
_DEFECT = status_pb2.Status(code=code_pb2.UNKNOWN, message="a defect of the server")


class LocalServer:
    """Serves methods with streams in both directions. Each call has its own connection. At most
    `max_calls` calls run at once. Further calls are rejected with RESOURCE_EXHAUSTED.
    """

    def __init__(
        self,
        max_calls: int | None = None,
        opening_seconds: float = _OPENING_SECONDS,
        max_received_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """A connection that names no method within `opening_seconds` is closed. A message from a
        client has at most `max_received_bytes` bytes.
        """
        self.handlers: dict[str, Any] = {}
        """Maps methods, such as /package.Service/Method, to grpc's handlers."""
        self.max_calls = max_calls
        self.max_received_bytes = max_received_bytes
        self.tasks: set[asyncio.Task[None]] = set()
        self.opening_seconds = opening_seconds
        self.unopened: set[_Call] = set()
        """Connections that have not named a method yet."""
        self._listener: socket.socket | None = None
        self._path = Path()

    def start(self, path: str) -> None:
        """Listens at `path`. Replaces the socket of an ended process. Raises OSError."""
        self._path = Path(path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.setblocking(False)
            remove_abandoned(self._path)
            listener.bind(path)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._go_on_accepting()

    @property
    def takes_calls(self) -> bool:
        return self._listener is not None

    async def stop(self, grace_seconds: float) -> None:
        """Rejects new calls, and ends running calls after `grace_seconds`."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=grace_seconds)
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        for call in list(self.unopened):
            call.close()

    def _go_on_accepting(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has disconnected
            return
        except OSError as error:
            logger.warning("the service accepts no stream for a second: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_ACCEPT_PAUSE_SECONDS, self._go_on_accepting)
            return
        connection.setblocking(False)
        _Call(self, connection)


class _Call:
    """One call. It is also the context that the call's handler receives, and has the parts of
    `grpc.aio.ServicerContext` that the services' handlers use.
    """

    def __init__(self, server: LocalServer, connection: socket.socket) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._handler: Any = None
        self._status = _OK
        self._is_cancelled = False
        self._stream = LocalStream(
            connection, LOOKAHEAD_BYTES, self._take, self._lost, server.max_received_bytes
        )
        server.unopened.add(self)
        loop = asyncio.get_running_loop()
        self._opening = loop.call_later(server.opening_seconds, self.close)

    def peer(self) -> str:
        return "unix:"

    def cancelled(self) -> bool:
        """Whether the client has ended the call."""
        return self._is_cancelled

    def trailing_metadata(self) -> tuple[()]:
        return ()

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: tuple[tuple[str, Any], ...] = (),
    ) -> NoReturn:
        """Ends the call with this status. Sends only the status details in `trailing_metadata`."""
        rich = dict(trailing_metadata).get(DETAILS_KEY)
        if rich is None:
            self._status = status_pb2.Status(code=code.value[0], message=details)
        else:
            self._status = status_pb2.Status.FromString(rich)
        raise grpc.aio.AbortError(details)

    def close(self) -> None:
        """Closes the connection without sending a status."""
        self._has_opened()
        self._stream.close()

    async def write(self, response: Any) -> None:
        """As `write_now`, but waits until the client has read enough."""
        self.write_now(response)
        if self._stream.has_unsent:
            await self._stream.drained()
            self._end_if_broken()
        if self._is_cancelled:
            await asyncio.sleep(0)  # raises the pending CancelledError of the call's task

    @property
    def can_write(self) -> bool:
        """Whether the client has read enough that a response can be sent at once."""
        return not self._stream.has_unsent

    def write_now(self, response: Any) -> None:
        """Sends a response, or stores it until the client has read earlier responses. Must be
        called in the event loop's thread. Raises AbortError if the response is too large.
        """
        message = self._handler.response_serializer(response)
        if len(message) > MAX_MESSAGE_BYTES:
            self._status = too_large(MAX_MESSAGE_BYTES)
            raise grpc.aio.AbortError(self._status.message)
        self._stream.send(FrameKind.MESSAGE, message)
        self._end_if_broken()

    def _end_if_broken(self) -> None:
        if self._stream.is_broken and not self._is_cancelled:
            self.close()
            self._lost()

    def write_at_once(self, response: Any) -> bool:
        """Sends a response from any thread. Returns False instead if `write` would wait or fail."""
        message = self._handler.response_serializer(response)
        return len(message) <= MAX_MESSAGE_BYTES and self._stream.send_at_once(message)

    async def _requests(self) -> AsyncIterator[Any]:
        while (data := await self._stream.read()) is not None:
            yield self._handler.request_deserializer(data)

    def _take(self, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.END:
            self._stream.end()
        elif kind is FrameKind.OPEN and self._handler is None:
            self._open(payload)
        else:
            self.close()
            self._lost()

    def _has_opened(self) -> None:
        self._opening.cancel()
        self._server.unopened.discard(self)

    def _lost(self) -> None:
        self._has_opened()
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _open(self, payload: bytes) -> None:
        server = self._server
        self._has_opened()
        try:
            method, lookahead_bytes = opened(payload)
        except ValueError:
            self._stream.close()
            return
        self._handler = server.handlers.get(method)
        if self._stream.has_lost_peer:  # perhaps while a signal had stopped this process
            self._stream.close()
        elif self._handler is None:
            self._refuse(code_pb2.UNIMPLEMENTED, f"the service has no stream {method}")
        elif not server.takes_calls:
            self._end(_STOPPED)
        elif server.max_calls is not None and len(server.tasks) >= server.max_calls:
            self._refuse(
                code_pb2.RESOURCE_EXHAUSTED,
                f"the service already serves {server.max_calls} streams, the most at once",
            )
        else:
            self._stream.limit_sending(min(lookahead_bytes, LOOKAHEAD_BYTES))
            self._task = asyncio.create_task(self._serve(), name=method)
            server.tasks.add(self._task)
            self._task.add_done_callback(self._served)

    def _refuse(self, code: code_pb2.Code, message: str) -> None:
        self._end(status_pb2.Status(code=code, message=message))

    def _end(self, status: status_pb2.Status) -> None:
        self._stream.send(FrameKind.STATUS, status.SerializeToString())
        self._stream.close_when_sent()

    def _served(self, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        if task.cancelled():  # cancelled before `_serve` began
            self._end(_STOPPED)

    async def _serve(self) -> None:
        status = _DEFECT
        try:
            await self._handle()
            status = _OK
        except grpc.aio.AbortError:
            status = self._status
        except asyncio.CancelledError:
            status = _STOPPED
        except Exception:
            if not self._is_cancelled:
                raise
        finally:
            self._end(status)

    async def _handle(self) -> None:
        behavior, requests = self._handler.stream_stream, self._requests()
        if not isasyncgenfunction(behavior):
            await behavior(requests, self)
            return
        async with aclosing(behavior(requests, self)) as responses:
            async for response in responses:
                await self.write(response)
