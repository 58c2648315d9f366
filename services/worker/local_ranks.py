"""Runs all ranks of one model in one container: `python -m services.worker.local_ranks`.

Each rank is a process of its own, `python -m services.worker` with the same arguments and
environment. In these, `{rank}` is replaced by the rank's number, for example in
`--address unix:/run/stepwell/worker-{rank}.sock`. Only rank 0 serves the health address and writes
the health file, because its start and its steps wait for all other ranks.

SIGTERM and SIGINT are sent on to all ranks. If one rank ends, all others are ended too. The exit
status is the status of the first rank that failed, or 0.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from services.common.process.settings import SettingError, exit_with, load_settings, variable_name
from services.worker.parallel.membership import find_membership
from services.worker.settings import WorkerSettings

_END_SECONDS = 10
"""A rank that still runs this number of seconds after the end of its drain is killed."""
_RANK_0_ONLY = (variable_name("worker", "health_address"), variable_name("worker", "health_file"))


def main() -> None:
    settings = load_settings(WorkerSettings, "worker", prog="python -m services.worker.local_ranks")
    try:
        size = find_membership(settings, {**os.environ, "RANK": "0"}).size
    except SettingError as error:
        exit_with(f"stepwell worker: {error}")
    running: set[int] = set()
    is_ending = False

    def send(signum: int) -> None:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def end(*_: object) -> None:
        nonlocal is_ending
        is_ending = True
        send(signal.SIGTERM)
        signal.alarm(_END_SECONDS + int(settings.drain_seconds))

    signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, end)
    for rank in range(size):
        if not is_ending:
            running.add(_start(rank, sys.argv[1:], os.environ))
    if is_ending:  # A signal may have arrived after the start of a rank that was not listed yet.
        send(signal.SIGTERM)
    failure = 0
    while running:
        pid, ended = os.wait()
        if pid in running:
            running.remove(pid)
            status = os.waitstatus_to_exitcode(ended)
            failure = failure or (status if status >= 0 else 128 - status)
            end()
    sys.exit(failure)


def _start(rank: int, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Starts a rank and returns its process id."""
    own = {
        name: value.replace("{rank}", str(rank))
        for name, value in environ.items()
        if rank == 0 or name not in _RANK_0_ONLY
    }
    own[variable_name("worker", "rank")] = str(rank)
    command = [argument.replace("{rank}", str(rank)) for argument in arguments]
    return os.posix_spawn(sys.executable, [sys.executable, "-m", "services.worker", *command], own)


if __name__ == "__main__":
    main()
