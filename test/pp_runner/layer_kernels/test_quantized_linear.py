"""Products with quantized weights: plain torch against the formats' definitions in fp64, the
compiled ones against plain torch, and rows that are independent."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.instruction_sets import every_instruction_set, kernels_for

from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_quantized import CompiledExpandedLinear
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import GatedLinear, Linear
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.layer_kernels.torch_quantized import (
    TorchQuantizedLinear,
    expand_rows,
    round_rows_to_fp8,
    round_rows_to_int8,
)
from sgl_pipeline.pp_runner.weights.quantized_weights import (
    E2M1,
    FP8,
    MXFP4_SCALES,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
    pack_halves,
)
from sgl_pipeline.pp_runner.weights.rounding import to_fp8, to_int4, to_int8, to_mxfp4

KINDS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "int8": to_int8,
    "int4 of 32": lambda matrix: with_zeros(to_int4(matrix, 32)),
    "int4 of 96, ordered": lambda matrix: with_order(to_int4(matrix, 96)),
    "int4 of a row": lambda matrix: to_int4(matrix, matrix.shape[1]),
    "int4 of 32, int8 rows": lambda matrix: for_int8_rows(with_zeros(to_int4(matrix, 32))),
    "int4 of 96, ordered, int8 rows": lambda matrix: for_int8_rows(with_order(to_int4(matrix, 96))),
    "int4 of a row, int8 rows": lambda matrix: for_int8_rows(to_int4(matrix, matrix.shape[1])),
    "fp8": lambda matrix: to_fp8(matrix, matrix.shape[1]),
    "fp8 of 64": lambda matrix: to_fp8(matrix, 64),
    "fp8 of 128": lambda matrix: to_fp8(matrix, 128),
    "mxfp4": to_mxfp4,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_zeros(weight: Int4Weight) -> Int4Weight:
    """The same with zero points of every size."""
    generator = torch.Generator().manual_seed(0)
    zeros = torch.randint(0, 16, weight.zeros.shape, generator=generator, dtype=torch.uint8)
    return replace(weight, zeros=zeros)


def with_order(weight: Int4Weight) -> Int4Weight:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    return replace(weight, order=order)


def for_int8_rows(weight: Int4Weight) -> Int4Weight:
    return replace(weight, rounds_rows=True)


def rounds_to_int8(weight: QuantizedWeight) -> bool:
    return isinstance(weight, Int8Weight) or (isinstance(weight, Int4Weight) and weight.rounds_rows)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantized(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    return KINDS[kind](random(outputs * 7919 + inputs, outputs, inputs))


def test_rows_are_rounded_to_the_nearest_eight_bits():
    x = torch.tensor([[0.0, 0.0, 0.0], [127.0, -2.5, 3.5], [-254.0, 1.0, 100.0]])
    values, scales = round_rows_to_int8(x)
    assert values.tolist() == [[0, 0, 0], [127, -2, 4], [-127, 0, 50]]
    assert scales.tolist() == [0.0, 1.0, 2.0]
    # 17 and 19 lie between 16, 18 and 20; 2^-8 is a multiple of the least number, 2^-9
    x = torch.tensor([[448.0, 17.0, 19.0, 2.0**-8, 1e-4, -896.0, 34.0, 1.0]])
    assert expand_rows(*round_rows_to_fp8(x, 5), 5).tolist() == [
        [448.0, 16.0, 20.0, 2.0**-8, 0.0, -896.0, 32.0, 1.0]
    ]


def exact(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    """The product's definition, in fp64."""
    matrix = weight.dequantized().double()
    if rounds_to_int8(weight):
        values, scales = round_rows_to_int8(x)
        return values.double() * scales[:, None].double() @ matrix.T
    if isinstance(weight, Fp8Weight):
        rows = expand_rows(*round_rows_to_fp8(x, weight.group_size), weight.group_size)
        return rows.double() @ matrix.T
    return x.double() @ matrix.T


@every_kind
def test_plain_torch_multiplies_what_the_numbers_stand_for(kind):
    weight, x, bias = quantized(kind, 40, 192), random(1, 7, 192), random(2, 40)
    y = TorchQuantizedLinear(weight, bias)(x)
    torch.testing.assert_close(
        y.double(), exact(weight, x) + bias.double(), rtol=2.0**-8, atol=2.0**-8
    )


