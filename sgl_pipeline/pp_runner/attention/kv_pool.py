"""The keys and values of a stage's layers, in pages that all stages number alike.

The layer kernels write the pages, the attention backends read them. The pool does not know
requests: only the scheduler knows to which request a page belongs.
"""

from collections.abc import Iterable, Sequence
from math import prod

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape


def kv_page_bytes(shapes: Sequence[AttentionShape], layers: Iterable[int]) -> int:
    """Bytes of one page: keys and values of a page's tokens in `layers`."""
    return sum(shapes[layer].page_bytes for layer in layers)


def largest_page_bytes(shapes: Sequence[AttentionShape]) -> int:
    """Bytes of one page in memory that may be any layer's."""
    return sum(max(part) for part in zip(*map(_part_bytes, shapes), strict=True))


def _part_bytes(shape: AttentionShape) -> tuple[int, int]:
    """Bytes of the keys and of the values in a page."""
    itemsize = shape.page_dtype.itemsize
    return prod(shape.key_page_shape) * itemsize, prod(shape.value_page_shape) * itemsize


class KvPool:
    """Pages for each layer, keyed by the model-wide layer id; layers may come and go.

    Pages start as zeros, or as another layer's of the same shape: a kernel may read past a
    request's last key as long as it gives that weight 0, which is harmless only where the memory
    holds finite numbers.

    Args:
        layers: model-wide ids of the layers that have pages from the start.
        shapes: of all layers of the model.
        num_pages: pages of each layer, the same for all.
        has_padding_page: whether each layer has one additional page, `padding_page`, which belongs
            to no request: rows that only fill up a step write there.
        max_layers: memory for this many layers that have pages, of the largest ones, is taken now
            and kept. Touching it for the first time takes as long as several steps.
    """

    def __init__(
        self,
        layers: Iterable[int],
        shapes: Sequence[AttentionShape],
        num_pages: int,
        *,
        has_padding_page: bool = False,
        max_layers: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self._shapes = shapes
        self._has_padding_page = has_padding_page
        self._max_layers = max_layers
        self._memory: dict[int, _LayerMemory] = {}
        self._spare: list[_LayerMemory] = []
        for layer in layers:
            self.add_layer(layer)
        if max_layers:
            shape = next(one for one in shapes if one.page_bytes)
            num_spare = max(0, max_layers - self._num_with_pages)
            self._spare = [self._allocate(shape) for _ in range(num_spare)]

    @property
    def device(self) -> torch.device:
        """The device of all pages."""
        return self._shapes[0].device

    @property
    def layers(self) -> tuple[int, ...]:
        """Model-wide ids of the layers that have pages here."""
        return tuple(self._memory)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages of all present layers, and of layers that may come."""
        return sum(memory.num_bytes for memory in (*self._memory.values(), *self._spare))

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page of each layer of the model, whether it has pages here or not."""
        return tuple(shape.page_bytes for shape in self._shapes)

    @property
    def padding_page(self) -> int:
        """The id of the padding page."""
        assert self._has_padding_page, "a pool without a padding page"
        return self.num_pages

    def add_layer(self, layer: int) -> None:
        """Gives `layer` pages: spare ones, else new ones."""
        assert layer not in self._memory, f"layer {layer} has its pages already"
        shape = self._shapes[layer]
        takes_spare = self._spare and shape.page_bytes
        memory = self._spare.pop() if takes_spare else self._allocate(shape)
        self._memory[layer] = memory.reshaped(shape)

    def remove_layer(self, layer: int) -> None:
        """Takes the pages of `layer`, and keeps or frees their memory."""
        memory = self._memory.pop(layer)
        if memory.num_bytes and self._num_with_pages + len(self._spare) < self._max_layers:
            self._spare.append(memory)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key pages [N, S, Hkv, W] and value pages [N, S, Hkv, Wv] of `layer` (NHD layout,
        `kv_format.py`), the padding page last."""
        return self._memory[layer].pages

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of `pages` (uint8), one page in a row: key pages [N, bytes of a page's keys]
        and value pages [N, bytes of its values]."""
        keys, values = (part.flatten(1).view(torch.uint8) for part in self.pages(layer))
        return keys, values

    @property
    def _num_with_pages(self) -> int:
        """Number of present layers that have pages: those with states have none."""
        return sum(memory.num_bytes > 0 for memory in self._memory.values())

    def _allocate(self, shape: AttentionShape) -> "_LayerMemory":
        """Memory for the pages of a layer of `shape`, and, if layers may come, of any layer."""
        num_pages = self.num_pages + self._has_padding_page
        shapes = self._shapes if self._max_layers and shape.page_bytes else (shape,)
        keys, values = (
            torch.zeros(num_pages * max(part), dtype=torch.uint8, device=shape.device)
            for part in zip(*map(_part_bytes, shapes), strict=True)
        )
        return _LayerMemory(keys, values, num_pages, shape)


class _LayerMemory:
    """The pages of one layer, of `shape`, in memory (uint8) that may be larger."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, num_pages: int, shape: AttentionShape
    ) -> None:
        self._parts, self._num_pages, self._shape = (keys, values), num_pages, shape
        self.num_bytes = keys.nbytes + values.nbytes
        key_pages, value_pages = (
            part[: num_pages * num_bytes].view(shape.page_dtype).view(num_pages, *page_shape)
            for part, num_bytes, page_shape in zip(
                self._parts,
                _part_bytes(shape),
                (shape.key_page_shape, shape.value_page_shape),
                strict=True,
            )
        )
        self.pages = key_pages, value_pages

    def reshaped(self, shape: AttentionShape) -> "_LayerMemory":
        """The same memory for a layer of `shape`; zeros unless the pages' shape stays."""
        if shape == self._shape:
            return self
        for part in self._parts:
            part.zero_()
        return _LayerMemory(*self._parts, self._num_pages, shape)
