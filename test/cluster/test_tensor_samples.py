"""Which bytes of a tensor are looked at."""

import itertools

import pytest

from sgl_pipeline.cluster.tensor_samples import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    WHOLE_BYTES,
    sampled_ranges,
)


@pytest.mark.parametrize("num_bytes", [0, 1, WHOLE_BYTES])
def test_small_tensors_are_read_whole(num_bytes: int) -> None:
    assert sampled_ranges(num_bytes) == [(0, num_bytes)]


@pytest.mark.parametrize("num_bytes", [WHOLE_BYTES + 1, 2 * 4096**2, 2 * 8192 * 28672])
def test_of_large_ones_blocks_from_the_first_byte_to_the_last(num_bytes: int) -> None:
    ranges = sampled_ranges(num_bytes)
    assert ranges[0] == (0, BLOCK_BYTES)
    assert ranges[-1] == (num_bytes - BLOCK_BYTES, BLOCK_BYTES)
    assert [length for _, length in ranges] == [BLOCK_BYTES] * NUM_BLOCKS
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(ranges)]
    assert min(gaps) > BLOCK_BYTES and max(gaps) < num_bytes / 3


def test_blocks_between_fall_into_different_columns() -> None:
    """A row of 16 KiB is four blocks long; halves and quarters of a matrix begin one."""
    row_bytes = 2 * 8192
    columns = {first % row_bytes for first, _ in sampled_ranges(8192 * row_bytes)}
    assert len(columns) == NUM_BLOCKS
    assert max(columns) - min(columns) > row_bytes / 2
