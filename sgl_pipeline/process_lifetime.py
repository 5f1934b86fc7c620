"""Ends the processes of one server together.

Every process that the server starts calls `die_with_parent` first, so that none outlives its parent
after any end, `kill -9` included; a `WatchedProcess` notices the end of a process that is not a
child. Linux does the work (`prctl`, `pidfd`); nothing here cleans up files: that is
`managers/channels/run_directory.py`.
"""

import contextlib
import ctypes
import os
import select
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# On it a worker writes the stacks of its threads to stderr.
DUMP_SIGNAL = signal.SIGUSR1


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with `variables`, for a child that imports this package: it finds
    the same package first, in whatever directory it starts, and no module in that directory."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    return os.environ | variables | own


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


class WatchedProcess:
    """A process of the same user, child or not, that is or may be running.

    Args:
        pid: of a process that its parent has not waited for yet.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor = os.pidfd_open(pid)

    @property
    def pid(self) -> int:
        return self._pid

    def fileno(self) -> int:
        """A descriptor that can be read once the process has ended."""
        return self._descriptor

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s`; True if the process has ended."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def kill(self) -> None:
        """Ends it at once, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def ask_for_dump(self) -> None:
        """Has it write down where its threads are, if it still can."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, DUMP_SIGNAL)

    def state(self) -> str:
        """The kernel's word for its state, such as `T (stopped)`."""
        try:
            status = Path(f"/proc/{self._pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "gone"
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return fields.get("State", "unknown").strip()

    def core_waits_s(self) -> dict[int, float]:
        """For how long each of its threads, by id, has been ready to run and had no core since it
        began; empty where the kernel does not say (it is built without CONFIG_SCHED_INFO)."""
        waits_s = {}
        for path in Path(f"/proc/{self._pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError):  # a thread may end meanwhile
                waits_s[int(path.parent.name)] = int(path.read_text().split()[1]) * 1e-9
        return waits_s

    def end(self) -> str:
        """Describes its end; to be called after it has ended."""
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "its process ended"
        # The last field, `exit_code` of proc(5); the name in parentheses may hold anything.
        code = os.waitstatus_to_exitcode(int(stat.rpartition(")")[2].split()[-1]))
        reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended, {reason}"

    def close(self) -> None:
        """Stops watching it."""
        os.close(self._descriptor)
