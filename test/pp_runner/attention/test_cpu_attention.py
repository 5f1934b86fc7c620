"""The compiled kernels against a brute-force oracle, and the promise that rows are independent."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged_attention import (
    ChunkExtent,
    PagedProblem,
    attention_shape,
    exact_attention,
    layout_of,
    random_problem,
)

from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels, load_cpu_kernels

pytestmark = pytest.mark.compiler

# fp32 sums of up to a few thousand terms; bf16 rounds the result to 8 bits (its inputs are exact).
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return load_cpu_kernels()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(kernels: CpuKernels, problem: PagedProblem) -> torch.Tensor:
    attention = CpuAttention(problem.shape, kernels)
    attention.plan(problem.layout)
    return attention.attend(problem.query, problem.key_pages, problem.value_pages)


def assert_exact(kernels: CpuKernels, problem: PagedProblem) -> None:
    tolerance = TOLERANCE[problem.shape.dtype]
    actual = run(kernels, problem)
    assert actual.dtype == problem.shape.dtype
    torch.testing.assert_close(
        actual.double(), exact_attention(problem), rtol=tolerance, atol=tolerance
    )


chunk_extents = st.builds(
    ChunkExtent, start=st.integers(0, 90), length=st.one_of(st.just(1), st.integers(1, 70))
)


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(chunk_extents, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 16, 64]),
    head_dim=st.sampled_from([8, 32, 40, 64, 128, 256]),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (4, 4), (6, 3), (8, 2)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_any_layout_matches_the_definition(
    kernels: CpuKernels,
    chunks: list[ChunkExtent],
    page_size: int,
    head_dim: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    shape = attention_shape(*heads, head_dim, page_size, dtype)
    assert_exact(kernels, random_problem(chunks, shape, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_contexts_stay_exact(kernels: CpuKernels, dtype: torch.dtype) -> None:
    chunks = [ChunkExtent(4095, 1), ChunkExtent(3000, 5), ChunkExtent(0, 40)]
    assert_exact(kernels, random_problem(chunks, attention_shape(4, 2, 64, 16, dtype)))


def test_scores_far_apart_neither_overflow_nor_lose_the_largest(kernels: CpuKernels) -> None:
    shape = attention_shape(2, 1, 64, 16, torch.float32)
    problem = random_problem([ChunkExtent(0, 100), ChunkExtent(200, 1)], shape)
    problem.query.mul_(300.0)
    # Scores reach 1000, where a step of fp32 is 6e-5.
    torch.testing.assert_close(
        run(kernels, problem).double(), exact_attention(problem), rtol=1e-3, atol=1e-3
    )


def test_a_strided_query_is_read_in_place(kernels: CpuKernels) -> None:
    problem = random_problem([ChunkExtent(3, 20)], attention_shape(4, 2, 32, 16, torch.float32))
    wide = torch.full((20, 6, 32), torch.nan)
    wide[:, :4] = problem.query
    attention = CpuAttention(problem.shape, kernels)
    attention.plan(problem.layout)
    strided = attention.attend(wide[:, :4], problem.key_pages, problem.value_pages)
    assert torch.equal(strided, run(kernels, problem))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("splits", [[1] * 150, [150], [70, 80], [1, 37, 1, 64, 47]], ids=len)
def test_a_row_is_bitwise_the_same_however_its_prompt_is_cut(
    kernels: CpuKernels, splits: list[int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """One prompt of 150 tokens as one chunk, against the same prompt cut into `splits`, the other
    requests of the microbatch and the page size being different too."""
    whole = random_problem([ChunkExtent(0, 150)], attention_shape(*heads, 64, 1, dtype))
    expected = run(kernels, whole)
    order = whole.layout.page_indices.long()
    keys = [store[order].flatten(0, 1) for store in (whole.key_pages, whole.value_pages)]

    start = 0
    for length in splits:
        rows = whole.query[start : start + length]
        other = random_problem(
            [ChunkExtent(40, 3), ChunkExtent(99, 1)], attention_shape(*heads, 64, 16, dtype)
        )
        num_pages = other.key_pages.shape[0]
        own_pages = list(range(num_pages, num_pages + 10))
        pages = [
            torch.cat((store, _paged(kept, 16)))
            for store, kept in zip((other.key_pages, other.value_pages), keys, strict=True)
        ]
        other_pages = other.layout.page_indices.tolist()
        layout = layout_of(
            [ChunkExtent(40, 3), ChunkExtent(start, length), ChunkExtent(99, 1)],
            [other_pages[:3], own_pages, other_pages[3:]],
            16,
        )
        query = torch.cat((other.query[:3], rows, other.query[3:]))
        mixed = run(kernels, PagedProblem(other.shape, layout, query, *pages))
        assert torch.equal(mixed[3 : 3 + length], expected[start : start + length])
        start += length


def _paged(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    """[tokens, Hkv, D] as pages, the rest of the last one NaN."""
    missing = -tokens.shape[0] % page_size
    filler = torch.full((missing, *tokens.shape[1:]), torch.nan, dtype=tokens.dtype)
    return torch.cat((tokens, filler)).unflatten(0, (-1, page_size))


def test_results_do_not_depend_on_the_number_of_threads(kernels: CpuKernels) -> None:
    chunks = [ChunkExtent(200, 1), ChunkExtent(70, 1), ChunkExtent(0, 90), ChunkExtent(33, 40)]
    problem = random_problem(chunks, attention_shape(8, 4, 64, 16, torch.float32))
    alone = run(kernels, problem)
    torch.set_num_threads(3)
    assert torch.equal(run(kernels, problem), alone)
