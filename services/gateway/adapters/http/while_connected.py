"""Work that ends when its client goes away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside when the client has disconnected, and goes on after it then.

    The work runs in the present task and begins at once: another one would begin when the event
    loop has turned, which takes long where it has much to do.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels_before, has_gone = task.cancelling(), False

    async def watch() -> None:
        nonlocal has_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        has_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not has_gone or task.uncancel() > num_cancels_before:
            raise
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
