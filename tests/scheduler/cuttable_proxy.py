"""A TCP proxy that simulates a slow or failing network between two services."""

import asyncio
from contextlib import suppress


class CuttableProxy:
    """Forwards bytes to `target`, delayed by `delay_seconds`, until it is cut or closed."""

    def __init__(self, target: str, delay_seconds: float = 0.0) -> None:
        self._delay_seconds = delay_seconds
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_deaf_backwards = False
        self._lost_on: set[asyncio.StreamWriter] = set()
        self.num_connections = 0
        self.has_swallowed = asyncio.Event()
        """Set when bytes of the target were dropped."""

    async def start(self) -> str:
        """Starts to listen. Returns the proxy's address."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def swallow_answers(self) -> None:
        """From now on drops all bytes of the target. Bytes of clients are still forwarded."""
        self._is_deaf_backwards = True

    def lose_all(self) -> None:
        self._lost_on |= self._links

    def cut(self) -> None:
        """Breaks every connection. Later connections work."""
        self._is_deaf_backwards = False
        for link in self._links:
            link.transport.abort()
        self._links.clear()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            back_reader, back_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._links |= {writer, back_writer}
        for source, sink, is_answer in ((reader, back_writer, False), (back_reader, writer, True)):
            task = asyncio.create_task(self._pump(source, sink, is_answer=is_answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await source.read(65_536):
                if is_answer and self._is_deaf_backwards:
                    self.has_swallowed.set()
                elif sink in self._lost_on:
                    continue
                elif self._delay_seconds:
                    loop.call_later(self._delay_seconds, sink.write, data)
                else:
                    sink.write(data)
                    await sink.drain()
        sink.close()
