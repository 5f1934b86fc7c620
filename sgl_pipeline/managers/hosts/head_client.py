"""The head process, as the server's main process owns it: started at once, and surely ended.

It is detached (its parent is init), because upstream kills all descendants of the main process,
and the agents of the other hosts shall still be told that the server has ended. With `--use-ray`
the driver that has Ray start those agents comes and goes with it.
"""

import os
import select
import subprocess
import sys

import msgspec

from sgl_pipeline.cluster.keys import own_or_new_secret, read_secret, write_identity
from sgl_pipeline.cluster.model_digest import model_digest
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.early_options import EarlyOptions
from sgl_pipeline.managers.hosts.head_process import FAREWELL, LISTENING, HeadSetup
from sgl_pipeline.managers.hosts.ray_driver import RayDriver

STOP_TIMEOUT_S = 2.0


class HeadProcess:
    """Ends when this process does, in whatever way; after `close` with a farewell to the agents."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ray: RayDriver | None = None

    def start(self, options: EarlyOptions, model_path: str, run_directory: str) -> None:
        """Returns when it listens, and Ray is at work. Raises ConfigurationError where it cannot
        listen."""
        read = own_or_new_secret if options.cluster.use_ray else read_secret
        secret = read(options.cluster.key_file)
        write_identity(secret, run_directory)
        setup = HeadSetup(
            run_directory,
            options.cluster,
            options.num_stages,
            options.cpu_threads,
            model_digest(model_path, options.load_format),
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sgl_pipeline.managers.hosts.head_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        # Its standard input stands for the life of this process, not of its forks.
        os.register_at_fork(after_in_child=self._let_go)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(setup) + b"\n")
        answer = self._process.stdout.readline().decode().strip()
        self._process.wait()  # it has forked, and this was the parent
        if answer != LISTENING:
            raise ConfigurationError(answer or "the head process did not start; see above")
        if options.cluster.use_ray:
            # The user's own directory for temporary files is where the run directory is.
            self._ray = RayDriver(options, secret, os.path.dirname(run_directory))

    def wait_for_ray(self) -> None:
        """Returns when the other hosts are placed, where Ray does that. Raises ConfigurationError
        where it cannot."""
        if self._ray is not None:
            self._ray.wait_until_placed()

    def keep_ray(self) -> None:
        """To be called when no more forks will be made: from now on a lost driver is replaced."""
        if self._ray is not None:
            self._ray.keep()

    def close(self) -> None:
        """Ends it, if it was started: the agents are told that the server has ended."""
        if self._process is not None:
            self._say_farewell()
        if self._ray is not None:
            self._ray.close()

    def _say_farewell(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(FAREWELL)
        except BrokenPipeError:
            pass
        else:
            # It says nothing more: this is readable when it has ended.
            select.select([self._process.stdout], [], [], STOP_TIMEOUT_S)
        self._let_go()

    def _let_go(self) -> None:
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process = None
