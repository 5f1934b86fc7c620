"""Starts servers as forks of one process that has imported SGLang: seven seconds less for each.

Used by `live_server.py` for servers whose start is not what a test is about. What a fork does is
`launch_server.run_and_exit`, from the first line on; only its imports are there already, and those
of its stages.
"""

import array
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import setproctitle

ROOT = Path(__file__).resolve().parents[2]
_MOST_BYTES = 1 << 16


class ForkedServer:
    """A server's main process; the part of `subprocess.Popen` that the tests use."""

    def __init__(self, pid: int, stdout: IO[str], ending: socket.socket) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = stdout
        self.returncode: int | None = None
        self._ending = ending

    def poll(self) -> int | None:
        """The exit code, minus the signal's number if one ended it; None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("server", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            self._ending.settimeout(timeout_s)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                self.returncode = int(self._ending.recv(_MOST_BYTES))
                self._ending.close()
        return self.returncode


class WarmLauncher:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "support.warm_launcher", str(theirs.fileno())]
        paths = [str(ROOT / "test"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # That of the test that comes first may be gone before the next server starts.
        environment.pop("TMPDIR", None)
        # OpenMP and malloc read them once, and stages are forks of forks.
        environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environment |= {"GOMP_SPINCOUNT": "20000"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def start(self, arguments: list[str], environment: dict[str, str]) -> ForkedServer:
        """Forks a server with these arguments and with `environment` as the whole of its own."""
        read_end, write_end = os.pipe()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([arguments, environment]).encode()
        descriptors = array.array("i", [write_end, theirs.fileno()])
        self._socket.sendmsg(
            [request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors.tobytes())]
        )
        os.close(write_end)
        theirs.close()
        pid = int(ours.recv(_MOST_BYTES))
        return ForkedServer(pid, os.fdopen(read_end, encoding="utf-8"), ours)


def _main(control: socket.socket) -> None:
    from sgl_pipeline.managers.child_entries import prepare_imports
    from sgl_pipeline.managers.main_process import set_environment
    from sgl_pipeline.process_lifetime import die_with_parent

    die_with_parent()
    set_environment(tempfile.gettempdir())
    prepare_imports()
    from support.forked_nursery import ForkedNursery

    import sgl_pipeline.launch_server
    import sgl_pipeline.managers.command_line.server_args
    import sgl_pipeline.managers.entrance.http_front
    import sgl_pipeline.managers.forked_children
    import sgl_pipeline.pp_runner.stage_worker  # noqa: F401
    from sgl_pipeline.managers.stages.stage_processes import StageProcesses

    StageProcesses.nursery_type = ForkedNursery
    gc.collect()
    gc.freeze()  # pages that a collection of a fork would copy

    setproctitle.getproctitle()  # finds the place of titles from the environment of the start
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                pid, ending = key.data
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(BrokenPipeError):
                    ending.send(str(os.waitstatus_to_exitcode(status)).encode())
                ending.close()
                continue
            request, descriptors, *_ = socket.recv_fds(control, _MOST_BYTES, 2)
            if not request:
                return
            output, ending_fd = descriptors
            ending = socket.socket(fileno=ending_fd)
            pid = os.fork()
            if pid == 0:
                others = [one.data[1] for one in selector.get_map().values() if one.data]
                _become_server(request, output, [control, ending, *others])
            os.close(output)
            ending.send(str(pid).encode())
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, ending))


def _become_server(request: bytes, output: int, inherited: list[socket.socket]) -> None:
    from sgl_pipeline import launch_server
    from sgl_pipeline.process_lifetime import die_with_parent

    for one in inherited:
        one.close()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments, environment = json.loads(request)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    tempfile.tempdir = None  # as TMPDIR says now
    sys.argv = [launch_server.__file__, *arguments]
    launch_server.run_and_exit(arguments)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
