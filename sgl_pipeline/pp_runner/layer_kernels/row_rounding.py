"""Rounds rows to codes of 8 bits on a GPU: for products with quantized weights, and for pages.

Triton's kernels (`triton_rounding.py`) round with one kernel a call, where plain torch takes six to
eleven.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.base.kv_format import write_rows
from sgl_pipeline.pp_runner.layer_kernels.torch_quantized import (
    round_rows_to_fp8,
    round_rows_to_int8,
)

Pages = tuple[torch.Tensor, torch.Tensor]


class RowRounding(Protocol):
    """Rounds rows, filled up with rows of zeros to a number that a product supports."""

    def to_fp8(
        self, x: torch.Tensor, group_size: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`round_rows_to_fp8` of `x` [T, in], filled up to `num_rows`: values [num_rows, in] and
        scales [num_rows, G] by columns, that is with strides (1, num_rows)."""

    def to_int8(self, x: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`round_rows_to_int8` of `x` [T, in], filled up to `num_rows`."""

    def append_fp8(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pages: Pages
    ) -> None:
        """`write_rows` of keys and values [T, Hkv, D] into e4m3 pages [N, S, Hkv, D]; slots [T]
        int64."""


class TorchRowRounding:
    """Rounds by the definitions, in plain torch; for CPUs."""

    def to_fp8(
        self, x: torch.Tensor, group_size: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = round_rows_to_fp8(_filled_up(x, num_rows), group_size)
        return values, by_columns(scales)

    def to_int8(self, x: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return round_rows_to_int8(_filled_up(x, num_rows))

    def append_fp8(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pages: Pages
    ) -> None:
        write_rows(pages[0], slots, key)
        write_rows(pages[1], slots, value)


def open_row_rounding(device: torch.device) -> RowRounding:
    """The kernels of `device`, a GPU's tried once.

    Raises ConfigurationError if Triton is missing or compiles nothing. Plain torch does not replace
    it: it takes longer than 8 bits save.
    """
    if device.type != "cuda":
        return TorchRowRounding()
    try:
        from sgl_pipeline.pp_runner.layer_kernels.triton_rounding import TritonRowRounding

        rounding = TritonRowRounding()
        rounding.to_int8(torch.zeros(1, 16, dtype=torch.bfloat16, device=device), 1)
    # Any error of its compilers: a missing C compiler is a RuntimeError, others are its own.
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        raise ConfigurationError(
            "8-bit weights and pages need Triton's kernels on a GPU, and it cannot be used "
            f"({type(error).__name__}: {line}); install triton as torch's CUDA builds require it, "
            "and a C compiler, or choose --stage-kernels torch"
        ) from error
    return rounding


def by_columns(scales: torch.Tensor) -> torch.Tensor:
    """The same [R, G], with strides (1, R)."""
    return scales.t().clone(memory_format=torch.contiguous_format).t()


def _filled_up(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, num_rows - len(x))) if num_rows > len(x) else x
