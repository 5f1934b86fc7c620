"""CUDA graphs on a CPU: operators are noted while they run, and run again on the same memory.

Unlike a GPU it runs them while it records, so what a recording leaves behind is overwritten with
NaN: whoever reads a result without a replay is found out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
