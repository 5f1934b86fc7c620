"""The compiled library as Python sees it."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner import cpu_kernels
from sgl_pipeline.pp_runner.cpu_kernels.functions import (
    ARGUMENT_TYPES,
    SIZE_PLACES,
    CompiledFunctions,
)
from sgl_pipeline.pp_runner.cpu_kernels.library import (
    Arithmetic,
    CpuKernels,
    KvFormat,
    load_cpu_kernels,
)
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import RmsNorm

DIRECTORY = Path(cpu_kernels.__file__).parent


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "cpu_kernels-0.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(KernelBuildError, match=r"cpu_kernels-0\.so"):
        CompiledFunctions(broken)


def definitions() -> dict[str, dict[str, str]]:
    """Of each C function in the sources: the kinds of its parameters, by name and in order."""
    found = {}
    for source in DIRECTORY.glob("*.cpp"):
        for name, text in re.findall(r'extern "C" \w+ sglp_(\w+)\(([^)]*)\) {', source.read_text()):
            parameters = [part.strip().rsplit(maxsplit=1) for part in text.split(",") if part]
            # Where a machine has no instructions for a function, another without names stands in.
            if all(len(parameter) == 2 for parameter in parameters):
                found[name] = {parameter: kind_of(written) for written, parameter in parameters}
    return found


C_TYPES = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "pointer": ctypes.c_void_p,
}
PYTHON_TYPES = {
    "int": (bool, int, Arithmetic, KvFormat),
    "int64_t": (int,),
    "float": (float,),
    "pointer": (torch.Tensor, torch.Tensor | None),
}


def kind_of(written: str) -> str:
    return "pointer" if written.endswith("*") else written


def test_the_argument_types_are_those_of_the_definitions() -> None:
    assert {
        name: [C_TYPES[kind] for kind in parameters.values()]
        for name, parameters in definitions().items()
    } == ARGUMENT_TYPES


def test_the_size_of_a_step_is_where_the_definitions_have_it() -> None:
    found = {
        name: (size, list(parameters).index(size))
        for name, parameters in definitions().items()
        for size in ("num_rows", "num_chunks")
        if size in parameters
    }
    assert found == SIZE_PLACES


class Recorder:
    """In the place of `CompiledFunctions`: what the last function was given, by position."""

    def __init__(self) -> None:
        self.arguments: tuple[object, ...] = ()

    def plain(self, name: str) -> Callable[..., int]:
        def record(*arguments: object) -> int:
            self.arguments = arguments
            return 1

        return record

    kernel = plain


@pytest.mark.parametrize(
    "name",
    [
        *("paged_attention", "rms_norm", "add", "place_heads", "gate"),
        *("reorder", "product", "int8_product", "int4_product", "expanded_product"),
    ],
)
def test_every_named_argument_reaches_its_place_in_the_definition(name: str) -> None:
    parameters, recorder = definitions()[name], Recorder()
    function = getattr(CpuKernels(recorder), name)
    hints = get_type_hints(function)
    assert hints.pop("return") is type(None) and list(hints) == list(parameters)
    for parameter, kind in parameters.items():
        assert hints[parameter] in PYTHON_TYPES[kind]
    tensors = {
        parameter: torch.empty(1) for parameter, kind in parameters.items() if kind == "pointer"
    }
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    function(**numbers | tensors)
    addresses = {parameter: tensor.data_ptr() for parameter, tensor in tensors.items()}
    assert recorder.arguments == tuple((numbers | addresses).values())
    optional = [parameter for parameter in tensors if hints[parameter] == torch.Tensor | None]
    function(**numbers | tensors | dict.fromkeys(optional))
    assert recorder.arguments == tuple((numbers | addresses | dict.fromkeys(optional)).values())


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
