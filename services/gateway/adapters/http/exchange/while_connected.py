"""Cancels work when its client disconnects."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Client:
    """Whether a request's client is still connected. The connection calls `has_gone`."""

    __slots__ = ("_has_gone", "_on_gone", "_read_on")

    def __init__(self, read_on: Callable[[], None]) -> None:
        """`read_on` makes the server read from the connection again, because only then it notices a
        disconnect.
        """
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
        """Calls `on_gone` once when the client disconnects. If the client has already disconnected,
        calls it at once.
        """
        if self._has_gone:
            on_gone()
            return
        self._on_gone = on_gone
        self._read_on()

    def unwatch(self) -> None:
        self._on_gone = None


@contextmanager
def while_connected(client: Client) -> Iterator[None]:
    """Cancels the `with` block when the client disconnects. Execution continues after the block.

    The block runs in the current task, because a new task would begin only in the next iteration of
    the event loop, which under load may start much later.
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
