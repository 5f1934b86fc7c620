"""The private directory that holds a server's sockets, and what makes sure that it goes away.

Made by `launch_server.py` before any process starts. A janitor, a detached process of a few
megabytes, removes it when the server's main process ends in whatever way (upstream ends itself
with SIGKILL when a child has died); should the janitor be killed too, the next start sweeps.
"""

import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from sgl_pipeline.errors import ConfigurationError

_PREFIX = "sgl-pipeline-"
_LOCK = "lock"  # held, by flock, for as long as the server's main process lives
# A Unix socket path holds 107 bytes; ours and upstream's file names need at most 20 of them.
_MAX_PATH_BYTES = 107 - 20


class RunDirectory:
    """A fresh directory of mode 0700, removed by `remove` or when this process ends."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        sweep_stale(parent)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            os.rmdir(self.path)
            raise ConfigurationError(
                f"{self.path} is too long a path for Unix sockets ({_MAX_PATH_BYTES} bytes at "
                "most); set TMPDIR to a shorter one"
            )
        # It gets its name only when it is held: a sweep takes a free lock for a dead server's.
        unnamed = os.path.join(self.path, f"{_LOCK}.new")
        lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(unnamed, os.path.join(self.path, _LOCK))
        self._held = [lock, _start_janitor(self.path)]
        # They stand for the life of this process, not of its forks.
        os.register_at_fork(after_in_child=self._let_go)

    def remove(self) -> None:
        """Removes it now, and lets the janitor go. To be called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        while self._held:
            os.close(self._held.pop())


def sweep_stale(parent: str) -> None:
    """Removes the run directories under `parent` whose servers have ended."""
    for directory in Path(parent).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR)
        except OSError:
            continue  # another user's, or just being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)


def _start_janitor(path: str) -> int:
    """Forks the process that outlives this one and then removes `path`.

    Returns a file descriptor that no child inherits: when it is closed, as it is when this process
    ends, the janitor does its work. It is detached (its parent is init), because upstream kills all
    descendants of the main process. Must be called while this process has a single thread.
    """
    alive, held_by_main = os.pipe()
    if (child := os.fork()) != 0:
        os.close(alive)
        os.waitpid(child, 0)
        return held_by_main
    try:
        os.close(held_by_main)
        os.setsid()
        if os.fork() == 0:
            _clean_up_after(alive, path)
    finally:
        os._exit(0)


def _clean_up_after(alive: int, path: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    # Whoever reads the server's output through a pipe waits for its last writer.
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(quiet, descriptor)
    os.read(alive, 1)  # returns at end of file: the main process has ended
    # Its children are being killed at this moment and may still create a file.
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.05)
        if not os.path.exists(path):
            return
