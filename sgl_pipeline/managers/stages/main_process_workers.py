"""New workers from the server's main process: both ends of the pipe on which they are asked for.

The main process has started the first workers (`stage_processes.py`), and children of the scheduler
process would have no parent that outlives it; so it starts the later ones too. The pipe carries
msgspec structs, never pickles.
"""

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from sgl_pipeline.managers.stages.stage_processes import StageProcesses
from sgl_pipeline.pipeline.worker_source import StartedWorker

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)


class _StartWorker(msgspec.Struct, frozen=True, tag=True):
    worker: int


class MainProcessWorkers:
    """The scheduler's end: a `WorkerSource`."""

    def __init__(self, pipe: "Connection[bytes, bytes]") -> None:
        self._pipe = pipe

    def start_worker(self, worker: int) -> None:
        self._pipe.send_bytes(msgspec.msgpack.encode(_StartWorker(worker)))

    def started(self) -> Iterator[StartedWorker]:
        while self._pipe.poll():
            yield msgspec.msgpack.decode(self._pipe.recv_bytes(), type=StartedWorker)


def serve_worker_requests(
    pipe: "Connection[bytes, bytes]", processes: StageProcesses
) -> threading.Thread:
    """The main process's end: starts what is asked for, until the scheduler's end is closed.

    Must be called when upstream has forked its children: a fork must not meet this thread. The
    thread lives as long as the process, since a worker ends with the thread that started it.
    """

    def serve() -> None:
        while True:
            try:
                asked = msgspec.msgpack.decode(pipe.recv_bytes(), type=_StartWorker)
            except EOFError:
                threading.Event().wait()
            try:
                pid = processes.start_another(asked.worker)
            except OSError as error:
                # The scheduler gives up a worker that does not come.
                logger.error("worker %d cannot be started: %s", asked.worker, error)
                continue
            if pid is not None:
                pipe.send_bytes(msgspec.msgpack.encode(StartedWorker(asked.worker, pid)))

    thread = threading.Thread(target=serve, name="worker requests", daemon=True)
    thread.start()
    return thread
