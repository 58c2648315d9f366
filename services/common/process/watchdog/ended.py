"""Processes that their supervisor ended since they hung, in a file beside their Unix socket.

A process that is killed cannot say why it ends, and its peers see the end of a connection, as they
do after a crash. The file has the ids of such processes, one a line. It is written before the kill.
"""

from contextlib import suppress
from pathlib import Path

from services.common.rpc.addresses import is_unix_address, unix_path


def note_ended(address: str, pid: int) -> None:
    """Notes that the supervisor is about to end the process that listens at unix:PATH."""
    with suppress(OSError), _file(address).open("a") as ended:
        ended.write(f"{pid}\n")


def was_ended(address: str, pid: int) -> bool:
    """Whether a supervisor has noted the end of the process. False for an address host:port."""
    if not is_unix_address(address):
        return False
    with suppress(OSError):
        return str(pid) in _file(address).read_text().split()
    return False


def _file(address: str) -> Path:
    return Path(f"{unix_path(address)}.ended")
