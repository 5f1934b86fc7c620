"""What is recorded of a computation, and where its intermediate results are put."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.paged_attention import ChunkExtent, PagedProblem, attention_shape, random_problem
from torch.multiprocessing.reductions import StorageWeakRef

from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.cpu_kernels.call_recording import Lifetime, record, share_memory
from sgl_pipeline.pp_runner.cpu_kernels.functions import CompiledFunctions, heard_by
from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels, load_cpu_kernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import RmsNorm

SIZE, ROWS = 32, 3
NORM = RmsNorm(torch.linspace(0.5, 2.0, SIZE), 1e-6)
NORM_OF_ALL = RmsNorm(NORM.weight.repeat(ROWS), 1e-6)
Compute = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def library() -> CpuKernels:
    return load_cpu_kernels()


@pytest.fixture(scope="module")
def kernels(library: CpuKernels) -> CompiledKernels:
    return CompiledKernels(library)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))


OTHER = rows(ROWS, seed=1)


def recorded(compute: Compute, count: int = ROWS):
    given_rows = rows(count)
    result, calls = record(lambda: compute(given_rows), (given_rows,), count)
    assert torch.equal(result, compute(given_rows))
    return calls


def test_other_rows_and_another_number_of_them(kernels: CompiledKernels) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        sums, normed = kernels.add_norm(x, kernels.norm(x, NORM), NORM)
        return kernels.add(sums, kernels.gate(torch.stack((normed, normed), 1).view(len(x), -1)))

    def of_kernels_alone(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            sums, normed = kernels.add_norm(x, kernels.norm(x, NORM), NORM)
            x = kernels.add(normed, kernels.norm(sums.view(-1, SIZE), NORM))
        return x

    assert recorded(compute) is None  # stacks
    calls = recorded(of_kernels_alone)
    assert calls is not None
    for seed, count in enumerate((3, 1, 64, 65, 500, 2)):
        x = rows(count, seed)
        for num_threads in (1, 2):
            assert torch.equal(calls.run((x,), count, 0, num_threads), of_kernels_alone(x))
    # Of nineteen results at most four live at once.
    assert calls.memory_bytes <= 4 * 512 * SIZE * 4 + 64


@pytest.mark.parametrize("outputs", [32, 64], ids=["one panel", "two panels"])
@pytest.mark.parametrize("count", [1, 2, 64])
def test_no_thread_begins_before_the_others_have_ended(
    library: CpuKernels, kernels: CompiledKernels, outputs: int, count: int
) -> None:
    """Long rows and few of them: one thread has much to do and the other nothing."""
    if not library.has_products:
        pytest.skip("neither AVX2 nor bf16 instructions")
    inputs, generator = 2**16, torch.Generator().manual_seed(2)
    weight, *steps = (
        torch.randn(size, inputs, generator=generator).bfloat16()
        for size in (outputs, count, count)
    )
    linear = kernels.linear(weight)
    long, short = (RmsNorm(torch.ones(size).bfloat16(), 1e-6) for size in (inputs, outputs))

    def compute(x: torch.Tensor) -> torch.Tensor:
        return kernels.norm(linear(kernels.norm(x, long)), short)

    _, calls = record(lambda: compute(steps[0]), (steps[0],), count)
    assert calls is not None
    expected = [compute(x) for x in steps]
    for _ in range(10):  # by turns: what a step leaves behind is not what the next one wants
        for x, own in zip(steps, expected, strict=True):
            assert torch.equal(calls.run((x,), count, 0, 2), own)


@pytest.mark.parametrize(
    ("reason", "wrong"),
    [
        ("arithmetic", lambda kernels, x: kernels.norm(x, NORM) + 1),
        ("a copy", lambda kernels, x: kernels.norm(x.clone(), NORM)),
        ("written to", lambda kernels, x: kernels.norm(x, NORM).mul_(2)),
        ("zeros", lambda kernels, x: kernels.add(x, torch.zeros_like(x))),
        ("the midst of an input", lambda kernels, x: kernels.norm(x[1:], NORM)),
        ("the midst of a result", lambda kernels, x: kernels.norm(kernels.norm(x, NORM)[1:], NORM)),
        (
            "other rows",
            lambda kernels, x: kernels.norm(x.view(1, -1), NORM_OF_ALL),
        ),
        ("no kernel", lambda kernels, x: x),
        (
            "other rows in between",
            lambda kernels, x: kernels.norm(
                kernels.norm(x.view(1, -1), NORM_OF_ALL).view(ROWS, -1),
                NORM,
            ),
        ),
        ("a result of other rows", lambda kernels, x: kernels.norm(x, NORM).view(1, -1)),
        (
            "a result in another order",
            lambda kernels, x: kernels.norm(x, NORM).view(ROWS, 4, -1).transpose(1, 2),
        ),
        ("an input as the result", lambda kernels, x: (kernels.norm(x, NORM), x)[1]),
        ("weights as the result", lambda kernels, x: (kernels.norm(x, NORM), OTHER)[1]),
    ],
)
def test_what_is_more_than_kernels_of_all_rows_is_not_recorded(
    reason: str,
    wrong: Callable[[CompiledKernels, torch.Tensor], torch.Tensor],
    kernels: CompiledKernels,
) -> None:
    assert recorded(lambda x: wrong(kernels, x)) is None, reason


@pytest.mark.parametrize("column", [0, 16])
def test_columns_of_a_single_row_are_not_the_result(kernels: CompiledKernels, column: int) -> None:
    assert recorded(lambda x: kernels.norm(x, NORM)[:, column : column + 16], 1) is None


def test_what_is_read_from_the_midst_is_not_recorded(kernels: CompiledKernels) -> None:
    """Although it has as many rows."""
    half = RmsNorm(NORM.weight[:16], 1e-6)
    more, single = rows(ROWS + 1), rows(1)
    calls = [
        record(lambda: kernels.norm(more[1:], NORM), (more,), ROWS)[1],
        record(lambda: kernels.norm(single[:, 16:], half), (single,), 1)[1],
        record(lambda: kernels.norm(kernels.norm(single, NORM)[:, 16:], half), (single,), 1)[1],
    ]
    assert calls == [None, None, None]


def test_inputs_of_one_address_are_not_recorded(kernels: CompiledKernels) -> None:
    same, none = rows(ROWS), rows(0)
    assert record(lambda: kernels.add(same, same), (same, same), ROWS)[1] is None
    assert record(lambda: kernels.add(kernels.norm(none, NORM), none), (none,), 0)[1] is None


def test_memory_that_no_kernel_gets_does_no_harm(kernels: CompiledKernels) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        torch.empty_like(x)
        return kernels.norm(kernels.norm(x, NORM), NORM)

    calls = recorded(compute)
    assert torch.equal(calls.run((rows(5),), 5, 0, 1), compute(rows(5)))


def test_recording_takes_no_more_memory_than_computing(kernels: CompiledKernels) -> None:
    """Of 1,024 rows, what one layer computes takes more memory than its weights."""
    x, count = rows(ROWS), []

    def compute(x: torch.Tensor) -> torch.Tensor:
        freed = []
        for _ in range(8):
            before = x
            x = kernels.norm(kernels.add(before, x), NORM)
            freed.append(StorageWeakRef(x.untyped_storage()))
            del before
        count.append(sum(one.expired() for one in freed))
        return x

    _, calls = record(lambda: compute(x), (x,), ROWS)
    assert count == [7]
    assert calls is not None
    for seed, length in enumerate((3, 70, 1)):
        other = rows(length, seed)
        assert torch.equal(calls.run((other,), length, 0, 1), compute(other))


def test_recorded_calls_keep_no_result(kernels: CompiledKernels) -> None:
    x = rows(ROWS)
    result, calls = record(lambda: kernels.norm(x, NORM), (x,), ROWS)
    storage = StorageWeakRef(result.untyped_storage())
    del result
    assert calls is not None and storage.expired()


def test_an_input_of_another_dtype_is_refused(kernels: CompiledKernels) -> None:
    calls = recorded(lambda x: kernels.norm(x, NORM))
    for wrong in (rows(ROWS).double(), rows(2 * ROWS)[::2]):
        with pytest.raises(AssertionError):
            calls.run((wrong,), ROWS, 0, 1)


def test_the_result_lies_in_no_memory_of_the_recording(kernels: CompiledKernels) -> None:
    calls = recorded(lambda x: kernels.norm(x, NORM))
    calls.run((rows(500),), 500, 0, 1)
    assert calls.memory_bytes <= 64


class Names:
    """A listener that keeps the names of what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hear(self, functions: CompiledFunctions, name: str, arguments: tuple[Any, ...]) -> None:
        self.heard.append(name)


