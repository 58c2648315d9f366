"""Reads the times of processes and of the machine from /proc. Values of missing files are 0."""

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.common.process.watchdog.silence import (
    MachineTimes,
    ProcessTimes,
    Reading,
    ThreadTimes,
)
from services.common.rpc.addresses import is_unix_address, unix_path

_NANOS, _MICROS = 1e9, 1e6
_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")
PROC = "/proc"
"""The directory to read. In simulations with virtual time, it is a path that does not exist."""
_PRESSURES = ("pressure/io", "pressure/memory")
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Indices of fields in /proc/PID/stat after the process name."""


def watch_pids(pids: Sequence[int]) -> Callable[[float], Reading]:
    """Returns a function that reads the times of these processes, given the current time."""
    return lambda now: _reading(now, pids)


def watch_addresses(addresses: Callable[[], Iterable[str]]) -> Callable[[float], Reading]:
    """As `watch_pids`, for the processes that listen at these addresses. A process can be found
    only if its address is a Unix socket of this machine (unix:PATH). If any process cannot be
    found, readings contain no process.
    """

    def read(now: float) -> Reading:
        pids = [listener_pid(address) for address in addresses()]
        return _reading(now, pids if all(pids) else [])

    return read


def watch_self() -> Callable[[float], Reading]:
    """As `watch_pids`, for a process that watches itself."""
    return partial(_reading, pids=(os.getpid(),), watcher=False)


def processor_times(pid: int) -> ProcessTimes:
    """For each thread of a process: its state, how long it has run, and how long it has waited for
    a processor. Empty if the process has ended or the system is not Linux. The thread that calls
    this function is reported as sleeping, because it runs only to read.
    """
    threads: dict[int, ThreadTimes] = {}
    with suppress(OSError):
        for task in Path(f"{PROC}/{pid}/task").iterdir():
            with suppress(OSError):
                threads[int(task.name)] = _thread(str(task))
    reader = threading.get_native_id()
    if reader in threads:
        threads[reader] = replace(threads[reader], state="S")
    return ProcessTimes(threads)


def _reading(now: float, pids: Sequence[int], watcher: bool = True) -> Reading:
    return Reading(
        now,
        processor_times(os.getpid()) if watcher else ProcessTimes(),
        [processor_times(pid) for pid in pids],
        _machine(),
    )


def listener_pid(address: str) -> int:
    """The id of the process that listens at a Unix socket, or 0 if unknown."""
    if not is_unix_address(address):
        return 0
    with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        asking.connect(unix_path(address))
        asked = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid: int = _CREDENTIALS.unpack(asked)[0]
        return pid
    return 0


def _thread(path: str) -> ThreadTimes:
    fields = _stat(path)
    with suppress(OSError, ValueError):
        ran, waited, _ = _read(f"{path}/schedstat").split()
        return ThreadTimes(fields[_STATE], int(ran) / _NANOS, int(waited) / _NANOS)
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ThreadTimes(fields[_STATE], ticks / os.sysconf("SC_CLK_TCK"), 0.0)


def _stat(path: str) -> list[str]:
    return _read(f"{path}/stat").rpartition(")")[2].split()


def _machine() -> MachineTimes:
    num_runnable, stalled = 0, 0.0
    with suppress(OSError, ValueError, IndexError):
        num_runnable = int(_read(f"{PROC}/loadavg").split()[3].partition("/")[0])
    for path in _PRESSURES:
        with suppress(OSError, ValueError, IndexError):
            some = _read(f"{PROC}/{path}").split("\n", 1)[0]
            stalled += int(some.rpartition("total=")[2]) / _MICROS
    return MachineTimes(num_runnable, os.cpu_count() or 1, stalled)


def _read(path: str) -> str:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _BYTES).decode()
    finally:
        os.close(file)
