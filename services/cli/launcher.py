"""Becomes another program, which the kernel kills when its supervisor ends.

    python -I -S launcher.py SUPERVISOR_PID NICENESS PROGRAM [ARGUMENT]...

On Linux that is PR_SET_PDEATHSIG, which an exec keeps and which works while the program is stuck in
native code; elsewhere the program just runs. The signal is bound to the supervisor's thread that
forked, so children are started from its main thread. NICENESS is added to that of the supervisor,
as nice(1) does it. Imports nothing of the project, to start fast.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_EXECUTE = 127


def main() -> None:
    supervisor, niceness, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        sys.exit("the supervisor ended before its child began")
    os.nice(niceness)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot execute {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_CANNOT_EXECUTE)


if __name__ == "__main__":
    main()
