"""Linear against an fp64 product, and the row independence that the scheduler relies on."""

import gc
import weakref

import psutil
import pytest
import torch

from sgl_pipeline.pp_runner.linear import Linear, pad_rows, padded_row_count

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 33])
def test_result_is_the_product(num_rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    weight = random_weight(72, 40, dtype)
    bias = torch.randn(72, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = random_rows(num_rows, 40, dtype)

    y = Linear(weight, bias if with_bias else None)(x)

    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert y.dtype == dtype
    assert y.shape == (num_rows, 72)
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (64, 3072), (2048, 1024), (1000, 192)], ids=str)
def test_a_row_is_bitwise_the_same_in_every_microbatch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """But for bf16 on a machine with AMX tiles: there oneDNN splits the sums of a large matrix by
    the number of rows, and a row may differ in its last bit."""
    linear = Linear(random_weight(*shape, dtype))
    x = random_rows(130, shape[1], dtype)
    whole = linear(x)
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        torch.testing.assert_close(linear(x[1:9]), whole[1:9], rtol=2.0**-7, atol=2.0**-7)
        return
    for start, length in [(0, 1), (5, 1), (0, 2), (3, 3), (7, 4), (1, 8), (20, 31), (2, 100)]:
        part = linear(x[start : start + length])
        assert torch.equal(part, whole[start : start + length]), (start, length)


def test_rows_need_not_be_contiguous() -> None:
    weight = random_weight(24, 16, torch.float32)
    x = random_rows(6, 32, torch.float32)[:, :16]
    torch.testing.assert_close(Linear(weight)(x), x @ weight.T)


def test_a_packed_weight_replaces_the_plain_one() -> None:
    weight = random_weight(64, 64, torch.float32)
    alive = weakref.ref(weight.untyped_storage())
    linear = Linear(weight)
    assert linear.is_packed
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


def test_padding_adds_rows_of_zeros() -> None:
    positions = torch.arange(1, 67)
    assert pad_rows(positions).tolist() == [*range(1, 67), 0, 0]
    full = torch.ones(8, 3)
    assert pad_rows(full) is full


def test_memory_does_not_grow_with_every_new_number_of_rows() -> None:
    """oneDNN keeps the kernels of each row count: 0.5 MiB and more for every matrix shape."""
    linear = Linear(random_weight(512, 128, torch.float32))
    linear(random_rows(600, 128, torch.float32))
    resident_bytes = psutil.Process().memory_info().rss
    for num_rows in range(1, 601):
        linear(random_rows(num_rows, 128, torch.float32))
    grown_mib = (psutil.Process().memory_info().rss - resident_bytes) / 2**20
    assert grown_mib < 100, "one set of kernels for each of 600 row counts is above 300 MiB"
