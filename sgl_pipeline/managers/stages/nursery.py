"""The main process's end of the nursery, the process that forks workers (`worker_nursery.py`).

A worker that must import torch takes seconds of a core to start; a fork takes a hundredth of a
second.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from sgl_pipeline.managers.stages.worker_nursery import MOST_BYTES, READY

_ANSWER_TIMEOUT_S = 5.0


class Nursery:
    """`close` must be called in the end.

    Args:
        environment: of the workers.
    """

    module = "sgl_pipeline.managers.stages.worker_nursery"

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._socket: socket.socket | None = None
        self._process: ForkingProcess | None = None
        self._is_ready = False
        self._num_ordered = 0
        self._ordered_pids: tuple[int, ...] = ()
        self._start()

    def order(self, workers: Sequence[Sequence[str]]) -> None:
        """Asks for workers with these arguments, once and before any other, without waiting."""
        assert self._socket is not None
        self._num_ordered = len(workers)
        with contextlib.suppress(OSError):  # ended, which `ordered_pids` notices
            self._socket.send(_request(workers))

    def ordered_pids(self) -> tuple[int, ...]:
        """Waits for the workers of `order`; their process ids. A nursery that has ended before it
        had them all stands for each: whoever watches a worker sees its end."""
        asks, process = self._socket, self._process
        if asks is None or process is None:  # closed by another thread
            return ()
        try:
            self._has_become_ready(asks, waits=True)
        except (OSError, ValueError):
            return (process.pid,) * self._num_ordered
        return self._ordered_pids

    def fork(self, arguments: Sequence[str]) -> int | None:
        """The process id of a new worker with these arguments; None if the nursery is not ready
        yet, or has ended; then it is started again."""
        try:
            asks = self._socket
            assert asks is not None
            if not self._has_become_ready(asks):
                return None
            asks.send(_request([arguments]))
            (pid,) = _answer(asks)
            return pid
        except (OSError, ValueError):  # ended: nothing or an empty answer
            self.close()
            self._start()
            return None

    def _has_become_ready(self, asks: socket.socket, *, waits: bool = False) -> bool:
        if not self._is_ready:
            asks.settimeout(None if waits else 0.0)
            with contextlib.suppress(BlockingIOError):
                if asks.recv(MOST_BYTES) != READY:
                    raise OSError("the nursery has ended")
                asks.settimeout(None)
                if self._num_ordered:
                    self._ordered_pids = _answer(asks)
                self._is_ready = True
            asks.settimeout(_ANSWER_TIMEOUT_S)
        return self._is_ready

    def _start(self) -> None:
        self._is_ready, self._num_ordered = False, 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = self._launch(theirs.fileno(), self._environment)
        theirs.close()

    def _launch(self, descriptor: int, environment: Mapping[str, str]) -> "ForkingProcess":
        """The process at the other end of the socket, which it inherits as `descriptor`."""
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *nursery_arguments(descriptor)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
        )

    def close(self) -> None:
        """Ends the nursery, and with it the workers that it has forked, which hold its end of the
        socket as long as they live."""
        if self._process is not None and self._socket is not None:
            self._process.kill()
            self._process.wait()
            self._socket.settimeout(_ANSWER_TIMEOUT_S)
            with contextlib.suppress(OSError):
                while self._socket.recv(MOST_BYTES):
                    pass
            self._socket.close()
            self._process = self._socket = None


def _request(workers: Sequence[Sequence[str]]) -> bytes:
    return json.dumps([[*arguments] for arguments in workers]).encode()


def _answer(asks: socket.socket) -> tuple[int, ...]:
    """The process ids; a nursery that has ended sends nothing, which is no JSON."""
    return tuple(map(int, json.loads(asks.recv(MOST_BYTES))))


class ForkingProcess(Protocol):
    """The part of `subprocess.Popen` that a nursery needs."""

    pid: int

    def kill(self) -> None: ...
    def wait(self) -> int: ...


def nursery_arguments(descriptor: int) -> list[str]:
    """The arguments of `worker_nursery.py`, for a child of this process."""
    return ["--parent", str(os.getpid()), "--socket", str(descriptor)]
