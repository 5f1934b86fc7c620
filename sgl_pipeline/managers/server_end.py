"""Ends the server's main process: first its children, then itself.

The server or its start may end, or a Ctrl-C that lets no request finish
(`entrance/graceful_stop.py`). Imports neither sglang nor torch.
"""

import logging
import multiprocessing
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sgl_pipeline.managers.channels.run_directory import RunDirectory
    from sgl_pipeline.managers.hosts.head_client import HeadProcess
    from sgl_pipeline.managers.stages.stage_processes import StageProcesses

# The thread in which upstream looks once a second whether its children live.
_UPSTREAM_WATCHDOG = "sglang.srt.utils.watchdog"


def end_children(stages: "StageProcesses", head: "HeadProcess") -> None:
    """Kills what is left of the scheduler, the detokenizer and the stages."""
    # It takes a moment, in which one more Ctrl-C would leave something behind. SIGQUIT is how
    # upstream's watchdog answers a child's end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    # It would report what is killed here as a crash. Its own `stop` takes a lock, for which a
    # signal handler that has interrupted `stop` would wait for ever.
    logging.getLogger(_UPSTREAM_WATCHDOG).disabled = True
    head.close()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    stages.close()


def end_now(
    run_directory: "RunDirectory", stages: "StageProcesses", head: "HeadProcess", code: int
) -> NoReturn:
    """Ends the whole server from wherever it is, and leaves nothing behind."""
    end_children(stages, head)
    run_directory.remove()
    leave(code)


def leave(code: int) -> NoReturn:
    """Ends this process without the interpreter's own clean-up, in which upstream's extension
    modules print pages of leak warnings. All that matters must have been cleaned up before."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