def test_a_listener_hears_nothing_after_a_failure(kernels: CompiledKernels) -> None:
    names = Names()
    with pytest.raises(RuntimeError), heard_by(names):
        kernels.norm(rows(1), NORM)
        raise RuntimeError
    kernels.norm(rows(1), NORM)
    assert names.heard == ["rms_norm"]


def test_nothing_is_heard_of_calls_that_come_later(kernels: CompiledKernels) -> None:
    x = rows(ROWS)

    def fail() -> torch.Tensor:
        kernels.norm(x, NORM)
        raise RuntimeError("in the midst")

    with pytest.raises(RuntimeError, match="in the midst"):
        record(fail, (x,), ROWS)
    calls = recorded(lambda x: kernels.norm(x, NORM))
    kernels.norm(x, NORM)
    assert torch.equal(calls.run((x,), ROWS, 0, 1), kernels.norm(x, NORM))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_of_different_attention_are_made_again(
    library: CpuKernels, dtype: torch.dtype
) -> None:
    """The sinks are tensors that stay, as weights do; a layer without any passes none."""
    plain = attention_shape(4, 2, SIZE, 4, dtype)
    windowed = replace(plain, window=5, softcap=2.0)
    with_sinks = replace(plain, window=9, has_sinks=True)
    layers = [
        (CpuAttention(shape, library), sinks)
        for shape, sinks in (
            (with_sinks, torch.tensor([-1.0, 2.0, 0.0, 1.0])),
            (plain, None),
            (windowed, None),
            (with_sinks, torch.tensor([3.0, -2.0, 1.0, 0.0])),
        )
    ]
    steps = [
        random_problem(chunks, plain, seed)
        for seed, chunks in enumerate(
            (
                [ChunkExtent(20, 3)],
                [ChunkExtent(30, 1), ChunkExtent(7, 1), ChunkExtent(0, 70)],
                [ChunkExtent(2, 1)],
            )
        )
    ]
    pages = [torch.randn(40, 4, 2, SIZE).to(dtype) for _ in range(2)]

    def compute(query: torch.Tensor, layout: PagedLayout) -> torch.Tensor:
        for attention, sinks in layers:
            attention.plan(layout)
            query = attention.attend(query, *pages, sinks)
        return query

    def variables(step: PagedProblem) -> tuple[torch.Tensor, ...]:
        layout = step.layout
        indices = (layout.query_indptr, layout.page_indptr, layout.page_indices, layout.kv_lengths)
        return step.query, *indices

    first = steps[0]
    _, calls = record(lambda: compute(first.query, first.layout), variables(first), 3)
    assert calls is not None
    for step in steps:
        num_rows = step.query.shape[0]
        found = calls.run(variables(step), num_rows, step.layout.num_chunks, 1)
        assert torch.equal(found, compute(step.query, step.layout))


lifetimes = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 12), st.integers(0, 5)).map(
        lambda drawn: Lifetime(drawn[0], drawn[1], drawn[1] + drawn[2], np.array([]))
    ),
    max_size=14,
)


@given(lifetimes)
def test_results_that_live_together_share_no_memory(results: list[Lifetime]) -> None:
    placed = share_memory(results)
    assert sorted(map(id, placed)) == sorted(map(id, results))
    for one, other in combinations(placed, 2):
        if max(one.first_call, other.first_call) <= min(one.last_call, other.last_call):
            assert (
                one.begin + one.row_bytes <= other.begin
                or other.begin + other.row_bytes <= one.begin
            )


@given(lifetimes)
def test_every_place_is_the_lowest_that_was_free(results: list[Lifetime]) -> None:
    placed = share_memory(results)
    for index, one in enumerate(placed):
        before = [other for other in placed[:index] if other.meets(one)]
        for begin in range(one.begin):
            assert any(
                begin < other.begin + other.row_bytes and other.begin < begin + one.row_bytes
                for other in before
            ), "a lower place was free"
