"""New workers from the server's main process: both ends of the pipe on which they are requested.

The main process has started the first workers (`stage_processes.py`), and children of the scheduler
process would have no parent that outlives it; so it starts the later ones too. The pipe carries
msgspec structs, never pickles.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sgl_pipeline.managers.stages.stage_processes import StageProcesses
from sgl_pipeline.pipeline.worker_source import RefusedWorker, StartedWorker
from sgl_pipeline.process_lifetime import WatchedProcess

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class _StartWorker(msgspec.Struct, frozen=True, tag=True):
    worker: int


class _Started(msgspec.Struct, frozen=True, tag=True):
    worker: int
    pid: int


class _TellFirst(msgspec.Struct, frozen=True, tag=True):
    """Answered with `_First`."""


class _First(msgspec.Struct, frozen=True, tag=True):
    pids: tuple[int, ...]


class _Refused(msgspec.Struct, frozen=True, tag=True):
    worker: int
    reason: str


class MainProcessWorkers:
    """The scheduler's end: a `WorkerSource`."""

    def __init__(self, pipe: "Connection[bytes, bytes]") -> None:
        self._pipe = pipe

    def first_pids(self) -> Sequence[int]:
        """Process ids of the workers that the main process has started by itself, by number. Waits
        until they are there; to be called before any is asked for."""
        self._pipe.send_bytes(msgspec.msgpack.encode(_TellFirst()))
        return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=_First).pids

    def start_worker(self, worker: int) -> None:
        self._pipe.send_bytes(msgspec.msgpack.encode(_StartWorker(worker)))

    def started(self) -> Iterator[StartedWorker | RefusedWorker]:
        while self._pipe.poll():
            answer = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=_Started | _Refused)
            if isinstance(answer, _Started):
                yield StartedWorker(answer.worker, answer.pid)
            else:
                yield RefusedWorker(answer.worker, answer.reason)

    def watch(self, started: StartedWorker) -> WatchedProcess:
        return WatchedProcess(started.pid)

    def forget(self, worker: int, *, has_served: bool) -> None:
        """The launcher ends its process."""

    def is_lost_with_host(self, worker: int) -> bool:
        return False

    def are_hosts_there(self) -> bool:
        return True

    def take_leavers(self) -> list[int]:
        return []  # they report it themselves

    def clock_offsets_s(self) -> Mapping[int, float]:
        return {}

    def hosts(self) -> list[dict[str, Any]]:
        return []


def serve_worker_requests(
    pipe: "Connection[bytes, bytes]", processes: StageProcesses
) -> threading.Thread:
    """The main process's end: starts requested workers, until the scheduler's end is closed.

    Must be called when upstream has forked its children: a fork must not meet this thread. The
    thread lives as long as the process, since a worker ends with the thread that started it.
    """

    def serve() -> None:
        while True:
            try:
                asked = msgspec.msgpack.decode(pipe.recv_bytes(), type=_StartWorker | _TellFirst)
            except EOFError:
                threading.Event().wait()
            if isinstance(asked, _TellFirst):
                pipe.send_bytes(msgspec.msgpack.encode(_First(processes.pids)))
                continue
            answer: _Started | _Refused
            try:
                pid = processes.start_another(asked.worker)
            except OSError as error:
                answer = _Refused(asked.worker, f"its process cannot be started: {error}")
            else:
                if pid is None:  # the server is about to end
                    continue
                answer = _Started(asked.worker, pid)
            pipe.send_bytes(msgspec.msgpack.encode(answer))

    thread = threading.Thread(target=serve, name="worker requests", daemon=True)
    thread.start()
    return thread
