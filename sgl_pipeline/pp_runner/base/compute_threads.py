"""The cores of a CPU stage, and their assignment to its threads.

It must also be called by each thread that a stage starts beside its compute threads.
"""

import logging
import os
from collections.abc import Sequence

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels

logger = logging.getLogger(__name__)

_cores: Sequence[int] = ()  # of this process, as given to `pin_threads`


def pin_threads(num_threads: int, cores: Sequence[int]) -> None:
    """Keeps this thread, and threads that it starts, on `cores` (all when empty), with
    `num_threads` compute threads.

    Raises ConfigurationError when the system does not have the cores.
    """
    global _cores
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise ConfigurationError(
                f"cannot pin a stage to the CPU cores {list(cores)}: {error.strerror}"
            ) from None
    _cores = cores
    torch.set_num_threads(num_threads)


def bind_compute_threads(
    kernels_name: str, dtype: torch.dtype, num_threads: int, cores: Sequence[int]
) -> None:
    """Keeps each compute thread on a core of its own, where the stage has as many cores as threads,
    and the layer kernels of this name have compiled products for `dtype`.

    The system moves a thread when something else runs on its core for a moment; two on one core
    take turns, 4 ms each. If it refuses, threads stay unbound, with a warning. torch's own products
    end threads that they do not need: later threads would all be on this thread's core. So a stage
    with weights that torch multiplies (`quantization_notice`) must not call it.
    """
    if kernels_name != "cpu" or dtype != torch.bfloat16 or num_threads == 1 or not cores:
        return
    kernels = load_cpu_kernels()
    if kernels.has_products and not kernels.bind_threads(num_threads, cores):
        logger.warning(
            "the system does not keep the threads of this stage on the CPU cores %s, one on each: "
            "they may share one and be slow",
            list(cores),
        )


def use_every_core() -> None:
    """To be called by a thread that computes nothing: it has inherited one core, and may use all of
    the stage's."""
    if _cores:
        os.sched_setaffinity(0, _cores)
