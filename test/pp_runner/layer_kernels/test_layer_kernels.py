"""All leaves of the layer kernels against the definitions in fp64, and rows that are independent.

Tolerances: an fp32 result may be off by 1e-5 of its size. In bf16 the compiled kernels round once,
to within half a unit in the last place (2^-8 of the size); torch rounds after each operation, at
most four times here, and what it adds may cancel.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_flashinfer import FakeFlashInferFunctions
from support.instruction_sets import INSTRUCTION_SETS, kernels_for
from support.real_flashinfer import FunctionsOnEmulatedCard

from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES, FP8, encode
from sgl_pipeline.pp_runner.flashinfer.flashinfer_kernels import FlashInferKernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import (
    GateClamp,
    HeadNorms,
    LayerKernels,
    RmsNorm,
    Rotation,
)
from sgl_pipeline.pp_runner.layer_kernels.row_rounding import TorchRowRounding
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels

EPSILON = 1e-6
PAGE_SIZE = 4
COMPILED = [f"compiled {name}" for name in INSTRUCTION_SETS]
every_leaf = pytest.mark.parametrize(
    "leaf",
    [
        "torch",
        "flashinfer",
        "flashinfer's Python",
        *(pytest.param(leaf, marks=pytest.mark.compiler) for leaf in COMPILED),
    ],
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
sizes = st.sampled_from([1, 7, 16, 40, 64, 100, 128, 1000])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kernels_of(leaf: str) -> LayerKernels:
    if leaf == "torch":
        return TorchKernels()
    if leaf == "flashinfer":
        return FlashInferKernels(FakeFlashInferFunctions, TorchRowRounding)
    if leaf == "flashinfer's Python":
        return FlashInferKernels(FunctionsOnEmulatedCard, TorchRowRounding)
    return CompiledKernels(kernels_for(leaf.removeprefix("compiled ")))


def tolerance(leaf: str, dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return 1e-5
    return 2.0**-8 * (1.001 if leaf in COMPILED else 4)


def assert_near(
    leaf: str, actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, size: float = 0.0
) -> None:
    """`size`: of the numbers that were added up, where the sum may be much smaller."""
    assert actual.dtype == dtype
    allowed = tolerance(leaf, dtype)
    rounded_sums = size if leaf not in COMPILED or dtype == torch.float32 else size * 1e-5
    torch.testing.assert_close(
        actual.double(), exact, rtol=allowed, atol=allowed * rounded_sums + 1e-6
    )


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = rows.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt() * weight.double()


@every_leaf
@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(0, 20), size=sizes, dtype=dtypes, seed=st.integers(0, 1000))
def test_norm_and_add_norm(
    leaf: str, num_rows: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    kernels = kernels_of(leaf)
    stream, added = (random(seed + i, num_rows, size, dtype=dtype) for i in range(2))
    norm = RmsNorm(random(seed + 2, size, dtype=dtype), EPSILON)
    assert_near(leaf, kernels.norm(stream, norm), exact_norm(stream, norm.weight), dtype)
    ours = stream.clone()
    sums, normed = kernels.add_norm(stream, added.clone(), norm)
    assert torch.equal(stream, ours), "it was not to be written over"
    assert torch.equal(sums, stream + added)
    assert_near(leaf, normed, exact_norm(sums, norm.weight), dtype)
    overwritten = kernels.add_norm(ours, added.clone(), norm, may_overwrite=True)
    assert all(map(torch.equal, overwritten, (sums, normed)))


@every_leaf
@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(0, 20), size=sizes, dtype=dtypes, seed=st.integers(0, 1000))
def test_gate(leaf: str, num_rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    gate_up = random(seed, num_rows, 2 * size, dtype=dtype) * 10
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(leaf, kernels_of(leaf).gate(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize(
    "leaf", ["torch", *(pytest.param(leaf, marks=pytest.mark.compiler) for leaf in COMPILED)]
)
@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(0, 20), size=sizes, dtype=dtypes, seed=st.integers(0, 1000))
def test_clamped_gate(leaf: str, num_rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    dtype = torch.float32 if leaf == "torch" else dtype  # its six roundings of bf16 may add up
    gate_up = random(seed, num_rows, 2 * size, dtype=dtype) * 10
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    exact = (up + 1) * gate / (1 + (-1.702 * gate).exp())
    gated = kernels_of(leaf).clamped_gate(gate_up, GateClamp(1.702, 7.0))
    assert_near(leaf, gated, exact, dtype)
    no_number = kernels_of(leaf).clamped_gate(
        torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]]), GateClamp(1.702, 7.0)
    )
    assert no_number.isnan().all()


@every_leaf
def test_a_gate_that_is_far_from_zero_or_no_number(leaf: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, torch.inf, torch.nan])
    gated = kernels_of(leaf).gate(torch.cat((gate, torch.ones(8)))[None])[0]
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 90.0, 1e30, torch.inf, torch.nan])
    torch.testing.assert_close(gated, expected, equal_nan=True)


class Problem(NamedTuple):
    """Arguments of `place_heads`, and the sizes that they were made from."""

    qkv: torch.Tensor
    norms: HeadNorms | None
    rotation: Rotation
    slots: torch.Tensor
    pages: tuple[torch.Tensor, torch.Tensor]

    def rows(self, start: int, end: int) -> "Problem":
        """The same pages, but some of the rows."""
        cosine, sine, interleaved = self.rotation
        rotation = Rotation(cosine[start:end], sine[start:end], interleaved)
        return Problem(self.qkv[start:end], self.norms, rotation, self.slots[start:end], self.pages)


def heads_problem(
    num_rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    interleaved: bool,
    has_norms: bool,
    dtype: torch.dtype,
    seed: int = 0,
) -> Problem:
    """With pages that hold 7 everywhere."""
    (num_query_heads, num_kv_heads), (head_dim, rotated) = heads, dims
    width = (num_query_heads + 2 * num_kv_heads) * head_dim
    angles = random(seed + 1, num_rows, rotated // 2, dtype=torch.float32) * 5
    num_pages = num_rows // PAGE_SIZE + 2
    generator = torch.Generator().manual_seed(seed)
    norms = [random(seed + i, head_dim, dtype=dtype) for i in (2, 3)]
    page_shape = (num_pages, PAGE_SIZE, num_kv_heads, head_dim)
    return Problem(
        random(seed, num_rows, width, dtype=dtype),
        HeadNorms(norms[0], norms[1], EPSILON) if has_norms else None,
        Rotation(angles.cos(), angles.sin(), interleaved),
        torch.randperm(num_pages * PAGE_SIZE, generator=generator)[:num_rows],
        (torch.full(page_shape, 7.0, dtype=dtype), torch.full(page_shape, 7.0, dtype=dtype)),
    )


def exact_rotation(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Pair by pair, as complex numbers."""
    cosine, sine, interleaved = rotation
    pairs = cosine.shape[1]
    turned = heads.clone()
    for pair in range(pairs):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
        turn = torch.complex(cosine[:, pair].double(), sine[:, pair].double())[:, None]
        result = torch.complex(heads[..., first], heads[..., second]) * turn
        turned[..., first], turned[..., second] = result.real, result.imag
    return turned


