"""What Triton's kernels round, against the definitions in torch, bit for bit.

Each case takes the device that the kernels run on. `python -m support.rounding_cases` runs them on
a CPU, by Triton's interpreter, which has to be chosen before triton is imported: hence a process
of its own.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from sgl_pipeline.pp_runner.base.kv_format import FP8, write_rows
from sgl_pipeline.pp_runner.layer_kernels.row_rounding import RowRounding
from sgl_pipeline.pp_runner.layer_kernels.torch_quantized import (
    round_rows_to_fp8,
    round_rows_to_int8,
)

# Rows, inputs, and inputs that share a scale.
SIZES = ((1, 16, 16), (5, 128, 128), (9, 300, 128), (9, 300, 300), (2, 5000, 5000), (3, 192, 64))


def rows_of_many_sizes(num_rows: int, inputs: int) -> torch.Tensor:
    """[T, in] bf16 with zeros, a row too small to be divided by, and one of large numbers."""
    x = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(inputs)).bfloat16()
    for row, factor in enumerate((1.0, 3000.0, 2.0**-110, 0.0)[:num_rows]):
        x[row] *= factor
    return x


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All of a format with 16 bits, [64, 1024]."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype).view(64, 1024)


def check_fp8(device: torch.device) -> None:
    for num_rows, inputs, group_size in SIZES:
        _check_fp8(rows_of_many_sizes(num_rows, inputs), group_size, device)


def check_fp8_of_every_number(device: torch.device) -> None:
    """A row whose largest is 448 is not scaled."""
    x = every_number(torch.bfloat16).clone()
    x[~(x.abs() <= 448)] = 0.0
    x[:, 7] = 448.0
    _check_fp8(x, 1024, device)


def check_int8(device: torch.device) -> None:
    for num_rows, inputs, _ in SIZES:
        _check_int8(rows_of_many_sizes(num_rows, inputs), device)


def check_int8_of_every_half(device: torch.device) -> None:
    """Ties are rounded to even; a row whose largest is 127 is not scaled."""
    halves = (torch.arange(-254, 255) / 2).bfloat16()
    _check_int8(halves[None], device)


def check_rows_with_a_stride(device: torch.device) -> None:
    """A part of each row, as projections that are joined give it."""
    x = rows_of_many_sizes(5, 384)[:, 128:256]
    _check_fp8(x, 128, device)
    _check_int8(x, device)


def check_rows_with_nan_and_infinity(device: torch.device) -> None:
    """What is wrong stays so, and stays in its own group."""
    x = rows_of_many_sizes(9, 256)
    x[5, 3], x[6, 200] = torch.nan, torch.inf
    values, scales = rounding().to_fp8(x.to(device), 128, 9)
    expected, expected_scales = round_rows_to_fp8(x, 128)
    for mine, theirs in ((values.cpu().float(), expected.float()), (scales.cpu(), expected_scales)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def check_pages(device: torch.device) -> None:
    """Every bf16 and fp16 number, as keys and as values, in slots of no order."""
    for dtype in (torch.bfloat16, torch.float16):
        numbers = every_number(dtype).view(64, 2, 512)
        slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:64]
        joined = torch.cat((numbers, numbers.flip(0)), dim=1)  # rows of both, as products give them
        parts = joined[:, :2], joined[:, 2:]
        expected = tuple(torch.zeros(5, 16, 2, 512, dtype=FP8) for _ in parts)
        for pages, part in zip(expected, parts, strict=True):
            write_rows(pages, slots, part)
        found = tuple(torch.zeros_like(pages, device=device) for pages in expected)
        key, value = joined.to(device).split((2, 2), dim=1)
        rounding().append_fp8(key.contiguous(), value, slots.to(device), (found[0], found[1]))
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(_without_sign_of_nan(mine), _without_sign_of_nan(theirs)), dtype


CASES: dict[str, Callable[[torch.device], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def rounding() -> RowRounding:
    from sgl_pipeline.pp_runner.layer_kernels.triton_rounding import TritonRowRounding

    return TritonRowRounding()


def _check_fp8(x: torch.Tensor, group_size: int, device: torch.device) -> None:
    num_rows = len(x)
    filled = num_rows + -num_rows % 16
    values, scales = rounding().to_fp8(x.to(device), group_size, filled)
    expected, expected_scales = round_rows_to_fp8(x, group_size)
    assert values.shape == (filled, x.shape[1]) and values.dtype == FP8
    assert scales.stride() == (1, filled)
    _assert_filled(bits(values), bits(expected))
    _assert_filled(scales, expected_scales)


def _check_int8(x: torch.Tensor, device: torch.device) -> None:
    values, scales = rounding().to_int8(x.to(device), 32)
    expected, expected_scales = round_rows_to_int8(x)
    _assert_filled(values, expected)
    _assert_filled(scales, expected_scales)


def _assert_filled(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same rows, and zeros after them."""
    found = found.cpu()
    assert torch.equal(found[: len(expected)], expected)
    assert not found[len(expected) :].any()


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.cpu().view(torch.uint8)


def _without_sign_of_nan(codes: torch.Tensor) -> torch.Tensor:
    """A card forgets it where it widens fp16."""
    found = bits(codes)
    return found.where(found & 0x7F != 0x7F, 0x7F)


def let_the_interpreter_count() -> None:
    """That of Triton 3.6 takes an array of one number for an index, which NumPy 2.5 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    let_the_interpreter_count()
    for check in CASES.values():
        check(torch.device("cpu"))