def compiled(instructions: str, weight: QuantizedWeight, bias=None, *, is_gated=False) -> Linear:
    kernels = CompiledKernels(kernels_for(instructions))
    make = kernels.gated_linear if is_gated else kernels.linear
    linear = make(weight, bias)
    if isinstance(linear, TorchQuantizedLinear | GatedLinear):
        pytest.skip("no instructions for it")
    return linear


@pytest.mark.compiler
@every_instruction_set
@every_kind
@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.one_of(st.integers(0, 70), st.just(300)),
    in_features=st.sampled_from([96, 192, 672, 1056]),
    out_features=st.sampled_from([1, 15, 16, 17, 72]),
    with_bias=st.booleans(),
)
def test_the_compiled_product_is_that_of_plain_torch(
    instructions, kind, num_rows, in_features, out_features, with_bias
):
    weight = quantized(kind, out_features, in_features)
    bias = random(3, out_features) if with_bias else None
    x = random(num_rows, num_rows, in_features)
    y, expected = compiled(instructions, weight, bias)(x), TorchQuantizedLinear(weight, bias)(x)
    if kind == "int8":
        assert torch.equal(y, expected)
    torch.testing.assert_close(y, expected, rtol=2.0**-7, atol=1e-3)


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("num_rows", [1, 6, 7, 70, 300])
@pytest.mark.parametrize("group_size", [32, 96, 288])
def test_groups_of_four_bits_are_added_up_in_order(instructions, group_size, num_rows):
    """The bits of every instruction set, computed from exact sums of groups."""
    weight = for_int8_rows(with_zeros(to_int4(random(11, 40, 576), group_size)))
    x, bias = random(12, num_rows, 576), random(13, 40)
    values, row_scales = round_rows_to_int8(x)
    numbers = weight.numbers - weight.zeros.repeat_interleave(group_size, dim=1).double()
    sums = torch.zeros(num_rows, 40)
    for group, scales in enumerate(weight.scales.unbind(1)):
        places = slice(group * group_size, (group + 1) * group_size)
        exact_sums = values[:, places].double() @ numbers[:, places].T
        sums = (exact_sums * scales.double() + sums.double()).float()
    expected = (sums * row_scales[:, None] + bias.float()).bfloat16()
    assert torch.equal(compiled(instructions, weight, bias)(x), expected)


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_numbers_are_summed_exactly(instructions, sign, num_rows):
    """All of one sign, so that no sum on the way has room for more."""
    x = torch.full((num_rows, 1024), sign).bfloat16()
    for number in (-128, 127):
        values = torch.full((16, 1024), number, dtype=torch.int8)
        weight: QuantizedWeight = Int8Weight(values, torch.full((16,), 2.0**-10), torch.bfloat16)
        y = compiled(instructions, weight)(x)
        assert torch.equal(y, torch.full((num_rows, 16), sign * number).bfloat16())
    numbers = torch.full((16, 1024), 15)
    for zero in (0, 15):
        weight = Int4Weight(
            pack_halves(numbers),
            torch.full((16, 2), 2.0**-10),
            torch.full((16, 2), zero, dtype=torch.uint8),
            512,
            None,
            torch.bfloat16,
            rounds_rows=True,
        )
        y = compiled(instructions, weight)(x)
        assert torch.equal(y, torch.full((num_rows, 16), sign * (15 - zero)).bfloat16())


