"""Reads weights while steps run, in a thread that works little and rests much.

It rests after each tensor, three times as long as that took. A low priority would not do: between
two tensors the thread holds Python's lock, and with it the steps, and would get no core from the
server's other processes meanwhile.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sgl_pipeline.pp_runner.base.compute_threads import use_every_core
from sgl_pipeline.pp_runner.model.stage_model import LoadedLayer

# Of the thread's time.
_REST_PER_WORK = 3.0

# Reads the weights of a layer, and calls its argument before each tensor.
ReadLayer = Callable[[int, Callable[[], None]], LoadedLayer[Any]]


class LayerLoading:
    """Reads `layers` one after the other, from now on, with `read` in a thread of its own."""

    def __init__(self, layers: Iterable[int], read: ReadLayer) -> None:
        self._layers = tuple(layers)
        self._read = read
        self._loaded: list[LoadedLayer[Any]] = []
        self._error: Exception | None = None
        self._is_abandoned = threading.Event()
        self._rested_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="layer loading", daemon=True)
        self._thread.start()

    def take(self) -> list[LoadedLayer[Any]] | None:
        """The layers, once, when all are there; None until then.

        Raises the error of reading them.
        """
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        loaded, self._loaded = self._loaded, []
        return loaded

    def abandon(self) -> None:
        """Reads no further layer, and forgets the layers that were read."""
        self._is_abandoned.set()

    def close(self) -> None:
        """Returns when the thread has ended: one that still ran would not let the process end."""
        self.abandon()
        self._thread.join()

    def _run(self) -> None:
        use_every_core()
        torch.set_num_threads(1)
        try:
            for layer in self._layers:
                loaded = self._read(layer, self._rest)
                if self._is_abandoned.is_set():
                    self._loaded.clear()
                    return
                self._loaded.append(loaded)
        except Exception as error:
            self._error = error

    def _rest(self) -> None:
        worked_s = time.monotonic() - self._rested_s
        self._is_abandoned.wait(_REST_PER_WORK * worked_s)
        self._rested_s = time.monotonic()
