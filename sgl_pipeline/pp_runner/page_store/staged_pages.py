"""Pages of a GPU's pool, which go through page-locked buffers on streams of their own.

Loads have a stream, and saves have another, so neither waits for the other or for later steps. The
order of copies and steps is kept by events, never by waiting for the device:

- A transfer's stream waits for the steps that were launched when it was handed over: a save reads
  what they wrote, and a load does not write where they still read.
- A thread that fills or empties a buffer waits for the copy that used it; and before it reports a
  load it waits for all copies. Later steps are launched after that report, so they see the pages.
- The thread of the steps never waits. Where it ends the transfers, it has the stream of the steps
  wait for the copies that have begun: at most `LOAD_BUFFERS` + 1 objects.

The order is tested over emulated streams, and has run on an H200, in no server yet.
"""

from collections.abc import Callable, Iterable
from itertools import cycle

import torch

from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes, PageCopies, PageParts

# While the store fills one, others are copied.
LOAD_BUFFERS = 4


class StagedPool:
    """The way to the pages of a GPU's pool.

    Its two streams last. torch has 32 for a device and gives the same ones again, so that one for
    each session would soon be one on which graphs are recorded.
    """

    def __init__(self, kv_pool: KvPool) -> None:
        self._kv_pool = kv_pool
        self._loading, self._saving = (torch.cuda.Stream(kv_pool.device) for _ in range(2))

    def pages_of(self, layers: Iterable[int]) -> "StagedPages":
        """The pages of `layers`."""
        return StagedPages(self._kv_pool, layers, self._loading, self._saving)


class StagedPages(PageParts[torch.Tensor]):
    """The `PoolPages` of a GPU."""

    def __init__(
        self,
        kv_pool: KvPool,
        layers: Iterable[int],
        loading: torch.cuda.Stream,
        saving: torch.cuda.Stream,
    ) -> None:
        super().__init__({layer: kv_pool.rows(layer) for layer in layers})
        self._device = kv_pool.device
        self._loading, self._saving = loading, saving

    def copies_in(self, buffer_bytes: int) -> PageCopies:
        """See `PoolPages`."""
        return _StagedCopies(self._loading, self._copy_in, buffer_bytes, LOAD_BUFFERS)

    def copies_out(self, buffer_bytes: int) -> PageCopies:
        """See `PoolPages`."""
        return _StagedCopies(self._saving, self._copy_out, buffer_bytes, 1)

    def steps_so_far(self) -> torch.cuda.Event:
        """See `PoolPages`."""
        launched = torch.cuda.Event()
        launched.record(torch.cuda.current_stream(self._device))
        return launched

    def let_steps_follow(self) -> None:
        """See `PoolPages`."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._loading)
        computing.wait_stream(self._saving)

    @torch.inference_mode()
    def _copy_in(self, layer: int, page: int, content: torch.Tensor) -> None:
        for part, place in self.places(layer, page):
            part.copy_(content[place], non_blocking=True)

    @torch.inference_mode()
    def _copy_out(self, layer: int, page: int, content: torch.Tensor) -> None:
        for part, place in self.places(layer, page):
            content[place].copy_(part, non_blocking=True)


class _Buffer:
    """Page-locked memory for an object, which is free when `copied` has passed."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.content: Bytes = self.memory.numpy()
        self.copied = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps


class _StagedCopies:
    """`PageCopies` on `stream`."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        copy: Callable[[int, int, torch.Tensor], None],
        buffer_bytes: int,
        num_buffers: int,
    ) -> None:
        self._stream, self._copy = stream, copy
        self._buffers = [_Buffer(buffer_bytes) for _ in range(num_buffers)]
        self._turns = cycle(self._buffers)
        self._current = self._buffers[0]

    def begin(self, steps: torch.cuda.Event) -> None:
        self._stream.wait_event(steps)

    def buffer(self) -> Bytes:
        self._current = next(self._turns)
        self._current.copied.synchronize()
        return self._current.content

    def copy(self, layer: int, page: int, content: Bytes, start: int) -> None:
        assert content is self._current.content, "a buffer whose turn is over"
        with torch.cuda.stream(self._stream):
            self._copy(layer, page, self._current.memory[start:])
        self._current.copied.record(self._stream)

    def wait(self) -> None:
        for buffer in self._buffers:
            buffer.copied.synchronize()
