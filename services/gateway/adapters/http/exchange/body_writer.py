"""Writes the parts of an answer's body as they are produced."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class BodyWriter:
    """Writes parts of a chunked body once its head was sent. Every token takes this path, and
    uvicorn's own `send` is slower: a coroutine with a message for each part.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def can_write(self) -> bool:
        """Whether a part can be written now: the client reads, or has disconnected. Otherwise call
        `drain` first.
        """
        return not self._flow.write_paused or self._cycle.disconnected

    def write(self, part: bytes) -> None:
        """Writes a part, which must not be empty. The part is dropped if the client has
        disconnected.
        """
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(part), part))

    async def drain(self) -> None:
        """Waits until the client has read the write buffer."""
        if not self.can_write:
            await self._flow.drain()
