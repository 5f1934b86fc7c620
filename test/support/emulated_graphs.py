"""CUDA graphs on a CPU: operators are noted while they run, and run again on the same memory.

Unlike a GPU it runs them while it records, so what a recording leaves behind is overwritten with
NaN: whoever reads a result without a replay is found out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class EmulatedGraph(TorchDispatchMode):
    """What was launched between `begin` and `end`."""

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[Callable[[], None]] = []
        self._made: list[torch.Tensor] = []
        self.num_replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        held = _tensors(result)

        def again() -> None:
            for kept, new in zip(held, _tensors(func(*args, **kwargs)), strict=True):
                if kept.layout == torch.strided:
                    kept.copy_(new)

        self._launches.append(again)
        taken = {_memory(leaf) for leaf in _tensors((args, kwargs))}
        self._made += [leaf for leaf in held if _memory(leaf) not in taken]
        return result

    def launch(self, kernel: Callable[[], object]) -> None:
        """Runs and notes a kernel that is no torch operator."""
        self._launches.append(lambda: (kernel(), None)[1])

    @torch.inference_mode()
    def forget_results(self) -> None:
        for made in self._made:
            if made.layout == torch.strided and made.is_floating_point():
                made.fill_(torch.nan)

    @torch.inference_mode()
    def replay(self) -> None:
        self.num_replays += 1
        for launch in self._launches:
            launch()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


class EmulatedRecorder:
    """A `GraphRecorder`; `graphs` are all that it made."""

    def __init__(self) -> None:
        self.graphs: list[EmulatedGraph] = []
        self._recording: EmulatedGraph | None = None
        self._in_session = False

    @contextmanager
    def session(self) -> Iterator[None]:
        self._in_session = True
        yield
        self._in_session = False

    def begin(self) -> None:
        assert self._in_session
        assert self._recording is None
        self._recording = EmulatedGraph()
        self._recording.__enter__()

    def end(self) -> EmulatedGraph:
        graph, self._recording = self._recording, None
        assert graph is not None
        graph.__exit__(None, None, None)
        graph.forget_results()
        self.graphs.append(graph)
        return graph

    def launch(self, kernel: Callable[[], object]) -> None:
        """A kernel of a library: noted during a recording, run at once outside of one."""
        if self._recording is None:
            kernel()
        else:
            self._recording.launch(kernel)


PoolId = tuple[int, int]


class EmulatedCuda(EmulatedRecorder):
    """What `CudaGraphRecorder` calls of torch.cuda, on a CPU; `graphs` are all that were made.

    A pool of device memory lives as long as a `MemPool` or a graph that was recorded into it does,
    one of page-locked memory as long as a graph does. Recording into one that is gone is the
    internal error of torch's allocators (`createOrIncrefPool` and `releasePool` of
    CUDACachingAllocator.cpp, and of CachingHostAllocator.h, as a card has shown). The end of a
    `MemPool` before that of its graphs is another, of its destructor, and is found where
    `installed` ends. An end is that of an array which a stand-in holds: Python lets go of cycles of
    its own objects as if they all ended first, and an array is none of those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[PoolId, int] = {}
        self._locked_uses: dict[PoolId, int] = {}
        self._ended_early: list[PoolId] = []

    @property
    def num_pools(self) -> int:
        """All that were made."""
        return len(self._uses)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the place of torch.cuda's own."""
        stands_in = {
            "CUDAGraph": lambda: _CudaGraph(self),
            "MemPool": lambda: _MemPool(self),
            "graph_pool_handle": self.new_pool,
            "Stream": lambda device: None,
            "stream": lambda stream: self.session(),
            "synchronize": lambda device: None,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, stand_in in stands_in.items():
                patch.setattr(torch.cuda, name, stand_in)
            yield
        assert not self._ended_early, "use_count() == 1 INTERNAL ASSERT FAILED"

    def new_pool(self) -> PoolId:
        return (0, len(self._uses) + 1)

    def use_pool(self, pool: PoolId, memory: object) -> None:
        """Until `memory` is gone."""
        self._uses[pool] = 1
        finalize(memory, self._end_pool, pool)

    def _end_pool(self, pool: PoolId) -> None:
        if self._uses[pool] != 1:
            self._ended_early.append(pool)
        _release(self._uses, pool)

    def record_into(self, pool: PoolId, graph: object) -> None:
        """Both kinds of memory are used until `graph` is gone."""
        _count(self._uses, pool, graph)
        _count(self._locked_uses, pool, graph)


def _count(uses: dict[PoolId, int], pool: PoolId, user: object) -> None:
    assert uses.get(pool) != 0, "use_count > 0 INTERNAL ASSERT FAILED"
    uses[pool] = uses.get(pool, 0) + 1
    finalize(user, _release, uses, pool)


def _release(uses: dict[PoolId, int], pool: PoolId) -> None:
    uses[pool] -= 1


class _MemPool:
    def __init__(self, cuda: EmulatedCuda) -> None:
        self.id = cuda.new_pool()
        self._end = np.empty(0)
        cuda.use_pool(self.id, self._end)


class _CudaGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, cuda: EmulatedCuda) -> None:
        self._cuda = cuda
        self._end = np.empty(0)
        self._graph: EmulatedGraph | None = None

    def capture_begin(self, pool: PoolId, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._cuda.record_into(pool, self._end)
        self._cuda.begin()

    def capture_end(self) -> None:
        self._graph = self._cuda.end()

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()
