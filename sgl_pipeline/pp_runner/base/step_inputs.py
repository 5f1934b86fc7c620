"""Turns a step's chunks into the index tensors that the layers, the attention and the sampler read.

They follow from the plan alone, before the activations arrive, and never from model state. Shapes:
T tokens (rows) of the step, C chunks, P page references, S sampled rows.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.state_rows import StateRows, state_rows
from sgl_pipeline.pp_runner.base.to_device import to_device
from sgl_pipeline.requests import SamplingSpec
from sgl_pipeline.wire.step_order import INT32, MirroredChunk


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayout:
    """The places of the step's queries and keys, in the form of FlashInfer's paged wrappers.

    On the host, int32: the planners read them there. Query rows of chunk `c` are
    `query_indptr[c]:query_indptr[c + 1]`, its pages `page_indices[page_indptr[c]:page_indptr[c +
    1]]`, the last of which holds `last_page_lengths[c]` tokens, so that `kv_lengths[c]` keys are
    visible to the chunk's last row (and one fewer to each row before it). The first `num_decodes`
    chunks have one row each. `uploaded_pages` are `page_indices` on the stage's device, where they
    crossed with the step's other arrays; None in a layout that no step's upload brought.
    """

    page_size: int
    num_decodes: int
    query_indptr: torch.Tensor  # [C + 1]
    page_indptr: torch.Tensor  # [C + 1]
    page_indices: torch.Tensor  # [P]
    last_page_lengths: torch.Tensor  # [C]
    kv_lengths: torch.Tensor  # [C]
    uploaded_pages: torch.Tensor | None = None  # [P]

    @property
    def num_chunks(self) -> int:
        return self.kv_lengths.numel()

    def page_indices_on(self, device: torch.device) -> torch.Tensor:
        """`page_indices` on the stage's device."""
        if self.uploaded_pages is None:
            return to_device(self.page_indices.numpy(), device)
        return self.uploaded_pages


