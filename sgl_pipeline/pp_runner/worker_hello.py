"""What a worker says of itself and its host when it greets."""

import os
import socket

import torch

from sgl_pipeline import __version__
from sgl_pipeline.messages import WorkerHello


def worker_hello(worker: int) -> WorkerHello:
    """The facts that `pipeline/assignment.py` decides by. Touches no GPU."""
    return WorkerHello(
        worker=worker,
        host=socket.gethostname(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        num_gpus=torch.cuda.device_count(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        version=__version__,
    )