def assert_placed(leaf: str, problem: Problem, query: torch.Tensor) -> None:
    """The queries, what the slots hold now, and that the rest of the pages holds what it did."""
    qkv, norms, rotation, slots, pages = problem
    num_kv_heads, head_dim = pages[0].shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim)).double()
    exact_query, exact_key, value = heads.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
    if norms is not None:
        exact_query = exact_norm(exact_query, norms.query)
        exact_key = exact_norm(exact_key, norms.key)
    kept = [store.flatten(0, 1) for store in pages]
    for actual, exact in ((query, exact_query), (kept[0][slots], exact_key)):
        size = float(exact.abs().max()) if exact.numel() else 0.0
        assert_near(leaf, actual, exact_rotation(exact, rotation), qkv.dtype, size)
    assert torch.equal(kept[1][slots].double(), value)
    others = torch.ones(len(kept[0]), dtype=torch.bool)
    others[slots] = False
    assert all((store[others] == 7).all() for store in kept)


@every_leaf
@settings(max_examples=50, deadline=None)
@given(
    num_rows=st.integers(0, 20),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 1)]),
    dims=st.sampled_from([(8, 8), (8, 4), (40, 20), (64, 64), (64, 32), (80, 80), (128, 128)]),
    interleaved=st.booleans(),
    has_norms=st.booleans(),
    dtype=dtypes,
    seed=st.integers(0, 1000),
)
def test_place_heads(
    leaf: str,
    num_rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    interleaved: bool,
    has_norms: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    problem = heads_problem(num_rows, heads, dims, interleaved, has_norms, dtype, seed)
    assert_placed(leaf, problem, kernels_of(leaf).place_heads(*problem))


@pytest.mark.parametrize(
    "leaf", ["torch", *(pytest.param(leaf, marks=pytest.mark.compiler) for leaf in COMPILED)]
)
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(0, 20),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    dims=st.sampled_from([(8, 8), (40, 20), (64, 64), (80, 80), (128, 128)]),
    dtype=dtypes,
    coded_dtype=st.sampled_from(list(CODED_DTYPES.values())),
    size=st.sampled_from([0.0, 1e-40, 1e-3, 1.0, 30.0, 1e5]),
    seed=st.integers(0, 1000),
)
def test_pages_of_codes_hold_those_of_the_placed_heads(
    leaf: str,
    num_rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    coded_dtype: torch.dtype,
    size: float,
    seed: int,
) -> None:
    """Bit for bit those of the definition, whatever the size of the numbers; no other slot is
    written to."""
    kernels = kernels_of(leaf)
    problem = heads_problem(num_rows, heads, dims, False, False, dtype, seed)
    problem = problem._replace(qkv=problem.qkv * size)
    codes = [encode(store, coded_dtype) for store in problem.pages]
    query = kernels.place_heads(*problem._replace(pages=(codes[0], codes[1])))
    assert torch.equal(query, kernels.place_heads(*problem))
    for store, found in zip(problem.pages, codes, strict=True):
        expected = encode(store, coded_dtype)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("leaf", ["flashinfer", "flashinfer's Python"])
