"""Random paged attention problems and their brute-force answer in fp64.

For the tests of every attention backend.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.base.kv_format import decode, encode
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """`length` rows of a request, from position `start`."""

    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class PagedProblem:
    """One step for an attention backend; `num_pages` pages hold more than the step touches."""

    shape: AttentionShape
    layout: PagedLayout
    query: torch.Tensor  # [T, Hq, D]
    key_pages: torch.Tensor  # [N, S, Hkv, D], or codes
    value_pages: torch.Tensor  # [N, S, Hkv, Dv], or codes
    sinks: torch.Tensor | None = None  # [Hq]

    def attended_by(self, attention: AttentionBackend) -> torch.Tensor:
        attention.plan(self.layout)
        return attention.attend(self.query, self.key_pages, self.value_pages, self.sinks)


def attention_shape(
    num_query_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> AttentionShape:
    """A CPU shape with the usual scale, values as wide as keys, and every key in sight."""
    return AttentionShape(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        page_size=page_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def layout_of(
    chunks: Sequence[ChunkExtent], pages: Sequence[Sequence[int]], page_size: int
) -> PagedLayout:
    """The layout of `chunks`, of which chunk c reads the first pages of `pages[c]`."""
    query_indptr, page_indptr, page_indices, last_page_lengths = [0], [0], [], []
    for chunk, own_pages in zip(chunks, pages, strict=True):
        end = chunk.start + chunk.length
        num_pages = math.ceil(end / page_size)
        query_indptr.append(query_indptr[-1] + chunk.length)
        page_indptr.append(page_indptr[-1] + num_pages)
        page_indices += own_pages[:num_pages]
        last_page_lengths.append(end - (num_pages - 1) * page_size)
    num_decodes = 0
    while num_decodes < len(chunks) and chunks[num_decodes].length == 1:
        num_decodes += 1
    return PagedLayout(
        page_size,
        num_decodes,
        *(
            torch.tensor(numbers, dtype=torch.int32)
            for numbers in (query_indptr, page_indptr, page_indices, last_page_lengths)
        ),
        torch.tensor([chunk.start + chunk.length for chunk in chunks], dtype=torch.int32),
    )


def random_problem(
    chunks: Sequence[ChunkExtent], shape: AttentionShape, seed: int = 0
) -> PagedProblem:
    """Random queries and sinks, and random keys and values on shuffled pages.

    Slots that no row of the step sees hold NaN, as a wrong read then shows.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [math.ceil((chunk.start + chunk.length) / shape.page_size) for chunk in chunks]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=generator).tolist()
    pages = [[order.pop() for _ in range(count)] for count in counts]
    num_rows = sum(chunk.length for chunk in chunks)
    slots = (num_pages, shape.page_size, shape.num_kv_heads)
    key_pages, value_pages = (
        torch.randn((*slots, size), generator=generator).to(shape.dtype)
        for size in (shape.head_dim, shape.value_dim)
    )
    query = torch.randn(num_rows, shape.num_query_heads, shape.head_dim, generator=generator)
    unread = torch.ones(num_pages, shape.page_size, dtype=torch.bool)
    for chunk, own_pages in zip(chunks, pages, strict=True):
        for position in range(first_seen(shape, chunk.start), chunk.start + chunk.length):
            unread[own_pages[position // shape.page_size], position % shape.page_size] = False
    key_pages[unread] = value_pages[unread] = math.nan
    layout = layout_of(chunks, pages, shape.page_size)
    sinks = torch.randn(shape.num_query_heads, generator=generator) if shape.has_sinks else None
    return PagedProblem(shape, layout, query.to(shape.dtype), key_pages, value_pages, sinks)


def first_seen(shape: AttentionShape, position: int) -> int:
    """The first key that a row at `position` sees."""
    return 0 if shape.window is None else max(0, position + 1 - shape.window)


def coded_problem(problem: PagedProblem, coded_dtype: torch.dtype) -> PagedProblem:
    """The same with pages that hold codes."""
    return replace(
        problem,
        shape=replace(problem.shape, coded_dtype=coded_dtype),
        key_pages=encode(problem.key_pages, coded_dtype),
        value_pages=encode(problem.value_pages, coded_dtype),
    )


def decoded_problem(problem: PagedProblem) -> PagedProblem:
    """The same with the numbers that the codes stand for."""
    dtype = problem.shape.dtype
    return replace(
        problem,
        shape=replace(problem.shape, coded_dtype=None),
        key_pages=decode(problem.key_pages, dtype),
        value_pages=decode(problem.value_pages, dtype),
    )


def exact_attention(problem: PagedProblem) -> torch.Tensor:
    """[T, Hq, Dv] fp64, row by row from the definition: softmax(scale q k) v, of the keys in sight
    and the sink, with capped products."""
    layout, shape = problem.layout, problem.shape
    group = shape.num_query_heads // shape.num_kv_heads
    rows = torch.empty((*problem.query.shape[:2], shape.value_dim), dtype=torch.float64)
    for chunk in range(layout.num_chunks):
        begin, end = layout.query_indptr[chunk : chunk + 2].tolist()
        pages = layout.page_indices[layout.page_indptr[chunk] : layout.page_indptr[chunk + 1]]
        keys, values = (
            store[pages.long()].flatten(0, 1).double().repeat_interleave(group, dim=1)
            for store in (problem.key_pages, problem.value_pages)
        )
        for row in range(begin, end):
            visible = int(layout.kv_lengths[chunk]) - (end - 1 - row)
            seen = slice(first_seen(shape, visible - 1), visible)
            query = problem.query[row].double()
            scores = torch.einsum("hd,khd->hk", query, keys[seen]) * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * (scores / shape.softcap).tanh()
            if problem.sinks is not None:
                scores = torch.cat((scores, problem.sinks.double()[:, None]), dim=1)
            weights = scores.softmax(dim=-1)[:, : seen.stop - seen.start]
            rows[row] = torch.einsum("hk,khd->hd", weights, values[seen])
    return rows
