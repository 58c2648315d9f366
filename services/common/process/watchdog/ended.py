"""Records, in a file beside a process's Unix socket, that a supervisor killed the process as hung.
Without this record, the peers of a killed process could not distinguish the kill from a crash. The
file has the ids of killed processes, one per line. It is written before the kill.
"""

from contextlib import suppress
from pathlib import Path

from services.common.rpc.addresses import is_unix_address, unix_path


def note_ended(address: str, pid: int) -> None:
    """Records that the supervisor is about to kill the process that listens at unix:PATH."""
    with suppress(OSError), _file(address).open("a") as ended:
        ended.write(f"{pid}\n")


def was_ended(address: str, pid: int) -> bool:
    """Whether a supervisor recorded that it killed the process. False for an address host:port."""
    if not is_unix_address(address):
        return False
    with suppress(OSError):
        return str(pid) in _file(address).read_text().split()
    return False


def _file(address: str) -> Path:
    return Path(f"{unix_path(address)}.ended")