@pytest.mark.compiler
@every_instruction_set
@every_kind
def test_rows_too_long_for_the_cache_are_summed_in_the_same_order(instructions, kind):
    """300 of them are multiplied part by part, few of them whole."""
    linear = compiled(instructions, quantized(kind, 40, 12288))
    x = random(5, 300, 12288)
    whole = linear(x)
    for start, length in [(0, 1), (5, 8), (250, 31)]:
        assert torch.equal(linear(x[start : start + length]), whole[start : start + length])


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("in_features", [1, 3, 33, 63, 65, 100])
@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8 of 64"])
def test_eight_bits_of_any_number_of_inputs(instructions, kind, in_features):
    weight, x = quantized(kind, 19, in_features), random(4, 5, in_features)
    y = compiled(instructions, weight)(x)
    torch.testing.assert_close(y, TorchQuantizedLinear(weight)(x), rtol=2.0**-7, atol=1e-3)


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("in_features", [8, 40, 72, 104])
@pytest.mark.parametrize("kind", ["int4 of a row", "int4 of a row, int8 rows"])
def test_four_bits_of_any_number_of_inputs(instructions, kind, in_features):
    """Where a scale is for all of them."""
    weight, x = quantized(kind, 19, in_features), random(4, 5, in_features)
    y = compiled(instructions, weight)(x)
    torch.testing.assert_close(y, TorchQuantizedLinear(weight)(x), rtol=2.0**-7, atol=1e-3)


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("rounds_rows", [False, True])
@pytest.mark.parametrize("num_rows", [3, 40])
def test_groups_too_long_to_be_computed_at_once(instructions, num_rows, rounds_rows):
    weight = with_zeros(to_int4(random(9, 24, 4096), 2048))
    weight, x = replace(weight, rounds_rows=rounds_rows), random(10, num_rows, 4096)
    y = compiled(instructions, weight)(x)
    torch.testing.assert_close(y, TorchQuantizedLinear(weight)(x), rtol=2.0**-7, atol=1e-2)


@pytest.mark.compiler
@every_instruction_set
def test_groups_are_as_long_as_the_library_takes_them(instructions, monkeypatch):
    """A longer one would never be multiplied."""
    kernels = kernels_for(instructions)
    if not kernels.has_products:
        pytest.skip("neither AVX2 nor bf16 instructions")
    calls = []
    monkeypatch.setattr(kernels, "expanded_product", lambda **call: calls.append(call))
    for most in (kernels.most_expanded_tiles, 2):
        monkeypatch.setattr(kernels, "most_expanded_tiles", most)
        CompiledExpandedLinear(kernels, quantized("fp8", 16, 2048))(random(1, 1, 2048))
        assert calls.pop()["group_tiles"] == most


@pytest.mark.compiler
@every_instruction_set
@every_kind
@pytest.mark.parametrize("inner", [15, 16, 40])
def test_the_compiled_product_gates(instructions, kind, inner):
    weight, x, bias = quantized(kind, 2 * inner, 192), random(5, 9, 192), random(6, 2 * inner)
    gate, up = (exact(weight, x) + bias.double()).chunk(2, dim=1)
    expected = gate / (1 + (-gate).exp()) * up
    for kernels in (CompiledKernels(kernels_for(instructions)), TorchKernels()):
        y = kernels.gated_linear(weight, bias)(x).double()
        torch.testing.assert_close(y, expected, rtol=2.0**-6, atol=2.0**-3)


@pytest.mark.compiler
@every_instruction_set
def test_every_fp8_number_is_exact(instructions):
    """Each times one, also those below the least normal number, which bf16 products take for 0."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[numbers & 0x7F != 0x7F].view(FP8)
    weight = Fp8Weight(numbers[:, None], torch.ones(len(numbers), 1), 1, torch.bfloat16)
    y = compiled(instructions, weight)(torch.tensor([[448.0]]).bfloat16())
    assert torch.equal(y[0], (numbers.float() * 448).bfloat16())


@pytest.mark.compiler
@every_instruction_set
def test_every_four_bit_number_and_zero_point_is_exact(instructions):
    numbers, zeros = torch.cartesian_prod(torch.arange(16), torch.arange(16)).unbind(1)
    weight = Int4Weight(
        pack_halves(numbers[:, None].expand(256, 32)),
        torch.ones(256, 1),
        zeros[:, None].to(torch.uint8),
        32,
        None,
        torch.bfloat16,
    )
    x = torch.zeros(1, 32).bfloat16()
    x[0, 5] = 1.0
    assert torch.equal(compiled(instructions, weight)(x)[0], (numbers - zeros).bfloat16())


@pytest.mark.compiler
@every_instruction_set
def test_every_mxfp4_number_is_exact_with_every_scale(instructions):
    codes, scales = torch.cartesian_prod(torch.arange(16), torch.tensor(MXFP4_SCALES)).unbind(1)
    packed = pack_halves(codes[:, None].expand(len(codes), 32))
    weight = Mxfp4Weight(packed, scales[:, None].to(torch.uint8), torch.bfloat16)
    x = torch.zeros(1, 32).bfloat16()
    x[0, 5] = 1.0
    meant = torch.tensor(E2M1)[codes].double() * 2.0 ** (scales - 127).double()
    assert torch.equal(weight.dequantized().double(), meant[:, None].expand(-1, 32))
    assert torch.equal(compiled(instructions, weight)(x)[0].double(), meant)


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("num_rows", [*range(1, 8), 97])
def test_sums_of_mxfp4_that_fp32_holds_are_exact(instructions, num_rows):
    """The numbers are halves of small integers: one in another's place, or a scale, would show."""
    generator = torch.Generator().manual_seed(num_rows)
    codes = torch.randint(0, 16, (50, 608), generator=generator)
    scales = torch.randint(126, 130, (50, 19), generator=generator, dtype=torch.uint8)
    weight = Mxfp4Weight(pack_halves(codes), scales, torch.bfloat16)
    x = torch.randint(-8, 9, (num_rows, 608), generator=generator).bfloat16()
    assert torch.equal(compiled(instructions, weight)(x), exact(weight, x).bfloat16())


