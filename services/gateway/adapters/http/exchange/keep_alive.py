"""Keeps silent streams open, which proxies and load balancers cut after a minute or so."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.gateway.adapters.http.exchange.event_stream import EventStream


@contextmanager
def kept_alive(stream: EventStream, interval: float, wake: Callable[[], None]) -> Iterator[None]:
    """Has a stream say that it lives, whenever nothing was sent for `interval` seconds, from now on
    to the end; 0: never. `wake` is called where the stream has to be drained for that.
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
        del tick  # it refers to itself, and to the stream
