"""How the processes of one server end together.

Every process that the server starts calls `die_with_parent` first, so that none outlives its
parent however that one ended, `kill -9` included. Linux does the work (`prctl`); nothing here
watches, waits or cleans up files: that is `managers/run_directory.py`.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent ends; Ctrl-C is left to the parent.

    Args:
        parent_pid: who the parent was meant to be. If it is gone already, this process ends here.

    A terminal sends Ctrl-C to all processes at once; only the server's main process acts on it.
    The parent is, strictly, the *thread* that started this process: start children from one that
    lives as long as the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # It may have ended before the call above.
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
