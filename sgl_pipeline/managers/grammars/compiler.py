"""The grammar compiler process: compiles each grammar in a child of its own, which can be killed.

A process that has imported xgrammar, has a single thread, and forks for every compile, so that a
compile which takes too long or too much memory, or crashes, ends alone and costs the next one
nothing. It never sees a request, and no user's step waits for it.
"""

import argparse
import gc
import os
import resource
import select
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field

from sgl_pipeline.managers.grammars.channel import (
    CancelJob,
    CompileJob,
    CompilerSetup,
    FailedJob,
    MessageStream,
    ToCompiler,
    encode,
)
from sgl_pipeline.process_lifetime import die_with_parent

# Compiles at a time: a slow one leaves room for others.
MAX_WORKERS = 4
# Compiles must not slow the stages down where they share the cores.
_NICENESS = 5
_READ_BYTES = 2**18


@dataclass(slots=True)
class _Worker:
    """A forked child and what it has written so far: one encoded message."""

    job_id: int
    pid: int
    pipe: int
    deadline_s: float
    output: bytearray = field(default_factory=bytearray)


class GrammarCompiler:
    """Serves one scheduler process until that closes its end of the stream."""

    def __init__(self, stream: MessageStream, setup: CompilerSetup) -> None:
        self._stream = stream
        # Imports xgrammar: not before this process is bound to the life of its parent.
        from sgl_pipeline.managers.grammars.compilation import Compilation

        self._setup = setup
        self._compilation = Compilation(setup)
        self._waiting: deque[CompileJob] = deque()
        self._workers: dict[int, _Worker] = {}  # by job id
        # Forked children then share the garbage collector's pages with this process.
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """Raises EOFError or OSError when the scheduler process is gone."""
        while True:
            while self._waiting and len(self._workers) < MAX_WORKERS:
                self._start(self._waiting.popleft())
            pipes = {worker.pipe: worker for worker in self._workers.values()}
            stream = self._stream.fileno()
            outputs = [stream] if self._stream.has_unsent else []
            ready, _, _ = select.select([stream, *pipes], outputs, [], self._timeout_s())
            self._stream.flush()
            if stream in ready:
                for message in self._stream.receive():
                    self.take(message)
            for pipe in pipes.keys() & set(ready):
                self._read(pipes[pipe])
            self._end_overdue()

    def take(self, message: ToCompiler) -> None:
        if isinstance(message, CompileJob):
            self._waiting.append(message)
        elif isinstance(message, CancelJob):
            self._waiting = deque(job for job in self._waiting if job.job_id != message.job_id)
            if (worker := self._workers.get(message.job_id)) is not None:
                self._kill(worker)

    def _timeout_s(self) -> float | None:
        if not self._workers:
            return None
        first = min(worker.deadline_s for worker in self._workers.values())
        return max(0.0, first - time.monotonic())

    def _start(self, job: CompileJob) -> None:
        pipe, write_end = os.pipe()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_worker(job, write_end, parent_pid)
        os.close(write_end)
        deadline_s = time.monotonic() + self._setup.max_seconds
        self._workers[job.job_id] = _Worker(job.job_id, pid, pipe, deadline_s)

    def _run_worker(self, job: CompileJob, write_end: int, parent_pid: int) -> None:
        """The forked child: compiles, writes one message, and never returns."""
        exit_code = 1
        try:
            die_with_parent(parent_pid)
            self._stream.close()
            limit_memory(self._setup.max_memory_mib)
            with open(write_end, "wb") as output:
                output.write(encode(self._compilation.run(job)))
            exit_code = 0
        finally:
            os._exit(exit_code)

    def _read(self, worker: _Worker) -> None:
        if worker.job_id not in self._workers:  # cancelled a moment ago
            return
        if piece := os.read(worker.pipe, _READ_BYTES):
            worker.output += piece
            return
        status = self._reap(worker)
        if status == 0:
            self._stream.send_encoded(bytes(worker.output))
        else:
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            self._fail(
                worker,
                f"compiling the grammar crashed ({how}), perhaps because memory ran out (the limit "
                f"is {self._setup.max_memory_mib} MiB); simplify it or raise "
                "--grammar-compile-memory-mib",
            )

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for worker in [w for w in self._workers.values() if w.deadline_s <= now_s]:
            self._kill(worker)
            self._fail(
                worker,
                f"the grammar was not compiled within {self._setup.max_seconds:g} s; simplify it "
                "or raise --grammar-compile-seconds",
            )

    def _fail(self, worker: _Worker, message: str) -> None:
        self._stream.send(FailedJob(worker.job_id, message, is_final=False))

    def _kill(self, worker: _Worker) -> None:
        os.kill(worker.pid, signal.SIGKILL)
        self._reap(worker)

    def _reap(self, worker: _Worker) -> int:
        """Waits for a worker that has ended or is about to; its exit code, or minus its signal."""
        del self._workers[worker.job_id]
        os.close(worker.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


def limit_memory(max_mib: int) -> None:
    """Lets this process map at most `max_mib` MiB more than it has, and leaves no core file."""
    with open("/proc/self/statm") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    limit = mapped_bytes + max_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The kernel's own killer, should it come to that, takes this process before any other.
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sgl_pipeline.managers.grammars.compiler")
    parser.add_argument("--socket", type=int, required=True, help="Inherited file descriptor.")
    parser.add_argument("--parent", type=int, required=True, help="Process to end with.")
    options = parser.parse_args()
    serve(socket.socket(fileno=options.socket), options.parent)


def serve(own_socket: socket.socket, parent: int) -> None:
    """Compiles for the process `parent`, at the other end of the socket, until that is closed."""
    die_with_parent(parent)
    os.nice(_NICENESS)
    stream = MessageStream(own_socket, ToCompiler)
    try:
        messages: list[ToCompiler] = []
        while not messages:
            select.select([stream], [], [])
            messages = stream.receive()
        setup, *jobs = messages
        assert isinstance(setup, CompilerSetup), "the first message is the setup"
        compiler = GrammarCompiler(stream, setup)
        for job in jobs:
            compiler.take(job)
        compiler.run()
    except (EOFError, ConnectionError):
        pass  # The scheduler process no longer needs this process.


if __name__ == "__main__":
    main()
