"""The scheduler process's end of the grammar compiler process: starts it, asks it, reads answers.

When a compiler process has died, its open jobs are reported as failed, and the next job starts
another one. Nothing here waits.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from typing import NoReturn

import psutil
import zmq
from setproctitle import setproctitle

from sgl_pipeline.managers.grammars import compiler
from sgl_pipeline.managers.grammars.channel import (
    CancelJob,
    CompileJob,
    CompilerSetup,
    FailedJob,
    FromCompiler,
    MessageStream,
    ToCompiler,
)
from sgl_pipeline.process_lifetime import child_environment

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0


class GrammarCompilerClient:
    """One compiler process, and the jobs that it has not answered.

    Args:
        poller: gets the stream, so that the loop wakes for an answer.
    """

    def __init__(self, setup: CompilerSetup, poller: zmq.Poller) -> None:
        self._setup = setup
        self._poller = poller
        self._process: subprocess.Popen[bytes] | psutil.Process | None = None
        self._stream: MessageStream | None = None
        self._open_jobs: set[int] = set()
        self._num_jobs = 0

    def fork(self) -> None:
        """Starts the process as a fork of this one, which has imported xgrammar; while this one has
        more threads than one, of which another could hold a lock, it does nothing."""
        if len(os.listdir("/proc/self/task")) > 1:
            return
        scheduler = os.getpid()
        ours, theirs = socket.socketpair()
        # The handler of this process's SIGTERM is not the fork's.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        if (pid := os.fork()) == 0:
            ours.close()
            _become_compiler(theirs, scheduler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        self._process = psutil.Process(pid)
        self._talk(ours, theirs)

    def start(self) -> None:
        """Starts the process, unless it runs. It takes seconds to be ready; jobs wait in it."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        environment = child_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        command = [sys.executable, "-m", "sgl_pipeline.managers.grammars.compiler"]
        command += ["--socket", str(theirs.fileno()), "--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        self._talk(ours, theirs)

    def _talk(self, ours: socket.socket, theirs: socket.socket) -> None:
        theirs.close()
        self._stream = MessageStream(ours, FromCompiler)
        self._poller.register(self._stream, zmq.POLLIN)
        self._send(self._setup)

    def compile(self, kind: str, text: str) -> int:
        """Asks for a compile; returns the id of the job, which `poll` answers once."""
        self.start()
        self._num_jobs += 1
        self._open_jobs.add(self._num_jobs)
        self._send(CompileJob(self._num_jobs, kind, text))
        return self._num_jobs

    def cancel(self, job_id: int) -> None:
        """Cancels a job, which is not answered then."""
        self._open_jobs.discard(job_id)
        self._send(CancelJob(job_id))

    def poll(self) -> list[FromCompiler]:
        """The answers that have arrived. Never waits."""
        if self._stream is None:
            return []
        try:
            self._stream.flush()
            answers = self._stream.receive()
        except (EOFError, OSError) as error:
            return self._lost(error)
        answers = [answer for answer in answers if answer.job_id in self._open_jobs]
        self._open_jobs.difference_update(answer.job_id for answer in answers)
        return answers

    def close(self) -> None:
        """Ends the process; to be called once, at any time."""
        if self._process is None or self._stream is None:
            return
        self._poller.unregister(self._stream)
        self._stream.close()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process = self._stream = None

    def _send(self, message: ToCompiler) -> None:
        assert self._stream is not None
        try:
            self._stream.send(message)
        except OSError as error:
            logger.error("the grammar compiler cannot be reached: %s", error)  # `poll` acts on it

    def _lost(self, error: Exception) -> list[FromCompiler]:
        logger.error("the grammar compiler process has ended (%s)", error)
        self.close()
        message = "the grammar compiler process ended while it had this grammar; try again"
        lost = [FailedJob(job_id, message, is_final=False) for job_id in sorted(self._open_jobs)]
        self._open_jobs.clear()
        return list(lost)


def _become_compiler(own_socket: socket.socket, scheduler: int) -> NoReturn:
    """The work of a fork of the process `scheduler`, from its start to its end."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        setproctitle(compiler.__name__)
        compiler.serve(own_socket, scheduler)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
