"""A gateway process that measures pauses of its own event loop. After each line on standard input,
it prints the longest pauses since the previous line as JSON.

    python -m tests.gateway.watched_gateway FLAGS-OF-THE-GATEWAY
"""

import asyncio
import json
import os
import sys
import threading
import time

from services.common.process.lifecycle import run_service
from services.gateway.__main__ import serve
from services.gateway.settings import GatewaySettings

_TICK_SECONDS = 0.001


class Watchdog:
    """Measures the longest time in seconds between two iterations of the event loop.

    `work` counts only the processor time of the loop's thread. `pause` counts the time in which any
    thread of the process was busy, which clients may notice. Other processes increase neither.
    """

    def __init__(self) -> None:
        self.work = self.pause = 0.0

    async def watch(self) -> None:
        while True:
            wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
            await asyncio.sleep(_TICK_SECONDS)
            busy = time.process_time() - process
            elapsed = time.perf_counter() - wall - _TICK_SECONDS
            self.work = max(self.work, time.thread_time() - thread)
            self.pause = max(self.pause, min(busy, elapsed))

    def report(self) -> None:
        """Runs in a thread. Prints the longest pauses after each line of standard input. Ends the
        process when standard input ends.
        """
        for _ in sys.stdin:
            self.work, self.pause, longest = 0.0, 0.0, {"work": self.work, "pause": self.pause}
            print(json.dumps(longest), flush=True)
        os._exit(0)


async def _serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    watchdog = Watchdog()
    threading.Thread(target=watchdog.report, daemon=True).start()
    watching = asyncio.create_task(watchdog.watch())
    await serve(settings, stop)
    watching.cancel()


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    run_service("gateway", GatewaySettings, _serve)
