"""Byte streams over the simulated network (`network`), as asyncio transports. HTTP uses them."""

import asyncio
from collections import deque
from functools import partial
from typing import Any

from services.simulation.runtime.network import (
    Connection,
    End,
    Network,
    Pipe,
    current_process,
    digest,
)
from services.simulation.runtime.process import Process

_KERNEL_BYTES = 128 * 1024
"""Bytes that the kernels of both machines buffer for a peer that does not read."""
_HIGH_BYTES = 64 * 1024


class MemoryStreams:
    """Creates the servers and connections of a VirtualLoop."""

    def __init__(self, network: Network) -> None:
        self._network = network
        network.loop.servers = self

    def listener(self, address: tuple[str, int]) -> "MemoryListener":
        return MemoryListener(self._network, f"{address[0]}:{address[1]}")

    def serve(self, protocol_factory: Any, listener: "MemoryListener") -> "MemoryListener":
        listener.protocol_factory = protocol_factory
        return listener

    async def connect(self, protocol_factory: Any, address: str) -> tuple[Any, Any]:
        """Connects to a listener. Raises ConnectionRefusedError."""
        network, client = self._network, current_process()
        answer: asyncio.Future[MemoryTransport | None] = network.loop.create_future()

        def answered(transport: MemoryTransport | None) -> None:
            if not answer.done():
                answer.set_result(transport)
            elif transport is not None:
                transport.abort()

        def refuse(listener: MemoryListener) -> None:
            Pipe(network, listener.process, client).send(answered, None)

        def arrived(listener: MemoryListener) -> None:
            """Runs in the server's kernel, which also accepts for a stopped process."""
            listener.process.at_end.remove(refused)
            if network.listeners.get(address) is not listener or listener.protocol_factory is None:
                refuse(listener)
                return
            connection = Connection(network, client, listener.process, has_keepalive=False)
            transport = MemoryTransport(network, connection.ends[0])
            server = MemoryTransport(network, connection.ends[1], transport)
            connection.ends[1].pipe.send(answered, transport)
            network.loop.call_soon(
                lambda: server.begin(listener.protocol_factory()), context=listener.process.context
            )

        listener = network.listeners.get(address)
        if isinstance(listener, MemoryListener):
            refused = partial(refuse, listener)
            listener.process.at_end.append(refused)  # if the process ends before the arrival
            Pipe(network, client, listener.process, client.context).send(arrived, listener)
        else:
            network.loop.call_later(network.delay(client.name, address), answered, None)
        transport = await answer
        if transport is None:
            raise ConnectionRefusedError(111, f"Connect call failed {address}")
        protocol = protocol_factory()
        transport.begin(protocol)
        return transport, protocol


class MemoryListener:
    """Replaces a listening socket, and asyncio's server on that socket."""

    def __init__(self, network: Network, address: str) -> None:
        self.process: Process = current_process()
        self.protocol_factory: Any = None
        self._network = network
        self._address = network.listen(address, self)

    # Methods of a socket.

    def getsockname(self) -> tuple[str, int]:
        host, _, port = self._address.rpartition(":")
        return host, int(port)

    def dup(self) -> "MemoryListener":
        return self

    def setsockopt(self, *_: Any) -> None: ...

    def setblocking(self, _: bool) -> None: ...

    def close(self) -> None:
        self._network.unlisten(self._address, self)

    # Methods of an asyncio server.

    @property
    def sockets(self) -> list["MemoryListener"]:
        return [self]

    async def wait_closed(self) -> None: ...


class MemoryTransport(asyncio.Transport):
    """One end of a connection. Data that the peer does not read fills the buffers of the kernels
    first, and then this transport's buffer.
    """

    def __init__(self, network: Network, end: End, peer: "MemoryTransport | None" = None) -> None:
        """`peer` is None for the end that is created first. The second end then sets it."""
        super().__init__()
        self._network = network
        self._end = end
        self._peer = self if peer is None else peer
        self._peer._peer = self
        self._protocol: Any = None
        self._num_unread = 0
        """Bytes that this end has sent and the peer's protocol has not received."""
        self._received: deque[bytes] = deque()
        self._is_reading_paused = False
        self._is_writing_paused = False
        self._has_begun = False
        self._high, self._low = _HIGH_BYTES, _HIGH_BYTES // 4
        self._is_closing = False
        self._sends_eof = self._has_peer_eof = self._is_lost = False
        end.on_lost = self._lose

    def begin(self, protocol: Any) -> None:
        self._protocol = protocol
        self._has_begun = True
        protocol.connection_made(self)
        self._deliver()

    # Methods of asyncio.Transport.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return (self._peer._end.process.name, 1)
        if name == "sockname":
            return (self._end.process.name, 1)
        return default

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def pause_reading(self) -> None:
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        self._is_reading_paused = False
        self._network.loop.call_soon(self._deliver)

    def is_reading(self) -> bool:
        return not self._is_reading_paused

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return max(0, self._num_unread - _KERNEL_BYTES)

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        data = bytes(data)
        self._num_unread += len(data)
        self._network.log(
            f"{self._end.process.name} > {self._peer._end.process.name} {digest(data)}"
        )
        self._end.pipe.send(self._peer.receive, data)
        if not self._is_writing_paused and self.get_write_buffer_size() > self._high:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._sends_eof and not self._is_closing:
            self._sends_eof = True
            self._end.pipe.send(self._peer.receive_eof)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._end.close()
            self._network.loop.call_soon(self._lost, None)

    def abort(self) -> None:
        self.close()

    # Called when something from the peer arrives.

    def receive(self, data: bytes) -> None:
        self._received.append(data)
        self._deliver()

    def receive_eof(self) -> None:
        self._has_peer_eof = True
        self._deliver()

    def has_read(self, num_bytes: int) -> None:
        self._num_unread -= num_bytes
        if self._is_writing_paused and self.get_write_buffer_size() <= self._low:
            self._is_writing_paused = False
            self._protocol.resume_writing()

    def _deliver(self) -> None:
        while (
            self._has_begun and self._received and not self._is_reading_paused and not self._is_lost
        ):
            data = self._received.popleft()
            peer = self._peer
            if peer._is_writing_paused:
                self._end.pipe.send(peer.has_read, len(data))
            else:
                peer._num_unread -= len(data)
            self._protocol.data_received(data)
        if self._has_begun and not self._received and self._has_peer_eof and not self._is_lost:
            self._has_peer_eof = False
            if not self._protocol.eof_received():
                self.close()

    def _lose(self, _: str) -> None:
        self._is_closing = True
        while self._received and not self._is_reading_paused:
            self._deliver()
        self._network.loop.call_soon(self._lost, None)  # as asyncio does

    def _lost(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            if self._protocol is not None:
                self._protocol.connection_lost(error)
