"""Records, in a file beside a process's Unix socket, that a supervisor killed the process as hung.
Without this record, the peers of a killed process could not distinguish the kill from a crash.
"""

from contextlib import suppress
from pathlib import Path

from services.common.rpc.addresses import is_unix_address, unix_path


def note_ended(address: str, pid: int) -> None:
    """Must be called before the kill."""
    with suppress(OSError), _file(address).open("a") as ended:
        ended.write(f"{pid}\n")


def was_ended(address: str, pid: int) -> bool:
    """False for an address host:port."""
    if not is_unix_address(address):
        return False
    with suppress(OSError):
        return str(pid) in _file(address).read_text().split()
    return False


def _file(address: str) -> Path:
    return Path(f"{unix_path(address)}.ended")
