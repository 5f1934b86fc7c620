"""Codes of keys and values: what they stand for, and how far that is from what was given."""

import pytest
import torch

from sgl_pipeline.pp_runner.base.kv_format import (
    CODED_DTYPES,
    FP8,
    decode,
    encode,
    head_dim_of,
    row_width,
    write_rows,
)

coded_dtypes = pytest.mark.parametrize("coded_dtype", CODED_DTYPES.values(), ids=str)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@coded_dtypes
def test_rows_are_as_wide_as_their_pages_say(coded_dtype: torch.dtype) -> None:
    numbers = random(3, 2, 6)
    rows = encode(numbers, coded_dtype)
    assert rows.dtype == coded_dtype
    assert rows.shape == (3, 2, row_width(6, coded_dtype))
    assert head_dim_of(rows[None]) == 6
    for few in (numbers[:0], numbers[:1, :1]):
        assert decode(encode(few, coded_dtype), torch.float32).shape == few.shape


def test_int8_is_within_half_a_step_of_the_largest_number_of_its_own_row() -> None:
    numbers = random(50, 2, 64) * torch.logspace(-20, 20, 50)[:, None, None]
    numbers[3, 1] = 0.0
    found = decode(encode(numbers, torch.int8), torch.float32)
    half_step = numbers.abs().amax(dim=-1, keepdim=True) / 127 / 2
    assert ((found - numbers).abs() <= half_step * 1.001).all()
    assert not found[3, 1].any()


def test_fp8_is_within_a_sixteenth_and_bounded() -> None:
    numbers = random(50, 2, 64) * torch.logspace(-1, 3, 50)[:, None, None]
    found = decode(encode(numbers, FP8), torch.float32)
    expected = numbers.clamp(-448.0, 448.0)
    assert (found != numbers).any() and found.abs().max() == 448.0
    assert ((found - expected).abs() <= expected.abs() / 16 + 2.0**-10).all()


@coded_dtypes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_were_decoded_are_their_own_codes(
    coded_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Up to the rounding of a scale that bf16 cannot hold: a copy of a copy is not worse."""
    once = decode(encode(random(40, 2, 64).to(dtype), coded_dtype), dtype)
    twice = decode(encode(once, coded_dtype), dtype)
    torch.testing.assert_close(
        twice, once, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-6, atol=0
    )


@coded_dtypes
def test_no_number_stays_none_in_its_own_row_alone(coded_dtype: torch.dtype) -> None:
    numbers = random(3, 2, 8)
    numbers[1, 0, 3] = torch.nan
    found = decode(encode(numbers, coded_dtype), torch.float32)
    assert found[1, 0, 3].isnan()
    assert found[1, 1].isfinite().all() and found[[0, 2]].isfinite().all()


@coded_dtypes
def test_rows_are_written_to_their_slots_and_nowhere_else(coded_dtype: torch.dtype) -> None:
    numbers, slots = random(3, 2, 8), torch.tensor([7, 0, 4])
    pages = torch.zeros(2, 4, 2, row_width(8, coded_dtype), dtype=coded_dtype)
    write_rows(pages, slots, numbers)
    found = decode(pages, torch.float32).flatten(0, 1)
    assert torch.equal(found[slots], decode(encode(numbers, coded_dtype), torch.float32))
    found[slots] = 0.0
    assert not found.any()
