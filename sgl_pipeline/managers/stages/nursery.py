"""The main process's end of the nursery, the process that forks workers (`worker_nursery.py`).

A worker that must import torch takes seconds to start, more on a busy machine; a fork takes a
hundredth of a second.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from sgl_pipeline.managers.stages.worker_nursery import MOST_BYTES, READY

_ANSWER_TIMEOUT_S = 5.0


class Nursery:
    """`close` must be called in the end.

    Args:
        environment: of the workers.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._start()

    def fork(self, arguments: Sequence[str]) -> int | None:
        """The process id of a new worker with these arguments; None if the nursery is not ready
        yet, or has ended; then it is started again."""
        try:
            if not self._has_become_ready():
                return None
            assert self._socket is not None
            self._socket.send(json.dumps([*arguments]).encode())
            return int(self._socket.recv(MOST_BYTES))
        except (OSError, ValueError):  # ended: nothing or an empty answer
            self.close()
            self._start()
            return None

    def _has_become_ready(self) -> bool:
        assert self._socket is not None
        if not self._is_ready:
            self._socket.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                if self._socket.recv(MOST_BYTES) != READY:
                    raise OSError("the nursery has ended")
                self._is_ready = True
            self._socket.settimeout(_ANSWER_TIMEOUT_S)
        return self._is_ready

    def _start(self) -> None:
        self._is_ready = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "sgl_pipeline.managers.stages.worker_nursery"]
        command += ["--parent", str(os.getpid()), "--socket", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def close(self) -> None:
        """Ends the nursery, and with it the workers that it has forked."""
        if self._process is not None and self._socket is not None:
            self._process.kill()
            self._process.wait()
            self._socket.close()
            self._process = self._socket = None
