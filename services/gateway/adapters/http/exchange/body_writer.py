"""Writes an answer's body as it comes."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class BodyWriter:
    """Writes parts of a body with chunks, once its head was sent. uvicorn's own `send` is a
    coroutine that is given a message for each part, and this is each token's path.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def can_write(self) -> bool:
        """Whether the client reads, or has gone; else after `drain`."""
        return not self._flow.write_paused or self._cycle.disconnected

    def write(self, part: bytes) -> None:
        """Writes a part that is not empty; drops it if the client has gone."""
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(part), part))

    async def drain(self) -> None:
        """Waits until the client has read."""
        if not self.can_write:
            await self._flow.drain()
