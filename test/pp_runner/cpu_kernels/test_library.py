"""The compiled library as Python sees it."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels, load_cpu_kernels
from sgl_pipeline.pp_runner.layer_kernels.backend import RmsNorm
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "cpu_kernels-0.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(KernelBuildError, match=r"cpu_kernels-0\.so"):
        CpuKernels(broken)


@pytest.mark.compiler
def test_a_profile_has_the_names_of_compiled_kernels() -> None:
    kernels, rows = CompiledKernels(load_cpu_kernels()), torch.ones(3, 32)
    norm = RmsNorm(torch.ones(32), 1e-6)
    unrecorded = kernels.norm(rows, norm)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        assert torch.equal(kernels.norm(rows, norm), unrecorded)
        kernels.gate(rows)
    names = [event.name for event in recorded.events() or ()]
    assert (names.count("sglp_rms_norm"), names.count("sglp_gate")) == (1, 1)
