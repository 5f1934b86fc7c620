"""A nursery that is a fork of this process, which has imported what stages need: two seconds of a
core less for each server. Used by `warm_launcher.py`."""

import os
import sys
import threading
import traceback
from collections.abc import Mapping

from sgl_pipeline.managers.server_end import leave
from sgl_pipeline.managers.stages import nursery, worker_nursery


class _Fork:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, 9)

    def wait(self) -> int:
        return os.waitpid(self.pid, 0)[1]


class ForkedNursery(nursery.Nursery):
    """As the product's, from the first line of `worker_nursery.main` on; one that takes the place
    of another, in a process with threads, is the product's."""

    def _launch(self, descriptor: int, environment: Mapping[str, str]) -> nursery.ForkingProcess:
        if threading.active_count() > 1:
            return super()._launch(descriptor, environment)
        arguments = nursery.nursery_arguments(descriptor)
        if (pid := os.fork()) != 0:
            return _Fork(pid)
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            os.environ.update(environment)
            code = worker_nursery.main(arguments)
        except SystemExit as ending:  # a worker's after a Shutdown
            code = int(ending.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)
