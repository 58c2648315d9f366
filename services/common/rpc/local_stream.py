"""Messages in both directions over a connected Unix socket, between processes of one machine.

All data is sent in frames. A frame consists of the kind (one byte), the length of the payload (four
bytes, big-endian), and the payload. The client sends OPEN first. MESSAGE frames follow in both
directions. END means that the client sends no more messages. The server's last frame is STATUS, a
google.rpc.Status.
"""

import asyncio
import enum
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

from google.rpc import code_pb2, status_pb2

from services.common.rpc.message_limits import MAX_MESSAGE_BYTES

_HEADER = struct.Struct("!BI")
_HEADER_BYTES = _HEADER.size
_LOOKAHEAD = struct.Struct("!I")
_READ_BYTES = 64 * 1024


class FrameKind(enum.IntEnum):
    OPEN = 0
    MESSAGE = 1
    END = 2
    STATUS = 3


_MESSAGE, _LAST_KIND = int(FrameKind.MESSAGE), int(FrameKind.STATUS)
"""Plain numbers, because a comparison with a member of an enum takes several times as long."""


def streams_path(path: str) -> str:
    """The path of the streams' socket of a server that listens at the Unix socket `path`."""
    return f"{path}.streams"


def opening(method: str, lookahead_bytes: int) -> bytes:
    """Encodes the payload of OPEN: a method such as /package.Service/Method, and the number of
    bytes that the server may send before they are read.
    """
    return _LOOKAHEAD.pack(lookahead_bytes) + method.encode()


def opened(payload: bytes) -> tuple[str, int]:
    """The inverse of `opening`. Raises ValueError if a part is missing or is not UTF-8."""
    if len(payload) <= _LOOKAHEAD.size:
        raise ValueError("no method")
    return payload[_LOOKAHEAD.size :].decode(), _LOOKAHEAD.unpack_from(payload)[0]


def too_large(max_bytes: int) -> status_pb2.Status:
    """The status of a call that ends because a message has more than `max_bytes` bytes."""
    return status_pb2.Status(
        code=code_pb2.RESOURCE_EXHAUSTED, message=f"a message has more than {max_bytes} bytes"
    )


