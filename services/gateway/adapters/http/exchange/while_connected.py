"""Work that ends when its client goes away."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Client:
    """Whether the client of a request is there, as its connection finds out."""

    __slots__ = ("_has_gone", "_on_gone", "_read_on")

    def __init__(self, read_on: Callable[[], None]) -> None:
        """`read_on` has the connection read what comes: the client's end is among it."""
        self._read_on = read_on
        self._has_gone = False
        self._on_gone: Callable[[], object] | None = None

    def has_gone(self) -> None:
        """The client has disconnected. Idempotent."""
        if not self._has_gone:
            self._has_gone = True
            if self._on_gone is not None:
                self._on_gone()

    def watch(self, on_gone: Callable[[], object]) -> None:
        """Calls `on_gone` when the client disconnects, once; now, if it has."""
        if self._has_gone:
            on_gone()
            return
        self._on_gone = on_gone
        self._read_on()

    def unwatch(self) -> None:
        """Takes `watch` back."""
        self._on_gone = None


@contextmanager
def while_connected(client: Client) -> Iterator[None]:
    """Cancels what runs inside when the client has disconnected, and goes on after it then.

    The work runs in the present task and begins at once: another one would begin when the event
    loop has turned, which takes long where it has much to do.
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
