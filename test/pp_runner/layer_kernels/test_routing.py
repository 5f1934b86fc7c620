"""All leaves' routers against fp64, and rows that are independent."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.instruction_sets import INSTRUCTION_SETS, kernels_for

from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, Routing
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels

every_leaf = pytest.mark.parametrize(
    "leaf",
    ["torch", *(pytest.param(name, marks=pytest.mark.compiler) for name in INSTRUCTION_SETS)],
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


class RouterCase(NamedTuple):
    weight: torch.Tensor
    x: torch.Tensor


class Rule(NamedTuple):
    num_experts: int
    experts_per_token: int
    normalized: bool


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def kernels_of(leaf: str) -> LayerKernels:
    return TorchKernels() if leaf == "torch" else CompiledKernels(kernels_for(leaf))


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(
    rule: Rule, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares [T, E] of all experts, and the shared expert's weight, in fp64."""
    logits = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return logits[:, : rule.num_experts].softmax(dim=1), logits[:, rule.num_experts :].sigmoid()


@every_leaf
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(0, 11),
    size=st.sampled_from([1, 7, 16, 40, 100, 515]),
    num_experts=st.sampled_from([1, 3, 8, 13, 32, 128]),
    most=st.integers(1, 8),
    normalized=st.booleans(),
    shared=st.booleans(),
    has_bias=st.booleans(),
    dtype=dtypes,
    seed=st.integers(0, 1000),
)
def test_the_best_experts_and_their_weights(
    leaf: str,
    num_rows: int,
    size: int,
    num_experts: int,
    most: int,
    normalized: bool,
    shared: bool,
    has_bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    rule = Rule(num_experts, min(most, num_experts), normalized)
    outputs = num_experts + shared
    weight = (random(seed, outputs, size) * 2 / size**0.5).to(dtype)
    bias = random(seed + 1, outputs).to(dtype) if has_bias else None
    x = random(seed + 2, num_rows, size).to(dtype)
    routing = kernels_of(leaf).router(rule, weight, bias)(x)
    shares, shared_weight = exact(rule, weight, bias, x)
    assert routing.experts.dtype == torch.int64
    assert all(len(set(row)) == rule.experts_per_token for row in routing.experts.tolist())
    # Two experts may be nearer to each other than fp32 tells.
    best = shares.sort(descending=True).values[:, : rule.experts_per_token]
    chosen = shares.gather(1, routing.experts)
    torch.testing.assert_close(chosen, best, rtol=1e-4, atol=0)
    expected = chosen / chosen.sum(dim=1, keepdim=True) if normalized else chosen
    for found, wanted in ((routing.weights, expected), (routing.shared_weight, shared_weight)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-30)


@every_leaf
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_in_every_microbatch(leaf: str, dtype: torch.dtype) -> None:
    weight, x = random(1, 33, 200).to(dtype), random(2, 23, 200).to(dtype)
    router = kernels_of(leaf).router(Rule(32, 4, True), weight, None)

    def parts(start: int, end: int) -> Routing:
        return router(x[start:end])

    whole = parts(0, 23)
    for start, end in [(0, 1), (22, 23), (3, 5), (1, 8), (4, 8), (2, 23)]:
        for part, all_rows in zip(parts(start, end), whole, strict=True):
            assert torch.equal(part, all_rows[start:end]), (start, end)


@every_leaf
def test_rows_that_are_no_numbers_go_to_different_experts(leaf: str) -> None:
    """Whoever computes with them reads within the weights, and their results are NaN."""
    x = torch.full((5, 16), torch.nan)
    x[1] = 1.0
    routing = kernels_of(leaf).router(Rule(8, 3, False), random(3, 8, 16), None)(x)
    for row in routing.experts.tolist():
        assert len(set(row)) == 3 and set(row) <= set(range(8))
    assert routing.weights.isnan().all(dim=1).tolist() == [True, False, True, True, True]


def without_a_number(num_rows: int, num_experts: int, row: int, expert: int) -> RouterCase:
    """In one row the logit of one expert is a product of zero and infinity."""
    weight, x = random(4, num_experts, 40), random(5, num_rows, 40)
    weight[:, 0], x[:, 0] = 0, -1
    weight[expert, 0], x[row, 0] = torch.inf, 0
    return RouterCase(weight, x)


@every_leaf
@pytest.mark.parametrize("expert", [1, 5, 12])
@pytest.mark.parametrize("row", [0, 2, 4])
def test_one_logit_that_is_no_number_spoils_its_row_alone(leaf: str, row: int, expert: int) -> None:
    case = without_a_number(6, 13, row, expert)
    logits = case.x @ case.weight.T
    assert logits.isnan().nonzero().tolist() == [[row, expert]]
    routing = kernels_of(leaf).router(Rule(13, 4, False), case.weight, None)(case.x)
    assert routing.weights.isnan().all(dim=1).nonzero().tolist() == [[row]]
    assert routing.weights.isnan().any(dim=1).nonzero().tolist() == [[row]]
    for chosen in routing.experts.tolist():
        assert len(set(chosen)) == 4 and set(chosen) <= set(range(13))


@pytest.mark.compiler
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_of_equal_experts_the_first_are_chosen(instructions: str) -> None:
    weight = torch.zeros(20, 16)
    weight[[3, 9, 17]] = 1.0
    weight[[6, 14]] = 2.0
    x = torch.ones(5, 16)  # a group of four rows, and a lone one
    router = kernels_of(instructions).router(Rule(20, 8, True), weight, None)
    assert router(x).experts.tolist() == 5 * [[6, 14, 3, 9, 17, 0, 1, 2]]
    assert router(-x).experts.tolist() == 5 * [[0, 1, 2, 4, 5, 7, 8, 10]]


@every_leaf
@pytest.mark.parametrize("num_rows", [5, 8, 23])
def test_threads_share_the_rows(leaf: str, num_rows: int, two_threads: None) -> None:
    """In groups of four, of which the last may have fewer."""
    weight, x = random(6, 33, 200), random(7, num_rows, 200)
    router = kernels_of(leaf).router(Rule(32, 4, True), weight, None)
    shared = router(x)
    torch.set_num_threads(1)
    for found, expected in zip(shared, router(x), strict=True):
        assert torch.equal(found, expected)
