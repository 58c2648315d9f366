"""The server's side of streams over a Unix socket."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from inspect import isasyncgenfunction
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.rpc import code_pb2, status_pb2

from services.common.local_stream import FrameKind, LocalStream, opened
from services.common.message_limits import LOOKAHEAD_BYTES
from services.common.status import DETAILS_KEY

_BACKLOG = 64
_OK = status_pb2.Status()
_STOPPED = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="the server stops")
_DEFECT = status_pb2.Status(code=code_pb2.UNKNOWN, message="a defect of the server")


class LocalServer:
    """Serves methods with streams both ways, each call over a connection of its own. At most
    `max_calls` are served at once; further ones are refused with RESOURCE_EXHAUSTED.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self.handlers: dict[str, Any] = {}
        """grpc's, by the name of the method."""
        self.max_calls = max_calls
        self.tasks: set[asyncio.Task[None]] = set()
        """Those that serve a call."""
        self._listener: socket.socket | None = None
        self._path = Path()

    def start(self, path: str) -> None:
        """Listens at `path`, in place of a socket that is there. Raises OSError."""
        self._path = Path(path)
        listener = self._listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        if self._path.is_socket():
            self._path.unlink(missing_ok=True)
        listener.bind(path)
        listener.listen(_BACKLOG)
        asyncio.get_running_loop().add_reader(listener, self._accept)

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more calls, and ends those that run after `grace_seconds`."""
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

    def _accept(self) -> None:
        if self._listener is not None:
            with suppress(OSError):  # such as where the client has gone again
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                _Call(self, connection)


class _Call:
    """One call, and the context that its handler gets: of `grpc.aio.ServicerContext` what handlers
    of services use.
    """

    def __init__(self, server: LocalServer, connection: socket.socket) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._handler: Any = None
        self._status = _OK
        self._is_cancelled = False
        self._stream = LocalStream(connection, LOOKAHEAD_BYTES, self._take, self._lost)

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
        """Ends the call with this status; of the metadata its details are sent."""
        rich = dict(trailing_metadata).get(DETAILS_KEY)
        if rich is None:
            self._status = status_pb2.Status(code=code.value[0], message=details)
        else:
            self._status = status_pb2.Status.FromString(rich)
        raise grpc.aio.AbortError(details)

    async def write(self, response: Any) -> None:
        """Sends a response, and waits while the client reads none."""
        self._stream.send(FrameKind.MESSAGE, self._handler.response_serializer(response))
        if self._stream.has_unsent:
            await self._stream.drained()

    async def _requests(self) -> AsyncIterator[Any]:
        while (data := await self._stream.read()) is not None:
            yield self._handler.request_deserializer(data)

    def _take(self, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.END:
            self._stream.end()
        elif kind is FrameKind.OPEN and self._handler is None:
            self._open(payload)
        else:
            self._stream.close()
            self._lost()

    def _lost(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _open(self, payload: bytes) -> None:
        server = self._server
        try:
            method, lookahead_bytes = opened(payload)
        except ValueError:
            self._stream.close()
            return
        self._handler = server.handlers.get(method)
        if self._handler is None:
            self._refuse(code_pb2.UNIMPLEMENTED, f"no stream is served by the name {method}")
        elif server.max_calls is not None and len(server.tasks) >= server.max_calls:
            self._refuse(code_pb2.RESOURCE_EXHAUSTED, f"{server.max_calls} streams are served")
        else:
            self._stream.limit_sending(min(lookahead_bytes, LOOKAHEAD_BYTES))
            self._task = asyncio.create_task(self._serve(), name=method)
            server.tasks.add(self._task)
            self._task.add_done_callback(server.tasks.discard)

    def _refuse(self, code: code_pb2.Code, message: str) -> None:
        self._end(status_pb2.Status(code=code, message=message))

    def _end(self, status: status_pb2.Status) -> None:
        self._stream.send(FrameKind.STATUS, status.SerializeToString())
        self._stream.close_when_sent()

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
