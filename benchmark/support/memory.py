"""The memory that a server takes, whatever number of processes it has."""

import contextlib

import psutil


def tree_pss_mib(server: psutil.Process) -> float:
    """MiB of `server` and its descendants: the sum of their proportional set sizes (PSS).

    A page that several processes map is divided among them, so pages shared inside the tree count
    once. Weights read through `mmap` count as far as they were touched.
    """
    pss = 0
    for process in (server, *server.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            pss += process.memory_full_info().pss
    return pss / 2**20
