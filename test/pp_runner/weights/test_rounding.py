"""MXFP4's rounding against a search through all of its numbers."""

import pytest
import torch

from sgl_pipeline.pp_runner.weights.quantized_weights import E2M1, MXFP4_SCALES
from sgl_pipeline.pp_runner.weights.rounding import to_mxfp4


@pytest.mark.parametrize("spread", [1.0, 1e-9, 1e9, 2.0**-126])
def test_mxfp4_takes_the_nearest_number_under_the_scale_of_the_largest(spread: float) -> None:
    matrix = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)) * spread
    matrix[0, :32] = 0.0
    weight = to_mxfp4(matrix)
    assert int(weight.scales.min()) >= MXFP4_SCALES[0] and weight.scales.max() <= MXFP4_SCALES[-1]
    for output, groups in enumerate(matrix.unflatten(1, (-1, 32))):
        for group, numbers in enumerate(groups):
            power = 2.0 ** (int(weight.scales[output, group]) - 127)
            known = torch.tensor(E2M1, dtype=torch.float64) * power
            nearest = (numbers.double()[:, None] - known).abs().min(dim=1).values
            stored = weight.dequantized()[output, 32 * group : 32 * group + 32].double()
            assert torch.equal((numbers.double() - stored).abs(), nearest)


def test_mxfp4_keeps_its_own_numbers_and_takes_the_even_code_in_the_middle() -> None:
    numbers = torch.tensor([*E2M1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0]).repeat(1, 2)
    rounded = to_mxfp4(numbers[:, :32]).dequantized()
    expected = [*E2M1, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, *E2M1[:8]]
    assert rounded[0].tolist() == expected
