"""What a worker says of itself and its host when it greets."""

import os
import socket

from sgl_pipeline import __version__
from sgl_pipeline.messages import WorkerHello
from sgl_pipeline.pp_runner.device import count_gpus


def worker_hello(worker: int) -> WorkerHello:
    """The facts that `pipeline/assignment.py` decides by. Touches no GPU."""
    return WorkerHello(
        worker=worker,
        host=socket.gethostname(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        num_gpus=count_gpus(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        version=__version__,
    )
