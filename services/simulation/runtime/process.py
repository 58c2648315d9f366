"""A simulated process: the tasks and callbacks of one service or client."""

import asyncio
import contextvars
import enum
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

PROCESS: contextvars.ContextVar["Process"] = contextvars.ContextVar("process")
"""The process that runs now. Tasks, timers and callbacks inherit it."""


class Exited(BaseException):
    """Ends the running code of a process that has ended itself. It is no Exception, so that no
    service handles it.
    """


class State(enum.Enum):
    RUNS = "runs"
    STOPPED = "stopped"
    """As after SIGSTOP: its callbacks and timers run when it continues."""
    DEAD = "dead"
    """As after SIGKILL: none of its callbacks runs any more, not even the end of a task."""


class Process:
    """A process on a machine of its own, with the host name `name`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.name = name
        self.state = State.RUNS
        self.seconds_ahead = 0.0
        """How much its clock of the time of day is ahead."""
        self.files: list[Any] = []
        """The files that it has created."""
        self.is_disk_full = False
        self.at_end: list[Callable[[], None]] = []
        """Called at the end of the process, outside of it: what its machine's kernel does then."""
        self.on_exit: Callable[[str], None] = lambda _: None
        """Called, outside of the process, when it ends itself. The argument is the reason."""
        self.inside: Any = None
        """The main object of the service, for those who look into it."""
        self._loop = loop
        self._held: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        """The tasks that the end of a killed process has left. They are kept, since the coroutine
        of a task that is freed runs to its end.
        """
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    @property
    def is_dead(self) -> bool:
        return self.state is State.DEAD

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Runs a coroutine as a task of this process."""
        return self._loop.create_task(coroutine, context=self.context.copy())

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function as code of this process."""
        return self.context.copy().run(function, *args)

    def hold(self, handle: asyncio.Handle) -> None:
        """Keeps a callback of a stopped process, and drops one of a dead process."""
        if self.state is State.STOPPED:
            self._held.append(handle)

    def stop(self) -> None:
        if self.state is State.RUNS:
            self.state = State.STOPPED

    def resume(self) -> list[asyncio.Handle]:
        """Continues a stopped process. Returns the callbacks that are due, in order."""
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