def test_flashinfers_append_is_given_the_codes_of_e4m3_pages(leaf: str) -> None:
    """It reads keys and values as if they had the dtype of the pages, without a check."""
    kernels = kernels_of(leaf)
    problem = heads_problem(9, (4, 2), (64, 64), False, True, torch.bfloat16)
    problem = problem._replace(qkv=problem.qkv * 100)  # some values beyond the largest code
    codes = [encode(store, FP8) for store in problem.pages]
    query = kernels.place_heads(*problem._replace(pages=(codes[0], codes[1])))
    assert torch.equal(query, kernels.place_heads(*problem))
    for store, found in zip(problem.pages, codes, strict=True):
        assert torch.equal(found.view(torch.uint8), encode(store, FP8).view(torch.uint8))


@every_leaf
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_in_every_microbatch(
    leaf: str, dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    kernels = kernels_of(leaf)
    stream, added = (random(i, 70, 1000, dtype=dtype) for i in range(2))
    norm = RmsNorm(random(2, 1000, dtype=dtype), EPSILON)
    problem = heads_problem(70, (4, 2), (64, 64), False, True, dtype)
    query = kernels.place_heads(*problem)
    placed = [store.clone() for store in problem.pages]
    normed, gated = kernels.add_norm(stream, added.clone(), norm)[1], kernels.gate(stream)
    torch.set_num_threads(1)
    for start, end in [(0, 1), (3, 4), (5, 20), (20, 69)]:
        rows = slice(start, end)
        found = kernels.add_norm(stream[rows], added[rows].clone(), norm)[1]
        assert torch.equal(found, normed[rows])
        assert torch.equal(kernels.gate(stream[rows]), gated[rows])
        assert torch.equal(kernels.place_heads(*problem.rows(start, end)), query[rows])
    assert all(map(torch.equal, problem.pages, placed))


@pytest.mark.compiler
def test_in_bf16_the_compiled_kernels_are_nearer_to_the_truth_than_torch() -> None:
    """Mean square errors: one rounding each, where torch has two or more."""
    compiled, plain = kernels_of("compiled native"), kernels_of("torch")
    gate_up = random(0, 50, 512, dtype=torch.bfloat16)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact_gated = gate / (1 + (-gate).exp()) * up
    problem = heads_problem(50, (4, 2), (64, 64), False, True, torch.bfloat16)
    assert problem.norms is not None
    heads = problem.qkv[:, :256].double().unflatten(1, (4, 64))
    exact_query = exact_rotation(exact_norm(heads, problem.norms.query), problem.rotation)
    for exact, run in (
        (exact_gated, lambda kernels: kernels.gate(gate_up)),
        (exact_query, lambda kernels: kernels.place_heads(*problem)),
    ):
        ours, theirs = ((run(k).double() - exact).square().mean() for k in (compiled, plain))
        assert ours < 0.7 * theirs


def test_flashinfer_is_told_of_a_step_once_and_of_the_next_anew() -> None:
    library = FakeFlashInferFunctions()
    kernels = FlashInferKernels(lambda: library)
    first, second = (
        heads_problem(5, (4, 2), (64, 64), False, True, torch.bfloat16, seed) for seed in (0, 9)
    )
    for problem in (first, first, second):
        assert_placed("flashinfer", problem, kernels.place_heads(*problem))
    tables = [id(table) for table in library.cos_sin_tables]
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "dims", "interleaved", "has_norms"),
    [
        ((16, 8), (128, 128), False, True),
        ((32, 8), (128, 128), False, False),
        ((40, 8), (128, 128), False, True),
        ((4, 2), (64, 64), False, False),
        ((32, 2), (128, 64), True, False),
    ],
)
def test_flashinfer_against_the_definitions_on_a_gpu(
    heads: tuple[int, int],
    dims: tuple[int, int],
    interleaved: bool,
    has_norms: bool,
    dtype: torch.dtype,
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    pytest.importorskip("flashinfer")
    cuda = torch.device("cuda")
    kernels = FlashInferKernels()
    for num_rows in (1, 17, 300):
        problem = heads_problem(num_rows, heads, dims, interleaved, has_norms, dtype)
        on_gpu = Problem(
            problem.qkv.to(cuda),
            None
            if problem.norms is None
            else HeadNorms(problem.norms.query.to(cuda), problem.norms.key.to(cuda), EPSILON),
            Rotation(problem.rotation.cosine.to(cuda), problem.rotation.sine.to(cuda), interleaved),
            problem.slots.to(cuda),
            (problem.pages[0].to(cuda), problem.pages[1].to(cuda)),
        )
        query = kernels.place_heads(*on_gpu).cpu()
        for store, found in zip(problem.pages, on_gpu.pages, strict=True):
            store.copy_(found)
        assert_placed("flashinfer", problem, query)
        stream, added = (random(i, num_rows, 4096, dtype=dtype) for i in range(2))
        norm = RmsNorm(random(2, 4096, dtype=dtype), EPSILON)
        norm_there = RmsNorm(norm.weight.to(cuda), EPSILON)
        on_card = stream.to(cuda)
        sums, normed = kernels.add_norm(on_card, added.to(cuda), norm_there)
        assert torch.equal(on_card.cpu(), stream)
        overwritten = kernels.add_norm(on_card, added.to(cuda), norm_there, may_overwrite=True)
        assert all(map(torch.equal, overwritten, (sums, normed)))
        assert torch.equal(sums.cpu(), stream + added)
        assert_near("flashinfer", normed.cpu(), exact_norm(sums.cpu(), norm.weight), dtype)
        gate, up = stream.double().chunk(2, dim=-1)
        gated = kernels.gate(stream.to(cuda)).cpu()
        assert_near("flashinfer", gated, gate / (1 + (-gate).exp()) * up, dtype)
