"""Makes Python's clocks and random numbers virtual, and prevents other access to the machine.

`install` must be called before services are imported, because their modules may store Python's
functions. While a VirtualLoop runs, Python's clocks show its time, and Python's random numbers are
drawn from its seed. Threads, sockets, other processes and written files raise PastThePorts. When no
VirtualLoop runs, Python's own functions are called.
"""

import asyncio
import gc
import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from types import FunctionType
from typing import Any, NoReturn, TypeVar

import grpc

from services.common.process.watchdog import proc
from services.simulation.runtime.grpc_client import MemoryChannel
from services.simulation.runtime.grpc_server import MemoryServer
from services.simulation.runtime.loop import EPOCH, VirtualLoop
from services.simulation.runtime.network import Network
from services.simulation.runtime.process import PROCESS, Exited

T = TypeVar("T")

_FORBIDDEN = {
    "socket.__new__": "opens a socket of the real machine",
    "socket.getaddrinfo": "resolves a host name on the real machine",
    "subprocess.Popen": "starts a process",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CLOCKS = ("time", "monotonic", "perf_counter", "thread_time", "process_time")


_UNFINISHED: list[asyncio.Task[Any]] = []
"""Tasks of killed processes. They are never freed, because their coroutines would then go on."""


class PastThePorts(BaseException):
    """Simulated code uses the machine itself. It is no Exception, so that no service handles it."""


class _Machine:
    loop: VirtualLoop | None = None
    network: Network | None = None


def run_on(network: Network, seed: int, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs the coroutine that `main` returns, in virtual time. Then closes the network's loop."""
    if not getattr(time.time, "is_virtual", False):
        raise RuntimeError("install() of the virtual machine must be called first")
    state = random.getstate()
    random.seed(seed)
    handler = _LogHandler(network)
    root = logging.getLogger()
    root.addHandler(handler)
    _Machine.loop, _Machine.network = network.loop, network
    gc.disable()  # a collection would end asynchronous generators at times that no seed decides
    try:
        return network.loop.run_until_complete(main())
    finally:
        _Machine.loop = _Machine.network = None
        root.removeHandler(handler)
        random.setstate(state)
        _UNFINISHED.extend(asyncio.all_tasks(network.loop))
        gc.enable()
        network.loop.close()


@contextmanager
def outside() -> Iterator[None]:
    """Makes the real machine available to work that takes no virtual time (loading a model)."""
    loop, _Machine.loop = _Machine.loop, None
    try:
        yield
    finally:
        _Machine.loop = loop


@contextmanager
def inside(loop: VirtualLoop) -> Iterator[None]:
    """Returns to virtual time while code within `outside` waits."""
    before, _Machine.loop = _Machine.loop, loop
    try:
        yield
    finally:
        _Machine.loop = before


class _LogHandler(logging.Handler):
    """Adds the log messages of services to the network's log."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += f" ({record.exc_info[1]!r})"
            self._network.errors.append(self.format(record))
        self._network.log(f"{_process_name()} {record.levelname} {text}")


def install() -> None:
    """Replaces Python's clocks and random numbers in this process. Raises RuntimeError if a service
    that was imported earlier has stored one of the replaced functions.
    """
    if getattr(time.time, "is_virtual", False):
        return
    kept = _originals()
    _replace_clocks()
    _replace(time, "sleep", _sleep)
    _replace(os, "urandom", _urandom)
    _replace(os, "_exit", _exit)
    _replace(asyncio, "wait_for", _wait_for)
    proc.PROC = "/nothing"
    _replace(grpc.aio, "insecure_channel", _insecure_channel)
    _replace(grpc.aio, "server", _server)
    random._urandom = os.urandom  # type: ignore[attr-defined]
    _replace(threading.Thread, "start", _start_thread)
    _replace(socket, "gethostname", _process_name)
    _replace(socket, "create_server", _create_server)
    sys.addaudithook(_guard)
    logging.getLogger().setLevel(logging.INFO)
    early = sorted(_keepers(kept))
    if early:
        raise RuntimeError(
            "these modules must not be imported before install() of the virtual machine: "
            f"{', '.join(early)}"
        )


async def _wait_for(awaitable: Awaitable[T], timeout: float | None) -> T:  # noqa: ASYNC109
    """Waits as Python 3.12 does. Python 3.11 creates a task for it, so that simultaneous events
    would occur in another order.
    """
    async with asyncio.timeout(timeout):
        return await awaitable


def _replace(module: Any, name: str, virtual: Callable[..., Any]) -> None:
    """Makes `module.name` call `virtual` while a VirtualLoop runs."""
    real = getattr(module, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        return (real if _Machine.loop is None else virtual)(*args, **kwargs)

    function.is_virtual = True  # type: ignore[attr-defined]
    setattr(module, name, function)


def _replace_clocks() -> None:
    for name in _CLOCKS:
        seconds = _unix_seconds if name == "time" else _loop_seconds
        _replace(time, name, seconds)
        _replace(time, f"{name}_ns", lambda seconds=seconds: round(1e9 * seconds()))


def _loop() -> VirtualLoop:
    assert _Machine.loop is not None
    return _Machine.loop


def _loop_seconds() -> float:
    return _loop().time()


def _unix_seconds() -> float:
    process = PROCESS.get(None)
    return EPOCH + _loop().time() + (0.0 if process is None else process.seconds_ahead)


def _sleep(seconds: float) -> None:
    if not _loop().is_in_lane:
        raise PastThePorts("time.sleep was called in the event loop")
    _loop().slept += seconds


def _start_thread(thread: threading.Thread) -> None:
    raise PastThePorts(f"{_process_name()} starts the thread {thread.name}")


def _urandom(size: int) -> bytes:
    return _loop().rng_of("urandom", _process_name()).randbytes(size)


def _exit(status: int) -> None:
    end_process(f"exit status {status}")


def end_process(reason: str) -> NoReturn:
    """Ends the process whose code runs now. Raises Exited, and none of its code runs afterwards."""
    process, task = PROCESS.get(), None if _loop().is_in_lane else asyncio.current_task()

    def ended() -> None:
        if task is not None and task.done() and not task.cancelled():
            task.exception()  # otherwise asyncio logs that the exception was never retrieved
        process.on_exit(reason)

    _loop().call_soon(ended, context=Context())
    process.kill()
    raise Exited(reason)


def _process_name() -> str:
    process = PROCESS.get(None)
    return "outside" if process is None else process.name


def _create_server(address: tuple[str, int], **_: Any) -> Any:
    return _loop().servers.listener(address)


def network() -> Network:
    assert _Machine.network is not None
    return _Machine.network


def _insecure_channel(target: str, options: Any = None) -> MemoryChannel:
    return MemoryChannel(network(), target, options)


def _server(
    *, interceptors: Any = (), maximum_concurrent_rpcs: int | None = None, **_: Any
) -> MemoryServer:
    return MemoryServer(network(), interceptors, maximum_concurrent_rpcs)


def _guard(event: str, args: tuple[Any, ...]) -> None:
    if _Machine.loop is None:
        return
    if event in _FORBIDDEN:
        raise PastThePorts(f"{_process_name()} {_FORBIDDEN[event]}: {args}")
    if event == "open":
        path, _, flags = args
        if flags & _WRITES and not str(path).startswith(("/dev/null",)):
            raise PastThePorts(f"{_process_name()} writes the file {path}")
        if str(path).startswith(("/proc/", "/sys/")):
            raise PastThePorts(f"{_process_name()} reads {path}")


def _originals() -> set[int]:
    names = [*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), "sleep"]
    return {id(getattr(time, name)) for name in names} | {id(os.urandom)}


def _keepers(kept: set[int]) -> set[str]:
    """Names of services' modules that refer to a function whose id() is in `kept`."""
    found = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("services.") or name.startswith("services.simulation."):
            continue
        for value in list(vars(module).values()):
            functions = [value] if not isinstance(value, type) else list(vars(value).values())
            for function in functions:
                defaults: list[Any] = [function]
                if isinstance(function, FunctionType):
                    defaults += [
                        *(function.__defaults__ or ()),
                        *(function.__kwdefaults__ or {}).values(),
                    ]
                if any(id(default) in kept for default in defaults):
                    found.add(name)
    return found
