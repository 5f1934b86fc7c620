"""Whether this torch multiplies scaled FP8 matrices on a CPU: 2.13 does, 2.11 on GPUs alone."""

import pytest

from benchmark.gpu.quantized_checks import why_not_rehearsed


def require_scaled_products() -> None:
    """Skips the test where it does not."""
    if reason := why_not_rehearsed("fp8"):
        pytest.skip(reason)
