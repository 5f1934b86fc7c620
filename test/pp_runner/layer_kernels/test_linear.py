"""Products against fp64, and the row independence that the scheduler relies on."""

import gc
import weakref

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.instruction_sets import every_instruction_set, kernels_for

from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_linear import CompiledLinear
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Linear
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.layer_kernels.torch_linear import TorchLinear, padded_row_count

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_weight(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out_features * 7919 + in_features)
    return (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(
        dtype
    )


def random_rows(num_rows: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, in_features, generator=generator).to(dtype)


def assert_product(
    linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
) -> None:
    y, tolerance = linear(x), TOLERANCE[x.dtype]
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 33])
def test_result_of_torch_is_the_product(num_rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    weight, x = random_weight(72, 40, dtype), random_rows(num_rows, 40, dtype)
    bias = random_rows(1, 72, dtype)[0] if with_bias else None
    assert_product(TorchLinear(weight, bias), weight, bias, x)


def compiled_linear(
    instructions: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> CompiledLinear:
    kernels = kernels_for(instructions)
    if not kernels.has_products:
        pytest.skip("neither AVX2 nor bf16 instructions")
    return CompiledLinear(kernels, weight, bias, is_gated=is_gated)


@pytest.mark.compiler
@every_instruction_set
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.one_of(st.integers(0, 70), st.sampled_from([600, 1100])),
    in_features=st.sampled_from([1, 2, 31, 32, 40, 100, 1024]),
    out_features=st.sampled_from([1, 15, 16, 17, 72, 300]),
    with_bias=st.booleans(),
)
def test_result_of_the_compiled_kernel_is_the_product(
    instructions: str, num_rows: int, in_features: int, out_features: int, with_bias: bool
) -> None:
    weight = random_weight(out_features, in_features, torch.bfloat16)
    bias = random_rows(1, out_features, torch.bfloat16)[0] if with_bias else None
    x = random_rows(num_rows, in_features, torch.bfloat16)
    assert_product(compiled_linear(instructions, weight, bias), weight, bias, x)


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("num_rows", [*range(1, 8), 97])
def test_sums_that_fp32_holds_are_exact(instructions: str, num_rows: int) -> None:
    """Of small integers, so that a number in another's place would show."""
    generator = torch.Generator().manual_seed(num_rows)
    weight, x = (
        torch.randint(-8, 9, (size, 600), generator=generator).bfloat16() for size in (50, num_rows)
    )
    y = compiled_linear(instructions, weight)(x)
    assert torch.equal(y, (x.double() @ weight.double().T).bfloat16())


def assert_gated(
    linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
) -> None:
    y, tolerance = linear(x), 3 * TOLERANCE[x.dtype]  # three roundings where leaves gate afterwards
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    gate, up = product.chunk(2, dim=-1)
    assert y.dtype == x.dtype
    torch.testing.assert_close(
        y.double(), gate / (1 + (-gate).exp()) * up, rtol=tolerance, atol=tolerance
    )


gated_sizes = st.sampled_from([(1, 15), (31, 16), (40, 17), (100, 72), (1024, 150)])


@pytest.mark.compiler
@every_instruction_set
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.one_of(st.integers(0, 70), st.sampled_from([600])),
    sizes=gated_sizes,
    with_bias=st.booleans(),
)
def test_the_compiled_kernel_gates_what_it_has_multiplied(
    instructions: str, num_rows: int, sizes: tuple[int, int], with_bias: bool
) -> None:
    in_features, out_features = sizes
    weight = random_weight(2 * out_features, in_features, torch.bfloat16)
    bias = random_rows(1, 2 * out_features, torch.bfloat16)[0] if with_bias else None
    x = random_rows(num_rows, in_features, torch.bfloat16)
    linear = compiled_linear(instructions, weight, bias, is_gated=True)
    assert_gated(linear, weight, bias, x)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_leaf_has_a_gated_product(with_bias: bool, dtype: torch.dtype) -> None:
    weight, x = random_weight(2 * 36, 40, dtype), random_rows(9, 40, dtype)
    bias = random_rows(1, 2 * 36, dtype)[0] if with_bias else None
    for kernels in (TorchKernels(), CompiledKernels(load_cpu_kernels())):
        assert_gated(kernels.gated_linear(weight, bias), weight, bias, x)


def assert_rows_independent(linear: Linear, x: torch.Tensor) -> None:
    whole = linear(x)
    for start, length in [(0, 1), (5, 1), (0, 2), (3, 3), (7, 4), (1, 8), (20, 31), (2, 100)]:
        part = linear(x[start : start + length])
        assert torch.equal(part, whole[start : start + length]), (start, length)


