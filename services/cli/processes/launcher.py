"""Replaces this process by another program, which the kernel kills when its supervisor ends.

    python -I -S launcher.py SUPERVISOR_PID NICENESS PROGRAM [ARGUMENT]...

On Linux this uses PR_SET_PDEATHSIG. The setting survives an exec, and the kill works even if the
program is stuck in native code. On other systems the program is not killed. The kernel sends the
signal when the thread that forked ends, so the supervisor starts children from its main thread.
NICENESS is added to the supervisor's niceness, as by nice(1). For a fast start, this file imports
no other module of the project.

Linux may group processes by session (sched(7), "The autogroup feature"). A process's niceness then
counts only within its session. If the program leads a session, this file therefore also sets the
niceness of the session's group.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_AUTOGROUP = Path("/proc/self/autogroup")
# A change of a group's niceness may have to be repeated: the kernel accepts only ten changes per
# second from all unprivileged processes together.
_TRIES, _TRY_AGAIN_SECONDS = 20, 0.1
_CANNOT_EXECUTE = 127


def main() -> None:
    supervisor, niceness, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        sys.exit("the supervisor ended before its child began")
    if niceness:
        _be_nice(niceness)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot execute {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_CANNOT_EXECUTE)


def _be_nice(niceness: int) -> None:
    total = os.nice(niceness)
    if os.getsid(0) != os.getpid() or not _AUTOGROUP.exists():
        return
    for _ in range(_TRIES):
        try:
            _AUTOGROUP.write_text(str(total))
            return
        except BlockingIOError:
            time.sleep(_TRY_AGAIN_SECONDS)
        except OSError as error:
            print(f"niceness counts only within a session: {error.strerror}", file=sys.stderr)
            return


if __name__ == "__main__":
    main()
