"""The leases of a stage, and the attention over their pages.

One thread attends (`attention_server.py`); everything else is for the thread of the steps. Pages of
leases are touched under a lock, which is taken for one layer at a time, and only of a lease that
has not ended at that moment. So from the moment that a lease was ended or forgotten its pages may
be written again. Steps go on meanwhile: they write no page of a lease.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sgl_pipeline.errors import MalformedData
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape, LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout, paged_layout
from sgl_pipeline.wire.attention_messages import (
    AttendedRows,
    AttendRows,
    LeasedChunk,
    PlanAttention,
    RefusedLease,
)


@dataclass(slots=True, eq=False)
class LeasedPages:
    """`pages` in the sequence of its tokens. Those before position `own_start` are read only; of
    the others each layer's hold the positions before `ends[layer]`."""

    digest: str
    pages: npt.NDArray[np.int32]
    own_start: int
    num_tokens: int
    ends: dict[int, int] = field(default_factory=dict)

    def refusal(self, layer: int, digest: str, chunk: LeasedChunk) -> str | None:
        """The reason for which a chunk's rows cannot be written and attended, if there is one."""
        start, end = chunk.start, chunk.start + chunk.length
        if digest != self.digest:
            return f"its pages are of another model or format, {self.digest}, not {digest}"
        if not self.own_start <= start < end <= self.num_tokens:
            return (
                f"rows {start} to {end - 1} are not in its own pages, which have "
                f"{self.own_start} to {self.num_tokens - 1}"
            )
        if start > (due := self.ends.get(layer, self.own_start)):
            return f"rows from {start} on came, when those from {due} on were due"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The chunks of a plan that are not refused, each with its lease: their rows among the plan's,
    their places in pages (`StepInputs.slots`) and the layout."""

    chunks: tuple[LeasedChunk, ...]
    leases: tuple[LeasedPages, ...]
    rows: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    layout: PagedLayout


@dataclass(slots=True)
class Planned:
    """A plan of one stream, and the part of it that the last layer had."""

    plan: PlanAttention
    part: _Part | None = None


class Leases:
    """At first there are none.

    Args:
        shapes: of all layers of the model.
        make_attention: makes the attention of all layers, for the thread that attends. Called with
            the first lease.
    """

    def __init__(
        self, shapes: Sequence[AttentionShape], make_attention: Callable[[], LayerwiseAttention]
    ) -> None:
        self._shapes, self._make_attention = shapes, make_attention
        self._attention: LayerwiseAttention | None = None
        self._planned: _Part | None = None  # by `_attention`
        self._pages: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._leases: dict[int, LeasedPages] = {}
        # Guards all of the above, and the leases' pages.
        self._lock = threading.Lock()
        # Whoever wants the lock for an end holds it: the thread that attends does not come before.
        self._turn = threading.Lock()

    @property
    def knows_layers(self) -> bool:
        """True if `hold` was called since the leases were forgotten."""
        return bool(self._pages)

    def hold(self, layers: range, kv_pool: KvPool) -> None:
        """The next leases are of the pages of `layers`."""
        pages = {layer: kv_pool.pages(layer) for layer in layers}
        if self._attention is None:
            self._attention = self._make_attention()
        with self._turn, self._lock:
            self._pages = pages

    def is_lent(self, number: int) -> bool:
        """True if a lease has begun and has not ended."""
        return number in self._leases

    def lend(self, number: int, digest: str, pages: npt.NDArray[np.int32], first_own: int) -> None:
        """Lets peers attend over `pages`, and write those from `first_own` on."""
        page_size = self._shapes[0].page_size
        lease = LeasedPages(digest, pages, first_own * page_size, len(pages) * page_size)
        with self._turn, self._lock:
            self._leases[number] = lease

    def end(self, number: int) -> None:
        """Ends a lease, if there is one: none of its pages is touched from here on."""
        with self._turn, self._lock:
            self._leases.pop(number, None)

    def forget(self) -> None:
        """Ends all leases as `end` does; the next ones may be of other layers."""
        with self._turn, self._lock:
            self._leases.clear()
            self._pages = {}

    @torch.inference_mode()
    def attend(self, planned: Planned, rows: AttendRows) -> AttendedRows:
        """Writes the rows of a layer of a step and attends. Raises MalformedData for what is not
        the size of the plan's rows."""
        started_s = time.monotonic()
        if rows.layer >= len(self._shapes):
            raise MalformedData(f"rows of layer {rows.layer} of {len(self._shapes)}")
        shape, num_rows = self._shapes[rows.layer], planned.plan.num_rows
        query = _tensor(
            rows.query, (num_rows, shape.num_query_heads, shape.head_dim), shape.dtype, "queries"
        )
        stored = [
            _tensor(content, (num_rows, *page_shape[1:]), shape.page_dtype, title)
            for content, page_shape, title in (
                (rows.keys, shape.key_page_shape, "keys"),
                (rows.values, shape.value_page_shape, "values"),
            )
        ]
        sinks = None
        if shape.has_sinks:
            sinks = _tensor(rows.sinks, (shape.num_query_heads,), torch.float32, "sinks")
        with self._turn:  # after whoever waits for an end
            pass
        with self._lock:
            refused = self._refused(planned.plan, rows.layer)
            output = query.new_zeros(num_rows, shape.num_query_heads, shape.value_dim)
            if len(refused) < len(planned.plan.chunks):
                part = self._part_of(planned, refused)
                self._attend(rows.layer, part, query, stored, sinks, output)
        content = output.view(torch.uint8).numpy().data.cast("B")
        return AttendedRows(rows.layer, content, time.monotonic() - started_s, refused)

    def _refused(self, plan: PlanAttention, layer: int) -> tuple[RefusedLease, ...]:
        reasons = ((chunk.lease, self._refusal(plan.digest, layer, chunk)) for chunk in plan.chunks)
        return tuple(RefusedLease(lease, reason) for lease, reason in reasons if reason is not None)

    def _refusal(self, digest: str, layer: int, chunk: LeasedChunk) -> str | None:
        lease = self._leases.get(chunk.lease)
        if lease is None:
            return "it is not lent here, or not any more"
        if layer not in self._pages:
            return f"layer {layer} is not here, but {min(self._pages)} to {max(self._pages)}"
        return lease.refusal(layer, digest, chunk)

    def _part_of(self, planned: Planned, refused: Sequence[RefusedLease]) -> _Part:
        """The part of a plan without `refused` leases; that of the layer before, if it is equal."""
        without = {one.lease for one in refused}
        chunks = tuple(one for one in planned.plan.chunks if one.lease not in without)
        leases = tuple(self._leases[one.lease] for one in chunks)
        if planned.part is None or planned.part.leases != leases:
            planned.part = _new_part(planned.plan, chunks, leases, self._shapes[0].page_size)
        return planned.part

    def _attend(
        self,
        layer: int,
        part: _Part,
        query: torch.Tensor,
        stored: Sequence[torch.Tensor],
        sinks: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """Fills the rows of `part` in `output`."""
        rows = torch.from_numpy(part.rows)
        is_whole = len(rows) == len(query)
        for pages, numbers in zip(self._pages[layer], stored, strict=True):
            memory = pages.flatten(0, 1).flatten(1).view(torch.uint8).numpy()
            content = numbers.flatten(1).view(torch.uint8).numpy()
            memory[part.slots] = content if is_whole else content[part.rows]
        for chunk, lease in zip(part.chunks, part.leases, strict=True):
            lease.ends[layer] = chunk.start + chunk.length
        assert self._attention is not None
        if part is not self._planned:
            self._attention.plan(part.layout)
            self._planned = part
        backend = self._attention.of(layer)
        asked = query if is_whole else query[rows]
        output[rows] = backend.attend(asked, *self._pages[layer], sinks)


def _new_part(
    plan: PlanAttention,
    chunks: tuple[LeasedChunk, ...],
    leases: tuple[LeasedPages, ...],
    page_size: int,
) -> _Part:
    of_chunks = dict(zip(chunks, leases, strict=True))
    rows, slots, visible, row = [], [], [], 0
    for chunk in plan.chunks:
        if (lease := of_chunks.get(chunk)) is not None:
            end = chunk.start + chunk.length
            positions = np.arange(chunk.start, end)
            pages = lease.pages[positions // page_size].astype(np.int64)
            rows.append(np.arange(row, row + chunk.length))
            slots.append(pages * page_size + positions % page_size)
            visible.append(lease.pages[: -(-end // page_size)])
        row += chunk.length
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    layout = paged_layout(starts, lengths, visible, page_size)
    return _Part(chunks, leases, np.concatenate(rows), np.concatenate(slots), layout)


def _tensor(
    content: memoryview, shape: tuple[int, ...], dtype: torch.dtype, title: str
) -> torch.Tensor:
    """A copy of `content` as a tensor. Raises MalformedData where it has another size."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    if len(content) != num_bytes:
        raise MalformedData(f"{len(content)} bytes of {title}, {num_bytes} are due")
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