def in_integers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as MXFP4's products without bf16 instructions have them: integers [T, G, 32] and their
    units [T, G, 1], in fp64."""
    groups = x.double().unflatten(1, (-1, 32))
    _, exponents = groups.abs().amax(dim=2, keepdim=True).frexp()
    units = 2.0 ** (exponents - 14).clamp(min=-126).double()
    return (groups / units).round(), units


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("num_rows", [1, 3, 4, 6, 7, 70, 300])
def test_without_bf16_instructions_groups_of_mxfp4_are_sums_of_integers(instructions, num_rows):
    """The bits of every number of rows, computed from exact sums of groups."""
    if kernels_for(instructions).has_bf16_instructions:
        pytest.skip("a product of bf16")
    generator = torch.Generator().manual_seed(num_rows)
    exponents = torch.randint(-20, 20, (num_rows, 608), generator=generator)
    x = (random(12, num_rows, 608).double() * 2.0**exponents).bfloat16()
    x[0, :32], x[-1, 64:96] = 0.0, 2.0**-130
    codes = torch.randint(0, 16, (50, 608), generator=generator)
    scales = torch.randint(120, 130, (50, 19), generator=generator, dtype=torch.uint8)
    weight, bias = Mxfp4Weight(pack_halves(codes), scales, torch.bfloat16), random(13, 50)
    numbers = torch.tensor(E2M1)[codes].double().unflatten(1, (-1, 32))
    integers, units = in_integers(x)
    assert integers.abs().max() < 2**14
    sums = torch.zeros(num_rows, 50)
    for group in range(19):
        exact_sums = (integers[:, group] @ numbers[:, group].T) * units[:, group]
        powers = 2.0 ** (scales[:, group].double() - 127)
        sums = (exact_sums * powers + sums.double()).float()
    assert torch.equal(compiled(instructions, weight, bias)(x), (sums + bias.float()).bfloat16())


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_shows_in_its_row_alone(instructions, number, num_rows):
    linear, x = compiled(instructions, quantized("mxfp4", 40, 192)), random(14, num_rows, 192)
    finite = linear(x)
    x[0, 100] = number
    y = linear(x)
    assert not y[0].isfinite().any() and torch.equal(y[1:], finite[1:]) and finite.isfinite().all()


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("num_rows", [*range(1, 8), 97])
@pytest.mark.parametrize("group_size", [32, 96, 192, 576])
def test_sums_of_four_bits_that_fp32_holds_are_exact(instructions, group_size, num_rows):
    """So they are with groups of several scales and zero points."""
    generator = torch.Generator().manual_seed(num_rows)
    groups = (50, 576 // group_size)
    numbers = torch.randint(0, 16, (50, 576), generator=generator)
    scales = 2.0 ** torch.randint(-1, 3, groups, generator=generator)
    zeros = torch.randint(0, 16, groups, generator=generator, dtype=torch.uint8)
    weight = Int4Weight(pack_halves(numbers), scales, zeros, group_size, None, torch.bfloat16)
    x = torch.randint(-8, 9, (num_rows, 576), generator=generator).bfloat16()
    assert torch.equal(compiled(instructions, weight)(x), exact(weight, x).bfloat16())


@pytest.mark.compiler
@every_instruction_set
@pytest.mark.parametrize("num_rows", [*range(1, 8), 97])
@pytest.mark.parametrize("group_size", [32, 96, 256, 600])
def test_sums_of_fp8_that_fp32_holds_are_exact(instructions, group_size, num_rows):
    """Rows of 7 times powers of two: the largest of a group is 448 over one, and rounds nothing."""
    generator = torch.Generator().manual_seed(num_rows)
    values = torch.randint(-8, 9, (50, 600), generator=generator).to(FP8)
    groups = (50, -(-600 // group_size))
    scales = 2.0 ** torch.randint(-1, 3, groups, generator=generator)
    weight = Fp8Weight(values, scales, group_size, torch.bfloat16)
    powers = torch.randint(0, 4, (num_rows, 600), generator=generator)
    signs = torch.randint(-1, 2, (num_rows, 600), generator=generator)
    x = (7 * signs * 2.0**powers).bfloat16()
    assert torch.equal(compiled(instructions, weight)(x), exact(weight, x).bfloat16())


@pytest.mark.compiler
@every_instruction_set
@every_kind
@pytest.mark.parametrize("shape", [(64, 96), (1000, 192), (40, 3072), (4096, 96)], ids=str)
def test_a_row_has_the_same_bits_in_every_microbatch(instructions, kind, shape):
    weight, x = quantized(kind, *shape), random(7, 300, shape[1])
    for linear in (compiled(instructions, weight), compiled(instructions, weight, is_gated=True)):
        whole = linear(x)
        for start, length in [(0, 1), (5, 1), (0, 2), (3, 3), (7, 4), (1, 8), (20, 31), (2, 100)]:
            assert torch.equal(linear(x[start : start + length]), whole[start : start + length])
        torch.set_num_threads(3)
        assert torch.equal(linear(x), whole)
        torch.set_num_threads(1)


@every_kind
def test_a_row_of_plain_torch_has_the_same_bits_in_every_microbatch(kind):
    linear, x = TorchQuantizedLinear(quantized(kind, 40, 192)), random(8, 50, 192)
    whole = linear(x)
    for start, length in [(0, 1), (3, 3), (7, 4), (20, 30)]:
        assert torch.equal(linear(x[start : start + length]), whole[start : start + length])


@pytest.mark.compiler
def test_what_the_compiled_kernels_do_not_multiply_goes_to_torch():
    oldest, old_machine, here = (
        CompiledKernels(kernels_for(name)) for name in ("without AVX", "without AVX-512", "native")
    )
    for kind in KINDS:
        weight = quantized(kind, 8, 192)
        assert isinstance(oldest.linear(weight), TorchQuantizedLinear)
        assert not isinstance(old_machine.linear(weight), TorchQuantizedLinear)
        in_fp32 = KINDS[kind](torch.ones(8, 192))
        assert isinstance(here.linear(in_fp32), TorchQuantizedLinear)


@pytest.mark.compiler
@every_kind
def test_a_packed_weight_replaces_the_plain_one(kind):
    weight = quantized(kind, 64, 192)
    is_packed = isinstance(weight, Int4Weight | Mxfp4Weight)
    numbers = weight.packed if is_packed else weight.values
    alive = weakref.ref(numbers.untyped_storage())
    linear = compiled("native", weight)
    del weight, numbers
    gc.collect()
    assert alive() is None and linear is not None


@pytest.mark.parametrize("first", [-1, 96])
def test_no_place_outside_of_a_row_gets_to_the_kernel(first: int) -> None:
    kernels = load_cpu_kernels()
    if not kernels.has_products:
        pytest.skip("neither AVX2 nor bf16 instructions")
    weight = with_order(to_int4(torch.randn(32, 96).bfloat16(), 96))
    order = weight.order.clone()
    order[0] = first
    with pytest.raises(AssertionError):
        CompiledExpandedLinear(kernels, replace(weight, order=order))
