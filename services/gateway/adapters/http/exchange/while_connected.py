"""Cancels work when its client disconnects."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Client:
    """The connection state of a request's client, as its connection reports it."""

    __slots__ = ("_has_gone", "_on_gone", "_read_on")

    def __init__(self, read_on: Callable[[], None]) -> None:
        """`read_on` resumes reading on the connection, so that the client's end is noticed."""
        self._read_on = read_on
        self._has_gone = False
        self._on_gone: Callable[[], object] | None = None

    def has_gone(self) -> None:
        """Reports that the client has disconnected. Idempotent."""
        if not self._has_gone:
            self._has_gone = True
            if self._on_gone is not None:
                self._on_gone()

    def watch(self, on_gone: Callable[[], object]) -> None:
        """Calls `on_gone` once, when the client disconnects, or now if it already has."""
        if self._has_gone:
            on_gone()
            return
        self._on_gone = on_gone
        self._read_on()

    def unwatch(self) -> None:
        """Cancels `watch`."""
        self._on_gone = None


@contextmanager
def while_connected(client: Client) -> Iterator[None]:
    """Cancels the block when the client disconnects, and then continues after the block.

    The block runs in the current task, so that it begins at once. A new task would begin in the
    next iteration of the event loop, which may be far away under load.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels_before, has_gone = task.cancelling(), False

    def cancel() -> None:
        nonlocal has_gone
        has_gone = True
        task.cancel()

    client.watch(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not has_gone or task.uncancel() > num_cancels_before:
            raise
    finally:
        client.unwatch()
