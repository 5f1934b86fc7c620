"""FlashInfer's modules and planners, compiled for a card, in a process that has none.

For the tests marked `cuda_toolkit`, which `make check-cuda` runs. FlashInfer must not be imported
before `cuda_toolkit` is called, so nothing here imports it at the top.
"""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmark.gpu.check_cuda import CHECKING_VARIABLE
from benchmark.gpu.compiled_planners import build_planner, planner_folder
from benchmark.gpu.kernel_modules import Build, compile_module, prepare
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import open_flashinfer
from sgl_pipeline.pp_runner.flashinfer.flashinfer_parts import FlashInferParts

# Else a run of all tests would download and compile for minutes, and would have imported FlashInfer
# already for other tests.
run_by_check_cuda = pytest.mark.skipif(
    CHECKING_VARIABLE not in os.environ, reason="run by `make check-cuda`"
)


@functools.cache
def cuda_toolkit() -> Path:
    """Returns the toolkit of pip's wheels; from here on this process sees no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return prepare()


@functools.cache
def load_module(name: str) -> Any:
    """Compiles module `name` if it is missing, and loads it over the toolkit's own runtime.

    Raises OSError when a symbol that the library uses is nowhere to be found, unless it is FA2's.
    """
    import tvm_ffi

    libraries = cuda_toolkit() / "lib64"
    library = compile_module(name).library
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        ctypes.CDLL(str(libraries / "stubs" / "libcuda.so"))
    ctypes.CDLL(str(libraries / "libcudart.so.13"))
    # All symbols now, not when they are called; but FA2 names a tile of 32 rows that is nowhere.
    ctypes.CDLL(str(library), os.RTLD_LAZY if name.startswith("prefill-fa2") else os.RTLD_NOW)
    return tvm_ffi.load_module(str(library))


class NoEvent:
    """A `flashinfer_parts.Event` where a copy has ended when its call returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class HostWrappers:
    """An `open_parts` that makes the library's own wrappers on the CPU, and keeps them in `parts`.

    To be used inside `planners`.
    """

    parts: FlashInferParts

    def __call__(self, shape: AttentionShape, prefill_kernels: str = "auto") -> FlashInferParts:
        self.parts = replace(open_flashinfer(shape, prefill_kernels), open_event=NoEvent)
        return self.parts


@contextmanager
def planners(*names: str) -> Iterator[None]:
    """Inside, FlashInfer's wrappers plan on a CPU with the compiled planners for an H200.

    What they ask of torch and of the driver is answered as on that card. They compile nothing.
    """
    cuda_toolkit()
    for name in names:
        _linked_planner(name)
    import flashinfer.jit

    empty = torch.empty

    def empty_unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    def hopper(device: torch.device) -> tuple[int, int]:
        return 9, 0

    def h200(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=132)

    with (
        mock.patch.object(flashinfer.jit.env, "FLASHINFER_AOT_DIR", planner_folder()),
        mock.patch.dict(os.environ, FLASHINFER_DISABLE_JIT="1"),
        mock.patch("torch.empty", empty_unpinned),
        mock.patch("torch.cuda.get_device_capability", hopper),
        mock.patch("torch.cuda.get_device_properties", h200),
        mock.patch("flashinfer.utils.is_sm90a_supported", lambda device: True),
        mock.patch("flashinfer.utils.get_compute_capability", hopper),
        mock.patch("flashinfer.decode.get_compute_capability", hopper),
        mock.patch("flashinfer.prefill.get_compute_capability", hopper),
    ):
        yield


@functools.cache
def _linked_planner(name: str) -> Build:
    """Links it once: what this process has loaded must stay where it is."""
    return build_planner(name)


@contextmanager
def blocks_per_multiprocessor(planner: str, number: int) -> Iterator[None]:
    """Inside, a decode planner is told that a multiprocessor holds so many blocks of its kernel.

    The others do not ask.
    """
    name = _linked_planner(planner).library_name
    library = ctypes.CDLL(str(planner_folder() / name / f"{name}.so"))
    setting = ctypes.c_int.in_dll(library, "standin_blocks_per_multiprocessor")
    before, setting.value = setting.value, number
    try:
        yield
    finally:
        setting.value = before
