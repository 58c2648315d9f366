"""Keeps silent streams open. Without traffic, proxies would close them after about a minute."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.gateway.adapters.http.exchange.event_stream import EventStream


@contextmanager
def kept_alive(stream: EventStream, interval: float, wake: Callable[[], None]) -> Iterator[None]:
    """While the block runs, sends a keep-alive whenever nothing was sent for `interval` seconds. An
    interval of 0 disables this. Calls `wake` if the stream must be drained to send the keep-alive.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    stream.last_sent = loop.time()

    def tick() -> None:
        nonlocal timer
        silent = loop.time() - stream.last_sent
        if silent >= interval:
            silent = 0.0
            if stream.keep_alive():
                wake()
        timer = loop.call_later(interval - silent, tick)  # noqa: F821 - deleted at the end

    if interval:
        timer = loop.call_later(interval, tick)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        del tick  # breaks its reference cycle, which includes the stream