every_shape = pytest.mark.parametrize(
    "shape", [(96, 64), (64, 3072), (2048, 1024), (1000, 192)], ids=str
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_shape
def test_a_row_of_torch_is_bitwise_the_same_in_every_microbatch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """But for bf16 on a machine with AMX tiles: there oneDNN splits the sums of a large matrix by
    the number of rows, and a row may differ in its last bit."""
    linear = TorchLinear(random_weight(*shape, dtype))
    x = random_rows(130, shape[1], dtype)
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        torch.testing.assert_close(linear(x[1:9]), linear(x)[1:9], rtol=2.0**-7, atol=2.0**-7)
    else:
        assert_rows_independent(linear, x)


@pytest.mark.compiler
@every_instruction_set
@every_shape
def test_a_row_of_the_compiled_kernel_is_bitwise_the_same_in_every_microbatch(
    instructions: str, shape: tuple[int, int]
) -> None:
    linear = compiled_linear(instructions, random_weight(*shape, torch.bfloat16))
    assert_rows_independent(linear, random_rows(130, shape[1], torch.bfloat16))
    gated = compiled_linear(instructions, random_weight(*shape, torch.bfloat16), is_gated=True)
    assert_rows_independent(gated, random_rows(130, shape[1], torch.bfloat16))
    alone = linear(random_rows(700, shape[1], torch.bfloat16))
    torch.set_num_threads(3)
    assert torch.equal(linear(random_rows(700, shape[1], torch.bfloat16)), alone)


@pytest.mark.compiler
@every_instruction_set
def test_rows_too_long_for_the_cache_are_summed_in_the_same_order(instructions: str) -> None:
    """300 of them are multiplied part by part, few of them whole."""
    weight, x = random_weight(144, 6008, torch.bfloat16), random_rows(300, 6008, torch.bfloat16)
    linear = compiled_linear(instructions, weight)
    assert_product(linear, weight, None, x)
    assert_rows_independent(linear, x)
    alone = linear(x)
    torch.set_num_threads(3)
    assert torch.equal(linear(x), alone)


@pytest.mark.compiler
def test_rows_whose_sums_would_take_too_much_memory_are_multiplied_in_parts_of_them() -> None:
    """224 at once, because the sums of 300 with so many outputs would wait in more than 32 MiB."""
    weight, x = random_weight(32_800, 2640, torch.bfloat16), random_rows(300, 2640, torch.bfloat16)
    linear = compiled_linear("native", weight)
    whole = linear(x)
    for start, length in [(0, 1), (220, 9), (290, 10)]:
        assert torch.equal(linear(x[start : start + length]), whole[start : start + length])


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_result_that_goes_past_the_caches_has_the_bits_of_few_rows(
    instructions: str, is_gated: bool
) -> None:
    """300 rows of it take 1.2 MB; few rows of it stay in the caches."""
    weight = random_weight(2048 * (2 if is_gated else 1), 100, torch.bfloat16)
    bias = random_rows(1, len(weight), torch.bfloat16)[0]
    linear = compiled_linear(instructions, weight, bias, is_gated=is_gated)
    x = random_rows(300, 100, torch.bfloat16)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        whole = linear(x)
        assert torch.equal(whole, torch.cat([linear(part) for part in x.split(50)]))


@pytest.mark.compiler
def test_what_the_compiled_kernels_do_not_multiply_goes_to_torch() -> None:
    kernels = CompiledKernels(load_cpu_kernels())
    assert isinstance(kernels.linear(random_weight(8, 8, torch.float32)), TorchLinear)
    old_machine = CompiledKernels(kernels_for("without AVX"))
    assert isinstance(old_machine.linear(random_weight(8, 8, torch.bfloat16)), TorchLinear)


def test_rows_need_not_be_contiguous() -> None:
    weight = random_weight(24, 16, torch.float32)
    x = random_rows(6, 32, torch.float32)[:, :16]
    torch.testing.assert_close(TorchLinear(weight)(x), x @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leaf", ["torch", pytest.param("compiled", marks=pytest.mark.compiler)])
def test_a_packed_weight_replaces_the_plain_one(leaf: str, dtype: torch.dtype) -> None:
    kernels = TorchKernels() if leaf == "torch" else CompiledKernels(load_cpu_kernels())
    weight = random_weight(64, 64, dtype)
    alive = weakref.ref(weight.untyped_storage())
    linear = kernels.linear(weight)
    if isinstance(linear, TorchLinear) and not linear.is_packed:
        pytest.skip("oneDNN has no bf16 here")
    del weight
    gc.collect()
    assert alive() is None


def test_steps_of_all_sizes_share_few_row_counts() -> None:
    assert [padded_row_count(n) for n in (0, 1, 4, 5, 63, 64, 65, 129, 300)] == [
        *(4, 4, 4, 8, 64, 64, 68, 136, 304)
    ]
    assert len({padded_row_count(n) for n in range(2049)}) == 96
    assert all(n <= padded_row_count(n) <= n * 17 / 16 for n in range(64, 2049))
    assert all(padded_row_count(padded_row_count(n)) == padded_row_count(n) for n in range(2049))


def test_memory_does_not_grow_with_every_new_number_of_rows() -> None:
    """oneDNN keeps the kernels of each row count: 0.5 MiB and more for every matrix shape."""
    linear = TorchLinear(random_weight(512, 128, torch.float32))
    linear(random_rows(600, 128, torch.float32))
    resident_bytes = psutil.Process().memory_info().rss
    for num_rows in range(1, 601):
        linear(random_rows(num_rows, 128, torch.float32))
    grown_mib = (psutil.Process().memory_info().rss - resident_bytes) / 2**20
    assert grown_mib < 100, "one set of kernels for each of 600 row counts is above 300 MiB"
