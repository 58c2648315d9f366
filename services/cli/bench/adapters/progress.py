"""Shows the progress of a run: in a terminal as one updated line, otherwise as separate lines."""

import asyncio
import sys
import time
from contextlib import ExitStack
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from services.cli.bench.core.record import RequestRecord

_TERMINAL_SECONDS = 0.5
_PLAIN_SECONDS = 5.0


class Progress:
    """Implements the core's `Observer`: counts requests and periodically writes the counts. `total`
    is the number of requests, warm-up included, or None if unknown.
    """

    def __init__(self, total: int | None, stream: TextIO = sys.stderr) -> None:
        self._total = total
        self._stream = stream
        self._num_running = self._num_done = self._num_failed = self._num_tokens = 0
        self._begun = time.monotonic()
        self._before = (self._begun, 0)
        self._task: asyncio.Task[None] | None = None
        self._open = ExitStack()

    def began(self, _record: RequestRecord) -> None:
        self._num_running += 1

    def ended(self, record: RequestRecord) -> None:
        self._num_running -= 1
        self._num_done += 1
        self._num_failed += record.failure is not None
        self._num_tokens += record.output_tokens

    async def __aenter__(self) -> Self:
        self._begun = time.monotonic()
        self._before = (self._begun, 0)
        if self._stream.isatty():
            live = Live(console=Console(file=self._stream), auto_refresh=False, transient=True)
            # Drawing the first line takes longest, so it is drawn before the load starts.
            self._open.enter_context(live).update(Text(self._line()), refresh=True)
            self._task = asyncio.create_task(self._in_terminal(live))
        else:
            self._task = asyncio.create_task(self._in_lines())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._open.close()

    async def _in_terminal(self, live: Live) -> None:
        while True:
            await asyncio.sleep(_TERMINAL_SECONDS)
            live.update(Text(self._line()), refresh=True)

    async def _in_lines(self) -> None:
        while True:
            await asyncio.sleep(_PLAIN_SECONDS)
            print(self._line(), file=self._stream, flush=True)

    def _line(self) -> str:
        now = time.monotonic()
        then, tokens = self._before
        self._before = now, self._num_tokens
        rate = (self._num_tokens - tokens) / max(now - then, 1e-3)
        of_total = "" if self._total is None else f" of {self._total}"
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return (
            f"{now - self._begun:6.1f} s  {self._num_done}{of_total} requests done{failed}, "
            f"{self._num_running} running, {rate:,.0f} output tokens/s"
        )
