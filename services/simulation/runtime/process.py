"""A simulated process, which consists of the tasks and callbacks of one service or client."""

import asyncio
import contextvars
import enum
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

PROCESS: contextvars.ContextVar["Process"] = contextvars.ContextVar("process")
"""The process to which the running code belongs. Tasks, timers and callbacks inherit it."""


class Exited(BaseException):
    """Ends the running code of a process that was ended. It is no Exception, so that no service
    handles it.
    """


class State(enum.Enum):
    RUNS = "runs"
    STOPPED = "stopped"
    """As after SIGSTOP. Callbacks and timers that become due run when the process continues."""
    DEAD = "dead"
    """As after SIGKILL. No code of the process runs any more, not even `finally` blocks."""


class Process:
    """A process on its own machine, whose host name is `name`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.name = name
        self.state = State.RUNS
        self.num_stops = 0
        """The number of times that the process was stopped."""
        self.seconds_ahead = 0.0
        """How far the process's wall clock is ahead of the virtual time."""
        self.files: list[Any] = []
        self.is_disk_full = False
        self.at_end: list[Callable[[], None]] = []
        """Called when the process ends, to release what the machine's kernel would release."""
        self.on_exit: Callable[[str], None] = lambda _: None
        """Called with the reason, outside of the process, when the process ends itself."""
        self.inside: Any = None
        """The main object of the service, for tests and searches that inspect it."""
        self._loop = loop
        self._held: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        """The unfinished tasks of a killed process. They must not be freed, because Python would
        then run their coroutines to the end.
        """
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    @property
    def is_dead(self) -> bool:
        return self.state is State.DEAD

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        return self._loop.create_task(coroutine, context=self.context.copy())

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function as code of this process."""
        return self.context.copy().run(function, *args)

    def hold(self, handle: asyncio.Handle) -> None:
        """Stores a callback of a stopped process. A dead process drops it."""
        if self.state is State.STOPPED:
            self._held.append(handle)

    def stop(self) -> None:
        if self.state is State.RUNS:
            self.state = State.STOPPED
            self.num_stops += 1

    def resume(self) -> list[asyncio.Handle]:
        """Continues a stopped process. Returns the callbacks that became due, in order."""
        held, self._held = self._held, []
        if self.state is State.STOPPED:
            self.state = State.RUNS
        return held

    def kill(self) -> None:
        if self.state is not State.DEAD:
            self.state = State.DEAD
            self._held.clear()
            tasks = asyncio.all_tasks(self._loop)
            self._tasks = [task for task in tasks if getattr(task, "process", None) is self]
            for function in self.at_end:
                function()
