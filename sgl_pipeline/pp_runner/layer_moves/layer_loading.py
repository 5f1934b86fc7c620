"""Weights that are read while steps run: a thread that yields to the thread of the steps.

Used by `stage_site.py`. The thread has a low priority, so that it takes little from the steps
of a busy stage; where it holds Python's lock, the thread of the steps sleeps and the kernel
gives it the core at once.
"""

import os
import threading
from collections.abc import Callable, Iterable

import torch

from sgl_pipeline.pp_runner.model.stage_model import LoadedLayer

# A tenth of a core that the steps would use up (sched(7): a weight of 110 beside 1024).
_NICENESS = 10


class LayerLoading:
    """Reads `layers` one after the other, from now on.

    Args:
        read: reads one; called in the thread.
    """

    def __init__(self, layers: Iterable[int], read: Callable[[int], LoadedLayer]) -> None:
        self._layers = tuple(layers)
        self._read = read
        self._loaded: list[LoadedLayer] = []
        self._error: Exception | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="layer loading", daemon=True)
        self._thread.start()

    def take(self) -> list[LoadedLayer] | None:
        """The layers, once, when all are there; None until then.

        Raises what reading them raised.
        """
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        loaded, self._loaded = self._loaded, []
        return loaded

    def abandon(self) -> None:
        """Reads no further layer, and forgets those that were read."""
        self._is_abandoned = True

    def close(self) -> None:
        """Returns when the thread has ended: one that still ran would not let the process end."""
        self.abandon()
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        torch.set_num_threads(1)
        try:
            for layer in self._layers:
                loaded = self._read(layer)
                if self._is_abandoned:
                    self._loaded.clear()
                    return
                self._loaded.append(loaded)
        except Exception as error:
            self._error = error
