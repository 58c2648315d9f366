"""Writes the parts of an answer's body as they are produced."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class BodyWriter:
    """Writes the parts of a chunked body to the connection, after the answer's head was sent. It is
    used for every token, because uvicorn's `send` is slower: for each part, `send` needs a message
    and a coroutine.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def can_write(self) -> bool:
        """Whether a part can be written at once, because the write buffer is not full or the client
        has disconnected. If false, call `drain` first.
        """
        return not self._flow.write_paused or self._cycle.disconnected

    def write(self, part: bytes) -> None:
        """Writes a part, which must not be empty. The part is dropped if the client has
        disconnected.
        """
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(part), part))

    async def drain(self) -> None:
        """Waits until the client has read what is in the write buffer."""
        if not self.can_write:
            await self._flow.drain()
