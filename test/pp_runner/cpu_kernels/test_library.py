"""Loading a compiled library: what is not one of ours is named."""

from pathlib import Path

import pytest

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "cpu_kernels-0.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(KernelBuildError, match=r"cpu_kernels-0\.so"):
        CpuKernels(broken)
