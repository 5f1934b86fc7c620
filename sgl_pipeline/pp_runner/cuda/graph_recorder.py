"""Records the kernels that a piece of code launches, to launch them all at once later.

The only file that touches CUDA graphs; tests put an emulation in its place. It has run on H200s,
except that graphs hold their pool.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Graph(Protocol):
    """Recorded kernels."""

    def replay(self) -> None:
        """Launches the kernels on the current stream, on the memory that they were recorded
        with."""


class GraphRecorder(Protocol):
    """Records one graph at a time."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Recording, and the warming up before it, happens inside; the device is idle around it."""
        yield

    def begin(self) -> None:
        """From here on kernels are recorded and do not run."""

    def end(self) -> Graph:
        """Ends the recording; returns the graph of the launches since `begin`."""


class _PooledGraph:
    """A graph that holds the pool of its memory, which must not go before it: whoever else lets go
    of the pool, and whenever."""

    def __init__(self, memory: torch.cuda.MemPool) -> None:
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()

    def __del__(self) -> None:
        # Python itself drops the attributes in an order that nothing promises.
        del self._graph
        del self._memory

    def begin(self) -> None:
        self._graph.capture_begin(
            pool=self._memory.id,  # type: ignore[arg-type]  # torch's stubs have a NewType of it
            capture_error_mode="thread_local",
        )

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphRecorder:
    """The recorder of a GPU.

    All graphs take their memory from one pool, which is right as long as they never run at the same
    time. When the last of them is gone the next recording begins another pool: torch's allocator of
    page-locked memory has freed its part of the old one, and would end the recording with an
    internal error. Other threads may allocate during a recording (NCCL has one that does).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.cuda.MemPool | None = None
        self._stream = torch.cuda.Stream(device)
        self._recording: _PooledGraph | None = None
        self._alive: weakref.WeakSet[_PooledGraph] = weakref.WeakSet()

    @contextmanager
    def session(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        assert self._recording is None, "a recording within a recording"
        if self._memory is None or not self._alive:
            self._memory = torch.cuda.MemPool()
        self._recording = _PooledGraph(self._memory)
        self._alive.add(self._recording)
        self._recording.begin()

    def end(self) -> Graph:
        assert self._recording is not None, "end without begin"
        graph, self._recording = self._recording, None
        graph.end()
        return graph
