"""The facts about a worker and its host with which it greets."""

import os
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from sgl_pipeline import __version__
from sgl_pipeline.host_memory import total_memory_bytes
from sgl_pipeline.pp_runner.device import count_gpus
from sgl_pipeline.wire.stage_messages import WorkerHello


class WorkerSite(NamedTuple):
    """A worker's facts about its host, from its start; see `WorkerHello`."""

    run_directory: str
    host_address: str = ""
    model_path: str = ""


def worker_hello(worker: int, site: WorkerSite) -> WorkerHello:
    """The facts that `pipeline/assignment.py` decides by. Touches no GPU."""
    return WorkerHello(
        worker=worker,
        host=socket.gethostname(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        num_gpus=count_gpus(),
        memory_bytes=total_memory_bytes(),
        version=__version__,
        transformers=_transformers_version(),
        run_directory=site.run_directory,
        host_address=site.host_address,
        model_path=site.model_path,
    )


def _transformers_version() -> str:
    """Without its import, which takes seconds."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""
