"""The interface of attention backends for the decoder layers.

`pp_runner/kernel_choice.py` chooses between them. Shapes: T rows, Hq query heads, Hkv key/value
heads, D head dim of queries and keys, Dv that of values (mostly the same), N pages, S page size, W
elements of a row in a page of keys: D, or more where pages hold codes (kv_format.py), Wv those of a
row of values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from sgl_pipeline.pp_runner.base.kv_format import row_width
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """The attention of a layer; layers with equal ones share all of a step's preparations.

    A key's score is `scale` times its product with the query, then, if there is a `softcap` c,
    c * tanh(score / c). A row sees the last `window` keys, its own among them; None: all up to its
    own. With sinks each query head has one logit more in its softmax, whose weight is dropped.
    Without heads the layer attends to no keys, and its pages have no bytes.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def has_heads(self) -> bool:
        """True if the layer attends to keys."""
        return self.num_query_heads > 0


# Of a layer that keeps a state in place of keys and values.
NO_ATTENTION = LayerAttention(
    num_query_heads=0, num_kv_heads=0, head_dim=0, value_dim=0, scale=1.0, window=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape(LayerAttention):
    """A layer's attention over pages of `page_size` tokens. `dtype` is that of queries and outputs,
    and of keys and values too unless pages hold codes of `coded_dtype`
    (`kv_format.CODED_DTYPES`)."""

    page_size: int
    dtype: torch.dtype
    device: torch.device
    coded_dtype: torch.dtype | None = None

    @property
    def page_dtype(self) -> torch.dtype:
        """The dtype of a page's elements."""
        return self.coded_dtype or self.dtype

    @property
    def key_page_shape(self) -> tuple[int, int, int]:
        """[S, Hkv, W] of a page of keys."""
        return self.page_size, self.num_kv_heads, row_width(self.head_dim, self.page_dtype)

    @property
    def value_page_shape(self) -> tuple[int, int, int]:
        """[S, Hkv, Wv] of a page of values."""
        return self.page_size, self.num_kv_heads, row_width(self.value_dim, self.page_dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of keys and one of values."""
        numbers = prod(self.key_page_shape) + prod(self.value_page_shape)
        return numbers * self.page_dtype.itemsize


class AttentionBackend(Protocol):
    """Causal attention of one `AttentionShape` over paged keys and values.

    `plan` is called once a step, `attend` once for each layer of that step, after the step's own
    keys and values were written into the pages.
    """

    def plan(self, layout: PagedLayout) -> None:
        """Prepares for the step that `layout` describes."""

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns [T, Hq, Dv] in the dtype of `query`.

        Args:
            query: [T, Hq, D], after the rotary embedding.
            key_pages: [N, S, Hkv, W] of `page_dtype`, the layer's keys (NHD layout).
            value_pages: [N, S, Hkv, Wv], the same.
            sinks: [Hq] in fp32, given if and only if the shape has them.
        """


class LayerwiseAttention(Protocol):
    """The attention of all layers of a model."""

    def plan(self, layout: PagedLayout) -> None:
        """Prepares all layers for the step that `layout` describes."""

    def of(self, layer: int) -> AttentionBackend:
        """The backend of `layer`, a model-wide id."""


class StageAttention:
    """A `LayerwiseAttention` with a backend for each shape.

    Args:
        shapes: of all layers of the model, in their order.
        make: makes the backend of a shape with heads; called once for each that differs.
    """

    def __init__(
        self, shapes: Sequence[AttentionShape], make: Callable[[AttentionShape], AttentionBackend]
    ) -> None:
        attended = dict.fromkeys(shape for shape in shapes if shape.has_heads)
        self._backends = {shape: make(shape) for shape in attended}
        self._of_layers = [self._backends.get(shape) for shape in shapes]

    def plan(self, layout: PagedLayout) -> None:
        for backend in self._backends.values():
            backend.plan(layout)

    def of(self, layer: int) -> AttentionBackend:
        backend = self._of_layers[layer]
        assert backend is not None, f"layer {layer} has no attention"
        return backend

    @property
    def any(self) -> AttentionBackend:
        """The backend of one of the shapes."""
        return next(iter(self._backends.values()))


@dataclass(frozen=True, slots=True)
class SameAttention:
    """A `LayerwiseAttention` of layers that all have the shape of `backend`."""

    backend: AttentionBackend

    def plan(self, layout: PagedLayout) -> None:
        self.backend.plan(layout)

    def of(self, layer: int) -> AttentionBackend:
        return self.backend
