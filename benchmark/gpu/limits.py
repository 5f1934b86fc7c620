"""The limits of a card: bytes moved and bf16 arithmetic, measured and by its datasheet.

The benchmark's shares are of the measured limits.
"""

from dataclasses import dataclass

import torch

from benchmark.gpu.device_times import repeat_ms
from benchmark.gpu.shapes import StepWork

# Vendor's numbers for dense bf16 products (TFLOP/s) and memory (TB/s), by what torch calls the
# card; to be shown beside the measured ones.
_DATASHEETS = {
    "NVIDIA H200": "989 TFLOP/s, 4.8 TB/s",
    "NVIDIA H100 80GB HBM3": "989 TFLOP/s, 3.35 TB/s",
    "NVIDIA A100-SXM4-80GB": "312 TFLOP/s, 2.04 TB/s",
    "NVIDIA L20": "119.5 TFLOP/s, 0.86 TB/s",
}


@dataclass(frozen=True, slots=True)
class CardLimits:
    """Measured rates: `bytes_per_ms` of a large copy, which reads and writes, and `flops_per_ms` of
    a large bf16 product on random numbers."""

    name: str
    bytes_per_ms: float
    flops_per_ms: float

    def bytes_ms(self, work: StepWork) -> float:
        """The least time in which the step's bytes can be moved."""
        return work.num_bytes / self.bytes_per_ms

    def flops_ms(self, work: StepWork) -> float:
        """The least time of the step's arithmetic."""
        return work.num_flops / self.flops_per_ms

    def limit_ms(self, work: StepWork) -> float:
        """The larger of the two."""
        return max(self.bytes_ms(work), self.flops_ms(work))

    def facts(self) -> dict[str, str]:
        """For the head of a result."""
        return {
            "card": self.name,
            "measured": f"{self.flops_per_ms / 1e9:.1f} TFLOP/s in a bf16 product, "
            f"{self.bytes_per_ms / 1e9:.2f} TB/s in a copy (read and written bytes)",
            "datasheet": _DATASHEETS.get(self.name, "not in the benchmark's table"),
        }


def measure_limits(device: torch.device, num_bytes: int = 2**32, size: int = 8192) -> CardLimits:
    """Times a copy of `num_bytes` and a product of square matrices; a second at most on a GPU."""
    copied_bytes, copy_ms = _time_copy(num_bytes // 2, device)
    flops, product_ms = _time_product(size, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return CardLimits(name, copied_bytes / copy_ms, flops / product_ms)


def _time_copy(num_bytes: int, device: torch.device) -> tuple[int, float]:
    """Bytes read and written by a copy of `num_bytes`, and its milliseconds."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes, repeat_ms(lambda: target.copy_(source), device)


def _time_product(size: int, device: torch.device) -> tuple[int, float]:
    """FLOPs of a product of square bf16 matrices of random numbers, and its milliseconds."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3, repeat_ms(lambda: left @ right, device)
