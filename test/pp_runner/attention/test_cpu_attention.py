"""The compiled kernels against a brute-force oracle, and the promise that rows are independent."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.instruction_sets import every_instruction_set, kernels_for
from support.paged_attention import (
    ChunkExtent,
    PagedProblem,
    attention_shape,
    coded_problem,
    decoded_problem,
    exact_attention,
    first_seen,
    layout_of,
    random_problem,
)

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES, FP8, decode, encode
from sgl_pipeline.pp_runner.cpu_kernels.library import Arithmetic, CpuKernels, load_cpu_kernels

pytestmark = pytest.mark.compiler

# Sums of up to a few thousand terms in fp32, and exponentials within 8e-5.
FLOAT32_ERROR = 1e-5
EXPONENTIAL_ERROR = 1e-4
BFLOAT16_ROUNDING = 2.0**-8  # at most, relative


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return load_cpu_kernels()


@pytest.fixture(params=Arithmetic, ids=lambda arithmetic: arithmetic.name)
def arithmetic(request: pytest.FixtureRequest, kernels: CpuKernels) -> Arithmetic:
    if not kernels.has(request.param):
        pytest.skip(f"this machine or compiler has no {request.param.name}")
    return request.param


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(kernels: CpuKernels, arithmetic: Arithmetic, problem: PagedProblem) -> torch.Tensor:
    return problem.attended_by(CpuAttention(problem.shape, kernels, arithmetic))


def allowed_error(
    arithmetic: Arithmetic, problem: PagedProblem, exact: torch.Tensor
) -> torch.Tensor:
    """[T, Hq, Dv], how far each output may lie from the exact one.

    Where weights w are rounded, each to w (1 + e), |e| <= E, before both sums of
    sum(w v) / sum(w), the quotient o moves by at most E (sum(w |v|) / sum(w) + |o|), higher powers
    of E aside; a sink in the second sum makes it less. A bf16 output is rounded once more.
    """
    error = FLOAT32_ERROR * (1 + exact.abs())
    if arithmetic.dtype is torch.bfloat16:
        error += BFLOAT16_ROUNDING * exact.abs()
    if arithmetic in (Arithmetic.DOT_PRODUCTS, Arithmetic.AMX):
        magnitudes = exact_attention(replace(problem, value_pages=problem.value_pages.abs()))
        error += (BFLOAT16_ROUNDING + EXPONENTIAL_ERROR) * (magnitudes + exact.abs())
    return error


def assert_exact(
    kernels: CpuKernels, arithmetic: Arithmetic, problem: PagedProblem, score_error: float = 0.0
) -> None:
    """`score_error`: by how much more a score may be off than fp32 makes those of random inputs."""
    actual = run(kernels, arithmetic, problem)
    exact = exact_attention(problem)
    assert actual.dtype == problem.shape.dtype
    excess = (actual.double() - exact).abs() - allowed_error(arithmetic, problem, exact)
    assert float(excess.max()) <= score_error  # a NaN fails


chunk_extents = st.builds(
    ChunkExtent, start=st.integers(0, 150), length=st.one_of(st.just(1), st.integers(1, 70))
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chunks=st.lists(chunk_extents, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 16, 64]),
    head_dim=st.sampled_from([8, 32, 40, 64, 128, 256]),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (20, 1), (4, 4), (6, 3), (8, 2)]),
    seed=st.integers(0, 1000),
)
def test_any_layout_matches_the_definition(
    kernels: CpuKernels,
    arithmetic: Arithmetic,
    chunks: list[ChunkExtent],
    page_size: int,
    head_dim: int,
    heads: tuple[int, int],
    seed: int,
) -> None:
    shape = attention_shape(*heads, head_dim, page_size, arithmetic.dtype)
    assert_exact(kernels, arithmetic, random_problem(chunks, shape, seed))


def layer_shapes(
    head_dims: st.SearchStrategy[tuple[int, int]],
) -> st.SearchStrategy[AttentionShape]:
    """Layers with a window, a softcap, sinks and values of another width, or some of these, in
    fp32. Windows end at, before and behind tiles of 32 and 64 keys, pages and contexts."""
    windows = st.one_of(st.sampled_from([1, 2, 16, 31, 32, 33, 64, 128, 300]), st.integers(1, 200))
    heads = st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (20, 1), (4, 4), (6, 3), (8, 2)])
    return st.builds(
        lambda heads, page_size, dims, **rules: replace(
            attention_shape(*heads, dims[0], page_size, torch.float32), value_dim=dims[1], **rules
        ),
        heads,
        st.sampled_from([1, 16, 64]),
        head_dims,
        window=st.one_of(st.none(), windows),
        softcap=st.sampled_from([None, 30.0, 50.0, 2.0]),
        has_sinks=st.booleans(),
    )


HEAD_DIMS = [(192, 128), (256, 256), (512, 512), (64, 64), (64, 96), (40, 24), (8, 72)]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chunks=st.lists(chunk_extents, min_size=1, max_size=5),
    shape=layer_shapes(st.sampled_from(HEAD_DIMS)),
    growth=st.sampled_from([1.0, 20.0]),
    sink=st.sampled_from([0.0, -1000.0, -20.0, 20.0, 1000.0]),
    seed=st.integers(0, 1000),
)
def test_any_layer_matches_the_definition(
    kernels: CpuKernels,
    arithmetic: Arithmetic,
    chunks: list[ChunkExtent],
    shape: AttentionShape,
    growth: float,
    sink: float,
    seed: int,
) -> None:
    """The keys that no row sees are NaN, those in its last page and tile too."""
    problem = random_problem(chunks, replace(shape, dtype=arithmetic.dtype), seed)
    problem.query.mul_(growth)
    if problem.sinks is not None:
        problem.sinks[::2] += sink
    assert_exact(kernels, arithmetic, problem, score_error=0.0 if growth == 1.0 else 1e-4)


@every_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (20, 1)], ids=str)
def test_every_machine_computes_any_layer(
    instructions: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    shape = replace(
        attention_shape(*heads, 72, 16, dtype),
        value_dim=40,
        window=50,
        softcap=3.0,
        has_sinks=True,
    )
    chunks = [ChunkExtent(170, 1), ChunkExtent(0, 5), ChunkExtent(33, 90)]
    kernels = kernels_for(instructions)
    problem = random_problem(chunks, shape)
    problem.query.mul_(4.0)  # up to where the softcap bends
    assert_exact(kernels, kernels.best_arithmetic(dtype), problem)


def test_a_sink_far_below_the_scores_changes_no_bit_and_one_far_above_leaves_nothing(
    kernels: CpuKernels, arithmetic: Arithmetic
) -> None:
    chunks = [ChunkExtent(150, 1), ChunkExtent(0, 100)]
    problem = random_problem(chunks, attention_shape(4, 2, 64, 16, arithmetic.dtype))
    without = run(kernels, arithmetic, problem)
    with_sinks = replace(
        problem,
        shape=replace(problem.shape, has_sinks=True),
        sinks=torch.tensor([-1e4, 1e4, -torch.inf, -3e38]),
    )
    found = run(kernels, arithmetic, with_sinks)
    assert torch.equal(found[:, [0, 2, 3]], without[:, [0, 2, 3]])
    assert not found[:, 1].any()


def test_a_window_of_all_keys_changes_no_bit(kernels: CpuKernels, arithmetic: Arithmetic) -> None:
    chunks = [ChunkExtent(199, 1), ChunkExtent(0, 200), ChunkExtent(150, 50)]
    problem = random_problem(chunks, attention_shape(4, 2, 64, 16, arithmetic.dtype))
    expected = run(kernels, arithmetic, problem)
    for window in (200, 201, 2**31 - 1, 2**40):
        windowed = replace(problem, shape=replace(problem.shape, window=window))
        assert torch.equal(run(kernels, arithmetic, windowed), expected)


def attend_past_pages_of_no_number(kernels: CpuKernels) -> None:
    chunks = [ChunkExtent(700, 1), ChunkExtent(500, 90)]
    for arithmetic in filter(kernels.has, Arithmetic):
        for page_size, heads in ((1, (4, 2)), (16, (8, 8)), (64, (20, 1))):
            shape = attention_shape(*heads, 64, page_size, arithmetic.dtype)
            shape = replace(shape, window=100)
            problem = random_problem(chunks, shape)
            begins = problem.layout.page_indptr.tolist()
            for chunk, begin in zip(chunks, begins, strict=False):
                skipped = first_seen(shape, chunk.start) // page_size
                assert skipped > 0
                problem.layout.page_indices[begin : begin + skipped] = 2**31 - 1
            assert run(kernels, arithmetic, problem).isfinite().all()


@pytest.mark.multiproc
def test_pages_before_the_window_are_not_read(kernels: CpuKernels) -> None:
    """Their numbers are of no page, where a read ends the process. Decodes and a prefill, of one
    key/value head and many, in pages that begin with a tile and in tiles of many pages."""
    process = get_context("fork").Process(target=attend_past_pages_of_no_number, args=(kernels,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_sinks_are_wanted_where_the_layer_has_them(kernels: CpuKernels) -> None:
    problem = random_problem([ChunkExtent(0, 3)], attention_shape(2, 1, 64, 16, torch.float32))
    with_sinks = replace(problem.shape, has_sinks=True)
    sinks = torch.zeros(2)
    for shape, wrong in (
        (problem.shape, sinks),
        (with_sinks, None),
        (with_sinks, sinks.bfloat16()),
        (with_sinks, torch.zeros(3)),
        (with_sinks, torch.zeros(4)[::2]),
    ):
        with pytest.raises(AssertionError):
            replace(problem, sinks=wrong).attended_by(CpuAttention(shape, kernels))


def test_long_contexts_stay_exact(kernels: CpuKernels, arithmetic: Arithmetic) -> None:
    chunks = [ChunkExtent(4095, 1), ChunkExtent(3000, 5), ChunkExtent(0, 40)]
    shape = attention_shape(4, 2, 64, 16, arithmetic.dtype)
    assert_exact(kernels, arithmetic, random_problem(chunks, shape))


@pytest.mark.parametrize("growth", [3.0, 300.0])
def test_scores_far_apart_neither_overflow_nor_lose_the_largest(
    kernels: CpuKernels, arithmetic: Arithmetic, growth: float
) -> None:
    shape = attention_shape(2, 1, 64, 16, arithmetic.dtype)
    problem = random_problem([ChunkExtent(0, 100), ChunkExtent(200, 1)], shape)
    problem.query.mul_(growth)
    # Scores reach 1000, where a step of fp32 is 6e-5.
    assert_exact(kernels, arithmetic, problem, score_error=1e-3)


@pytest.mark.parametrize("step", [-0.5, 0.02, 0.5])
def test_scores_that_rise_or_fall_along_the_context_stay_exact(
    kernels: CpuKernels, arithmetic: Arithmetic, step: float
) -> None:
    """From tile to tile the maximum falls, rises a little, or far more than a weight may grow."""
    shape = attention_shape(2, 1, 64, 16, arithmetic.dtype)
    problem = random_problem([ChunkExtent(100, 200)], shape)
    problem.query[..., 0] = 8.0
    pages = problem.layout.page_indices.long()
    positions = torch.arange(pages.numel() * 16).view(-1, 16, 1)
    problem.key_pages[pages, :, :, 0] = (step * positions).to(shape.dtype)
    assert_exact(kernels, arithmetic, problem, score_error=1e-4)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chunks=st.lists(chunk_extents, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 16, 64]),
    head_dim=st.sampled_from([8, 32, 40, 64, 128, 256]),
    heads=st.sampled_from([(1, 1), (4, 1), (8, 1), (20, 1), (4, 4), (6, 3), (8, 2)]),
    coded_dtype=st.sampled_from(list(CODED_DTYPES.values())),
    seed=st.integers(0, 1000),
)
def test_codes_give_the_bits_of_the_numbers_that_they_stand_for(
    kernels: CpuKernels,
    arithmetic: Arithmetic,
    chunks: list[ChunkExtent],
    page_size: int,
    head_dim: int,
    heads: tuple[int, int],
    coded_dtype: torch.dtype,
    seed: int,
) -> None:
    shape = attention_shape(*heads, head_dim, page_size, arithmetic.dtype)
    assert_decoded_alike(kernels, arithmetic, random_problem(chunks, shape, seed), coded_dtype)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chunks=st.lists(chunk_extents, min_size=1, max_size=5),
    shape=layer_shapes(st.sampled_from([(192, 128), (64, 96), (40, 24), (128, 128)])),
    coded_dtype=st.sampled_from(list(CODED_DTYPES.values())),
    seed=st.integers(0, 1000),
)
def test_codes_of_any_layer_give_these_bits(
    kernels: CpuKernels,
    arithmetic: Arithmetic,
    chunks: list[ChunkExtent],
    shape: AttentionShape,
    coded_dtype: torch.dtype,
    seed: int,
) -> None:
    problem = random_problem(chunks, replace(shape, dtype=arithmetic.dtype), seed)
    assert_decoded_alike(kernels, arithmetic, problem, coded_dtype)


def assert_decoded_alike(
    kernels: CpuKernels, arithmetic: Arithmetic, problem: PagedProblem, coded_dtype: torch.dtype
) -> None:
    coded = coded_problem(problem, coded_dtype)
    expected = run(kernels, arithmetic, decoded_problem(coded))
    assert expected.isfinite().all()
    assert torch.equal(run(kernels, arithmetic, coded), expected)


@every_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("coded_dtype", CODED_DTYPES.values(), ids=str)
def test_every_machine_decodes_alike(
    instructions: str, coded_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """One key: its value is the answer, and all codes of numbers are seen."""
    shape = replace(attention_shape(2, 2, 128, 16, dtype), coded_dtype=coded_dtype)
    rows = encode(torch.ones(1, 16, 2, 128), coded_dtype)
    codes = torch.arange(256, dtype=torch.uint8)
    if coded_dtype == FP8:
        codes[[0x7F, 0xFF]] = 0  # a NaN is one for its neighbors too, by AMX
    rows.view(torch.uint8)[..., :128] = codes.view(2, 128)
    layout = layout_of([ChunkExtent(0, 1)], [[0]], 16)
    attention = CpuAttention(shape, kernels_for(instructions))
    attention.plan(layout)
    found = attention.attend(torch.zeros(1, 2, 128, dtype=dtype), torch.zeros_like(rows), rows)
    assert torch.equal(found, decode(rows, dtype)[0, :1])


@pytest.mark.parametrize("coded_dtype", CODED_DTYPES.values(), ids=str)
def test_codes_of_a_request_that_went_astray_harm_no_other(
    kernels: CpuKernels, arithmetic: Arithmetic, coded_dtype: torch.dtype
) -> None:
    shape = attention_shape(8, 2, 64, 16, arithmetic.dtype)
    chunks = [ChunkExtent(70, 1), ChunkExtent(0, 90), ChunkExtent(10, 1), ChunkExtent(0, 33)]
    problem = random_problem(chunks, shape)
    expected = run(kernels, arithmetic, coded_problem(problem, coded_dtype))
    begin, end = problem.layout.page_indptr[1:3].tolist()
    astray = problem.layout.page_indices[begin:end].long()
    problem.key_pages[astray] = problem.value_pages[astray] = torch.nan
    actual = run(kernels, arithmetic, coded_problem(problem, coded_dtype))
    assert actual[1:91].isnan().all()
    for rows in (slice(0, 1), slice(91, None)):
        assert torch.equal(actual[rows], expected[rows])


def test_a_strided_query_is_read_in_place(kernels: CpuKernels, arithmetic: Arithmetic) -> None:
    dtype = arithmetic.dtype
    problem = random_problem([ChunkExtent(3, 20)], attention_shape(4, 2, 32, 16, dtype))
    wide = torch.full((20, 6, 32), torch.nan, dtype=dtype)
    wide[:, :4] = problem.query
    strided = replace(problem, query=wide[:, :4])
    assert torch.equal(run(kernels, arithmetic, strided), run(kernels, arithmetic, problem))


def test_a_request_that_went_astray_harms_no_other(
    kernels: CpuKernels, arithmetic: Arithmetic
) -> None:
    """NaN in its keys and values, in prefill beside it and in the working memory after it."""
    shape = attention_shape(8, 2, 64, 16, arithmetic.dtype)
    chunks = [ChunkExtent(70, 1), ChunkExtent(0, 90), ChunkExtent(10, 1), ChunkExtent(0, 33)]
    problem = random_problem(chunks, shape)
    expected = run(kernels, arithmetic, problem)
    begin, end = problem.layout.page_indptr[1:3].tolist()
    astray = problem.layout.page_indices[begin:end].long()
    problem.key_pages[astray] = problem.value_pages[astray] = torch.nan
    actual = run(kernels, arithmetic, problem)
    assert actual[1:91].isnan().all()
    for rows in (slice(0, 1), slice(91, None)):
        assert torch.equal(actual[rows], expected[rows])


CUTS = [[1] * 150, [150], [70, 80], [1, 37, 1, 64, 47]]
CUT_WINDOWS = [None, 1, 7, 32, 64, 65, 100, 149]
CUT_HEADS = [(2, 2), (3, 1), (8, 1), (20, 1)]


@pytest.mark.parametrize(
    "heads",
    [
        *((2, 2, 64), (4, 2, 64), (3, 1, 64), (4, 1, 64), (8, 1, 64), (20, 1, 64)),
        *((4, 2, 128), (4, 2, 40)),
    ],
    ids=str,
)
@pytest.mark.parametrize("splits", CUTS, ids=len)
def test_a_row_is_bitwise_the_same_however_its_prompt_is_cut(
    kernels: CpuKernels, arithmetic: Arithmetic, splits: list[int], heads: tuple[int, int, int]
) -> None:
    shape = attention_shape(*heads, 1, arithmetic.dtype)
    assert_cut_alike(kernels, arithmetic, shape, splits)


@pytest.mark.parametrize("window", CUT_WINDOWS)
@pytest.mark.parametrize("heads", CUT_HEADS, ids=str)
def test_a_row_of_any_layer_is_bitwise_the_same_however_its_prompt_is_cut(
    kernels: CpuKernels, arithmetic: Arithmetic, heads: tuple[int, int], window: int | None
) -> None:
    """Each cut meets each window and each number of heads."""
    splits = CUTS[(CUT_HEADS.index(heads) + CUT_WINDOWS.index(window)) % len(CUTS)]
    shape = replace(
        attention_shape(*heads, 64, 1, arithmetic.dtype),
        value_dim=96,
        window=window,
        softcap=30.0,
        has_sinks=True,
    )
    assert_cut_alike(kernels, arithmetic, shape, splits)


def assert_cut_alike(
    kernels: CpuKernels, arithmetic: Arithmetic, shape: AttentionShape, splits: list[int]
) -> None:
    """One prompt of 150 tokens as one chunk, against the same prompt cut into `splits`, the other
    requests of the microbatch and the page size being different too, and NaN in keys that a cut
    sees no more."""
    whole = random_problem([ChunkExtent(0, 150)], shape)
    whole.query.mul_(4.0)  # so that maxima move
    expected = run(kernels, arithmetic, whole)
    order = whole.layout.page_indices.long()
    keys = [store[order].flatten(0, 1) for store in (whole.key_pages, whole.value_pages)]

    other = random_problem([ChunkExtent(40, 3), ChunkExtent(99, 1)], replace(shape, page_size=16))
    other_pages = other.layout.page_indices.tolist()
    num_pages = len(other.key_pages)
    own_pages = list(range(num_pages, num_pages + 10))
    pages = [
        torch.cat((store, _paged(kept, 16)))
        for store, kept in zip((other.key_pages, other.value_pages), keys, strict=True)
    ]

    start = 0
    for length in splits:
        rows = whole.query[start : start + length]
        for store in pages:
            store[num_pages:].flatten(0, 1)[: first_seen(shape, start)] = torch.nan
        layout = layout_of(
            [ChunkExtent(40, 3), ChunkExtent(start, length), ChunkExtent(99, 1)],
            [other_pages[:3], own_pages, other_pages[3:]],
            16,
        )
        query = torch.cat((other.query[:3], rows, other.query[3:]))
        mixed = run(
            kernels, arithmetic, PagedProblem(other.shape, layout, query, *pages, whole.sinks)
        )
        assert torch.equal(mixed[3 : 3 + length], expected[start : start + length])
        start += length


def _paged(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    """[tokens, Hkv, D] as pages, the rest of the last one NaN."""
    missing = -tokens.shape[0] % page_size
    filler = torch.full((missing, *tokens.shape[1:]), torch.nan, dtype=tokens.dtype)
    return torch.cat((tokens, filler)).unflatten(0, (-1, page_size))


def test_results_do_not_depend_on_the_number_of_threads(
    kernels: CpuKernels, arithmetic: Arithmetic
) -> None:
    chunks = [ChunkExtent(200, 1), ChunkExtent(70, 1), ChunkExtent(0, 290), ChunkExtent(33, 40)]
    problem = random_problem(chunks, attention_shape(8, 4, 64, 16, arithmetic.dtype))
    alone = run(kernels, arithmetic, problem)
    torch.set_num_threads(3)
    assert torch.equal(run(kernels, arithmetic, problem), alone)


def test_amx_is_the_default_where_there_is_any(kernels: CpuKernels) -> None:
    assert CpuAttention(attention_shape(2, 1, 64, 16, torch.float32), kernels).arithmetic == (
        Arithmetic.FLOAT32_VECTORS
    )
    attention = CpuAttention(attention_shape(2, 1, 64, 16, torch.bfloat16), kernels)
    assert (attention.arithmetic == Arithmetic.AMX) == kernels.has(Arithmetic.AMX)


@pytest.mark.multiproc
def test_where_the_kernel_refuses_tiles_others_do_the_work(kernels: CpuKernels) -> None:
    """Linux grants no tiles to a process with a signal stack that could not hold them."""
    if not kernels.has(Arithmetic.AMX):
        pytest.skip("this machine or compiler has no AMX")
    program = (
        "import ctypes\n"
        "class Stack(ctypes.Structure):\n"
        "    _fields_ = [('start', ctypes.c_void_p), ('flags', ctypes.c_int),\n"
        "                ('size', ctypes.c_size_t)]\n"
        "memory = ctypes.create_string_buffer(4096)\n"
        "stack = Stack(ctypes.addressof(memory), 0, len(memory))\n"
        "assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0\n"
        "import torch\n"
        "from sgl_pipeline.pp_runner.cpu_kernels.library import Arithmetic, load_cpu_kernels\n"
        "kernels = load_cpu_kernels()\n"
        "print(kernels.has(Arithmetic.AMX), kernels.best_arithmetic(torch.bfloat16).name)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    has_amx, best = done.stdout.split()
    assert has_amx == "False"
    assert best in ("DOT_PRODUCTS", "BFLOAT16_VECTORS")
