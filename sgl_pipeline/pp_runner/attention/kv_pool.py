"""The keys and values of a stage's layers, in pages that all stages number alike.

The layer kernels write the pages, the attention backends read them. The pool does not know
requests: only the scheduler knows to which request a page belongs.
"""

from collections.abc import Iterable
from math import prod

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape


def kv_page_bytes(shape: AttentionShape, num_layers: int) -> int:
    """Bytes of one page: keys and values of `shape.page_size` tokens in `num_layers` layers."""
    return 2 * prod(shape.page_shape) * num_layers * shape.page_dtype.itemsize


class KvPool:
    """Pages for each layer, keyed by the model-wide layer id; layers may come and go.

    Pages start as zeros, or as another layer's: a kernel may read past a request's last key as long
    as it gives that weight 0, which is harmless only where the memory holds finite numbers.

    Args:
        layers: model-wide ids of the layers that have pages from the start.
        shape: of the keys and values, and of a page.
        num_pages: pages of each layer, the same for all.
        has_padding_page: whether each layer has one additional page, `padding_page`, which belongs
            to no request: rows that only fill up a step write there.
        max_layers: memory for this many layers is taken now and kept. Touching it for the first
            time takes as long as several steps.
    """

    def __init__(
        self,
        layers: Iterable[int],
        shape: AttentionShape,
        num_pages: int,
        *,
        has_padding_page: bool = False,
        max_layers: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self._shape = shape
        self._has_padding_page = has_padding_page
        self._max_layers = max_layers
        self._pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._spare: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in layers:
            self.add_layer(layer)
        num_spare = max(0, max_layers - len(self._pages))
        self._spare = [self._allocate() for _ in range(num_spare)]

    @property
    def layers(self) -> tuple[int, ...]:
        """Model-wide ids of the layers that have pages here."""
        return tuple(self._pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages of all present layers, and of layers that may come."""
        every = (*self._pages.values(), *self._spare)
        return sum(keys.nbytes + values.nbytes for keys, values in every)

    @property
    def padding_page(self) -> int:
        """Its id."""
        assert self._has_padding_page, "a pool without a padding page"
        return self.num_pages

    def add_layer(self, layer: int) -> None:
        """Gives `layer` pages: spare ones, else new ones."""
        assert layer not in self._pages, f"layer {layer} has its pages already"
        self._pages[layer] = self._spare.pop() if self._spare else self._allocate()

    def remove_layer(self, layer: int) -> None:
        """Takes the pages of `layer`, and keeps or frees their memory."""
        pages = self._pages.pop(layer)
        if len(self._pages) + len(self._spare) < self._max_layers:
            self._spare.append(pages)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key pages and value pages of `layer`, each [N, S, Hkv, W] (NHD layout, `kv_format.py`),
        the padding page last."""
        return self._pages[layer]

    def _allocate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Key pages and value pages of a layer, zeroed."""
        shape, num_pages = self._shape, self.num_pages + self._has_padding_page
        keys, values = (
            torch.zeros((num_pages, *shape.page_shape), dtype=shape.page_dtype, device=shape.device)
            for _ in range(2)
        )
        return keys, values
