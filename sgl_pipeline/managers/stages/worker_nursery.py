"""A process that imports what a stage needs, once, and forks workers, the first and later ones.

It exists on CPUs only: a fork cannot use a GPU that its parent may have touched. Requests arrive on
a socket, each a JSON list with the arguments of `stage_process.py` for each of some workers, whose
process ids are the answer. Starts no thread and runs no kernel, because a fork has neither. Never
imports sglang.
"""

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

from sgl_pipeline.process_lifetime import die_with_parent

READY = b"ready"
MOST_BYTES = 1 << 16


def main(argv: Sequence[str] | None = None) -> int:
    """Forks workers until the asking end is closed; returns the exit code, a fork's its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", required=True, type=int, help="process id of the parent")
    parser.add_argument("--socket", required=True, type=int, help="descriptor that asks come from")
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    # A SIGTERM to all processes of a server asks for its end, which the parent brings about. The
    # signal stays blocked, so that one to a new fork is not lost.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    from setproctitle import setproctitle

    from sgl_pipeline.pp_runner import stage_process, stage_worker  # noqa: F401

    gc.collect()
    gc.freeze()  # pages that a collection of a fork would copy
    with socket.socket(fileno=options.socket) as asks:
        asks.send(READY)
        while request := asks.recv(MOST_BYTES):
            _reap()
            nursery, pids = os.getpid(), []
            for own in json.loads(request):
                pid = os.fork()
                if pid == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
                    arguments = [*own, "--parent", str(nursery)]
                    # As those of a start.
                    setproctitle(" ".join((stage_process.__name__, *arguments)))
                    return stage_process.main(arguments)
                pids.append(pid)
            asks.send(json.dumps(pids).encode())
    return 0


def _reap() -> None:
    """Reaps forks that have ended. Their ends have been noticed: others are requested after
    that."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main())