class LocalStream:
    """One end of a stream, in the running event loop. One task may read and one task may write. All
    methods except `send_at_once` must be called in the event loop's thread. Messages are sent and
    received in this thread. In grpc.aio each message and each end of a write wakes another thread
    first, which then notifies the event loop.
    """

    def __init__(
        self,
        connection: socket.socket,
        lookahead_bytes: int,
        on_frame: Callable[[FrameKind, bytes], None],
        on_lost: Callable[[], None],
        max_received_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Owns and closes `connection`, which must be non-blocking. Receiving pauses while more
        than `lookahead_bytes` bytes of messages are unread, but a single longer message is received
        as a whole. `on_frame` is called with all frames except messages. `on_lost` is called if the
        connection ends before `close` or receives an invalid frame, such as a frame with more than
        `max_received_bytes` bytes.
        """
        self._connection = connection
        self._lookahead_bytes = lookahead_bytes
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._max_received_bytes = max_received_bytes
        self._loop = asyncio.get_running_loop()
        self._begun = bytearray()
        """The received bytes of an incomplete frame."""
        self._messages: deque[bytes] = deque()
        self._receiver: Callable[[bytes], None] | None = None
        self._num_unread_bytes = 0
        self._is_held = False
        """Whether receiving is paused until messages are read."""
        self._sending = threading.Lock()
        """This lock is held while a frame is sent and while the connection is closed."""
        self._unsent = bytearray()
        self.is_broken = False
        """Whether a send failed because the peer had closed the connection."""
        self._has_ended = self._is_closing = self._is_closed = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._loop.add_reader(connection, self._receive)

    @property
    def has_unsent(self) -> bool:
        """Whether frames wait to be sent until the peer has read earlier frames."""
        return bool(self._unsent)

    @property
    def has_lost_peer(self) -> bool:
        """Whether the peer has closed the connection, even if the peer's data is still unread."""
        ends = select.poll()
        ends.register(self._connection, select.POLLHUP)
        return bool(ends.poll(0))

    def limit_sending(self, num_bytes: int) -> None:
        """Limits the bytes that the kernel buffers for the peer to about `num_bytes`."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Sends a frame, or stores it until the peer has read earlier frames. If the connection has
        ended, the frame is dropped. `on_lost` is then called after the remaining data is received.
        """
        with self._sending:
            if self._is_closed:
                return
            frame = _HEADER.pack(kind, len(payload)) + payload
            if self._unsent:
                self._unsent += frame
                return
            num_sent = self._try_to_send(frame)
            if num_sent < len(frame):
                self._unsent += memoryview(frame)[num_sent:]
                self._await_room()

    def send_at_once(self, message: bytes) -> bool:
        """Sends a message from any thread. Returns False, and sends nothing, if the peer has not
        read earlier frames or the connection has ended. If only the message's beginning can be sent
        now, the event loop sends the rest.
        """
        with self._sending:
            if self._is_closed or self._unsent:
                return False
            frame = _HEADER.pack(FrameKind.MESSAGE, len(message)) + message
            num_sent = self._try_to_send(frame)
            if self.is_broken or not num_sent:
                return False
            if num_sent < len(frame):
                self._unsent += memoryview(frame)[num_sent:]
                self._loop.call_soon_threadsafe(self._await_room)
            return True

    async def drained(self) -> None:
        """Waits until all frames are sent or the connection has ended."""
        while self._unsent and not self._is_closed:
            self._writer = self._loop.create_future()
            await self._writer

    def receive(self, receiver: Callable[[bytes], None]) -> None:
        """Calls `receiver` with each message when it arrives, before any later frame is processed.
        `receiver` must raise no error. Messages that have arrived already are passed to it at once.
        `read` must not be called any more.
        """
        while self._messages:
            receiver(self._next())
        self._receiver = receiver

    async def read(self) -> bytes | None:
        """Returns the next message, or None after the last message or the connection's end."""
        while not self._messages:
            if self._has_ended:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        return self._next()

    def _next(self) -> bytes:
        """Removes and returns the next message. Resumes receiving if it was paused."""
        message = self._messages.popleft()
        self._num_unread_bytes -= _HEADER_BYTES + len(message)
        if self._is_held and not self._is_ahead and not self._is_closed:
            self._is_held = False
            self._loop.add_reader(self._connection, self._receive)
        return message

    def end(self) -> None:
        """Records that the peer sends no more messages, so that `read` returns None at the end."""
        self._has_ended = True
        _wake(self._reader)

    def close_when_sent(self) -> None:
        if self._unsent:
            self._is_closing = True
        else:
            self.close()

    def close(self) -> None:
        """Closes the connection. Messages that were received before can still be read."""
        if self._is_closed:
            return
        self._loop.remove_reader(self._connection)
        with self._sending:
            self._is_closed = True
            if self._unsent:
                self._loop.remove_writer(self._connection)
            self._connection.close()
        self.end()
        _wake(self._writer)

    @property
    def _is_ahead(self) -> bool:
        return len(self._messages) > 1 and self._num_unread_bytes > self._lookahead_bytes

    def _lose(self) -> None:
        if not self._is_closed:
            self.close()
            self._on_lost()

    def _try_to_send(self, frame: bytes | bytearray) -> int:
        try:
            return self._connection.send(frame)
        except BlockingIOError:
            return 0
        except OSError:  # the peer has closed the connection
            self.is_broken = True
            return len(frame)

    def _await_room(self) -> None:
        if self._unsent and not self._is_closed:
            self._loop.add_writer(self._connection, self._send_on)

    def _send_on(self) -> None:
        with self._sending:
            del self._unsent[: self._try_to_send(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._connection)
            _wake(self._writer)
            if self._is_closing:
                self.close()

    def _receive(self) -> None:
        try:
            received = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._lose()
            return
        if self._begun:
            self._begun += received
            num_taken = self._take_frames(bytes(self._begun)) if self._is_complete() else 0
            del self._begun[:num_taken]
        elif (num_taken := self._take_frames(received)) < len(received):
            self._begun += received[num_taken:]
        if self._messages and self._is_ahead and not self._is_closed:
            self._is_held = True
            self._loop.remove_reader(self._connection)

    def _is_complete(self) -> bool:
        if len(self._begun) < _HEADER_BYTES:
            return False
        kind, length = _HEADER.unpack_from(self._begun)
        return not self._is_frame(kind, length) or len(self._begun) >= _HEADER_BYTES + length

    def _take_frames(self, received: bytes) -> int:
        """Processes the complete frames in `received`. Returns their total number of bytes."""
        start, num_bytes = 0, len(received)
        while num_bytes - start >= _HEADER_BYTES and not self._is_closed:
            kind, length = _HEADER.unpack_from(received, start)
            if not self._is_frame(kind, length):
                self._lose()
                break
            begin = start + _HEADER_BYTES
            end = begin + length
            if end > num_bytes:
                break
            start, payload = end, received[begin:end]
            if kind != _MESSAGE:
                self._on_frame(FrameKind(kind), payload)
            elif self._receiver is not None:
                self._receiver(payload)
            else:
                self._messages.append(payload)
                self._num_unread_bytes += _HEADER_BYTES + length
                _wake(self._reader)
        return start

    def _is_frame(self, kind: int, length: int) -> bool:
        return kind <= _LAST_KIND and length <= self._max_received_bytes


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