@dataclass(frozen=True, slots=True, eq=False)
class LentRows:
    """The rows of a step from `first_row` on, those of `chunks`, whose requests have leases."""

    first_row: int
    chunks: Sequence[MirroredChunk]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step, as tensors. `token_ids`, `positions`, `slots` and `sample_rows` are int64 on the
    stage's device; `slots[t]` is `page * page_size + offset`, where row t's key and value go.
    `sampling[s]` and `sample_positions[s]` belong to row `sample_rows[s]`: the spec, and the
    position that the drawn token will have in its request (int64, host). `layout` is that of the
    rows before `lent`, if there are such: their attention is computed elsewhere. `states` are
    those of all rows; None where requests have no state slots.
    """

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    layout: PagedLayout
    sample_rows: torch.Tensor  # [S]
    sample_positions: torch.Tensor  # [S]
    sampling: tuple[SamplingSpec, ...]
    lent: LentRows | None = None
    states: StateRows | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


# Brings arrays of int64 and int32 to the stage's device.
Upload = Callable[[Sequence[np.ndarray]], Sequence[torch.Tensor]]


def build_step_inputs(
    chunks: Sequence[MirroredChunk],
    page_size: int,
    device: torch.device,
    upload: Upload | None = None,
) -> StepInputs:
    """The inputs of a step with at least one chunk, rows in chunk order.

    Args:
        upload: brings the tensors to `device`; by default each separately.

    Raises ProtocolError for chunks of leases that are not the last ones, or not within a page, for
    chunks whose request has too few tokens or pages, and as `state_rows`.
    """
    num_local = _num_local(chunks)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    ends = starts + lengths
    query_indptr = _indptr(lengths)
    page_counts = -(-ends // page_size)
    page_counts[num_local:] = 1
    page_indptr = _indptr(page_counts)
    page_indices = _page_indices(chunks, num_local, page_counts.tolist(), page_size)
    # Of each chunk the index that a page of position 0 has, or would have.
    first_pages = page_indptr[:-1].copy()
    first_pages[num_local:] -= starts[num_local:] // page_size

    positions = np.arange(query_indptr[-1]) + (starts - query_indptr[:-1]).repeat(lengths)
    page_numbers, offsets = np.divmod(positions, page_size)
    pages = page_indices[first_pages.repeat(lengths) + page_numbers]
    slots = pages.astype(np.int64) * page_size + offsets

    sampled_chunk, to_end = _sampled_rows(chunks)
    sample_rows = query_indptr[1:][sampled_chunk] - to_end
    local_pages = page_indices[: page_indptr[num_local]]
    arrays = (_token_ids(chunks, len(positions)), positions, slots, sample_rows, local_pages)
    upload = upload or (lambda arrays: [to_device(array, device) for array in arrays])
    on_device = upload(arrays)
    return StepInputs(
        token_ids=on_device[0],
        positions=on_device[1],
        slots=on_device[2],
        layout=_layout(
            page_size,
            lengths[:num_local],
            query_indptr[: num_local + 1],
            ends[:num_local],
            page_counts[:num_local],
            page_indptr[: num_local + 1],
            local_pages,
            on_device[4],
        ),
        sample_rows=on_device[3],
        sample_positions=torch.from_numpy(ends[sampled_chunk] - to_end + 1),
        sampling=tuple([chunks[index].request.sampling for index in sampled_chunk.tolist()]),
        lent=_lent_rows(chunks, num_local, query_indptr),
        states=state_rows(chunks, query_indptr, device),
    )


def paged_layout(
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    pages: Sequence[npt.NDArray[np.int32]],
    page_size: int,
) -> PagedLayout:
    """The layout of chunks that begin at positions `starts` [C], of `lengths` [C], each with the
    pages that hold positions 0 to its end."""
    page_counts = np.array([len(run) for run in pages], np.int64)
    return _layout(
        page_size,
        lengths,
        _indptr(lengths),
        starts + lengths,
        page_counts,
        _indptr(page_counts),
        np.concatenate(pages),
    )


def written_pages(chunks: Sequence[MirroredChunk], page_size: int) -> list[int]:
    """The pages that the chunks write to and that later steps read; no two chunks of a step write
    to the same one."""
    pages: list[int] = []
    for chunk in chunks:
        if chunk.request.lease is None:
            end = chunk.start + chunk.length
            pages += chunk.request.pages[chunk.start // page_size : -(-end // page_size)]
    return pages


def written_slots(chunks: Sequence[MirroredChunk]) -> list[int]:
    """The state slots that the chunks write to; none in a model without states."""
    slots = [chunk.request.state_slot for chunk in chunks]
    slots += [snapshot.slot for chunk in chunks for snapshot in chunk.snapshots]
    return [slot for slot in slots if slot is not None]


def _layout(
    page_size: int,
    lengths: np.ndarray,
    query_indptr: np.ndarray,
    ends: np.ndarray,
    page_counts: np.ndarray,
    page_indptr: np.ndarray,
    page_indices: np.ndarray,
    uploaded_pages: torch.Tensor | None = None,
) -> PagedLayout:
    return PagedLayout(
        page_size=page_size,
        num_decodes=_leading_ones(lengths),
        query_indptr=_int32(query_indptr),
        page_indptr=_int32(page_indptr),
        page_indices=_int32(page_indices),
        last_page_lengths=_int32(ends - (page_counts - 1) * page_size),
        kv_lengths=_int32(ends),
        uploaded_pages=uploaded_pages,
    )


def _num_local(chunks: Sequence[MirroredChunk]) -> int:
    """The number of chunks before those of leases."""
    count = len(chunks)
    while count and chunks[count - 1].request.lease is not None:
        count -= 1
    return count


def _lent_rows(
    chunks: Sequence[MirroredChunk], num_local: int, query_indptr: np.ndarray
) -> LentRows | None:
    if num_local == len(chunks):
        return None
    return LentRows(int(query_indptr[num_local]), chunks[num_local:])


def _sampled_rows(chunks: Sequence[MirroredChunk]) -> tuple[np.ndarray, np.ndarray]:
    """The chunk of each sampled row [S], and the row's distance to its end: they are the last
    ones of chunks."""
    num_samples = np.array([chunk.samples + len(chunk.draft_ids) for chunk in chunks], np.int64)
    chunk_of = np.arange(len(chunks)).repeat(num_samples)
    return chunk_of, num_samples.cumsum()[chunk_of] - np.arange(len(chunk_of))


def _page_indices(
    chunks: Sequence[MirroredChunk], num_local: int, page_counts: Sequence[int], page_size: int
) -> np.ndarray:
    """The first pages of each chunk's request, `page_counts` [C] of them: those that hold positions
    0 to its end, or the one that takes the keys and values of a lease's chunk."""
    if any(chunk.request.lease is not None for chunk in chunks[:num_local]):
        raise ProtocolError("a chunk of a lease comes before one of a request without")
    for chunk in chunks[num_local:]:
        if chunk.start // page_size != (chunk.start + chunk.length - 1) // page_size:
            raise ProtocolError(
                f"{chunk.length} rows of a lease from position {chunk.start} on, which are not "
                f"within a page of {page_size}"
            )
    # Views, because slices would be copies; joined here, because numpy would take microseconds for
    # each. Most requests have no further pages.
    runs: list[array[int] | memoryview] = []
    for chunk, count in zip(chunks, page_counts, strict=True):
        pages = chunk.request.pages
        if len(pages) < count:
            raise _too_few(chunk, "pages", count, len(pages))
        runs.append(pages if len(pages) == count else memoryview(pages)[:count])
    return np.frombuffer(bytearray().join(runs), np.int32)


def _token_ids(chunks: Sequence[MirroredChunk], num_rows: int) -> np.ndarray:
    """The token ids of all rows, int64; drafts come behind the known tokens of their chunk."""
    token_ids = array(INT32)
    for chunk in chunks:
        end = chunk.start + chunk.length
        if chunk.draft_ids:
            token_ids += chunk.request.tokens[chunk.start : end - len(chunk.draft_ids)]
            token_ids.extend(chunk.draft_ids)
        else:
            token_ids += chunk.request.tokens[chunk.start : end]
    if len(token_ids) < num_rows:
        _refuse_missing_tokens(chunks)
    return np.frombuffer(token_ids, np.int32).astype(np.int64)


def _refuse_missing_tokens(chunks: Sequence[MirroredChunk]) -> None:
    """Every later row of the step would be another's."""
    for chunk in chunks:
        known_end = chunk.start + chunk.length - len(chunk.draft_ids)
        if len(chunk.request.tokens) < known_end:
            raise _too_few(chunk, "tokens", known_end, len(chunk.request.tokens))


def _too_few(chunk: MirroredChunk, what: str, needed: int, found: int) -> ProtocolError:
    return ProtocolError(
        f"{chunk.length} rows of request {chunk.request.handle} from position {chunk.start} "
        f"on need {needed} {what}, and it has {found}"
    )


def _leading_ones(lengths: np.ndarray) -> int:
    longer = (lengths != 1).nonzero()[0]
    return int(longer[0]) if longer.size else len(lengths)


def _indptr(counts: np.ndarray) -> np.ndarray:
    ends = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=ends[1:])
    return ends


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32, copy=False))
