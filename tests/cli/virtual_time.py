"""An asyncio event loop in virtual time: sleeping takes no real time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """A selector that advances the loop's virtual time instead of waiting."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen"
        self.loop.passed += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    passed = 0.0

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.passed


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in virtual time. Returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


class LoopClock:
    """A `Clock` of the load generator's core that reads the loop's time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep_until(self, seconds: float) -> None:
        if (left := seconds - self.now()) > 0:
            await asyncio.sleep(left)
