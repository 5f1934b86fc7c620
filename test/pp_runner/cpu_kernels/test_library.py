"""The compiled library as Python sees it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner.cpu_kernels.functions import CompiledFunctions
from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels
from sgl_pipeline.pp_runner.cpu_kernels.signatures import Signature, read_signatures
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import RmsNorm


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "cpu_kernels-0.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(KernelBuildError, match=r"cpu_kernels-0\.so"):
        CompiledFunctions(broken)


def test_signatures_are_read_from_a_header(tmp_path: Path) -> None:
    header = tmp_path / "header.h"
    header.write_text(
        "// not a declaration: sglp_rows(num_rows)\n"
        "int sglp_answer();\n"
        "void sglp_rows(int kind, int64_t num_rows,\n"
        "               const void* SGLP_OR_NULL added, float scale,\n"
        "               const int64_t* order);\n"
    )
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    expected = {
        "kind": integer,
        "num_rows": ctypes.c_int64,
        "added": pointer,
        "scale": ctypes.c_float,
        "order": pointer,
    }
    found = read_signatures(header)
    assert found == {
        "answer": Signature(integer, {}, frozenset()),
        "rows": Signature(None, expected, frozenset({"added"})),
    }
    assert list(found["rows"].parameters) == list(expected)  # in order
    assert found["rows"].size_place() == ("num_rows", 1)


def test_a_parameter_of_another_type_is_refused(tmp_path: Path) -> None:
    header = tmp_path / "header.h"
    header.write_text("void sglp_rows(double scale);")
    with pytest.raises(KeyError, match="double"):
        read_signatures(header)


@pytest.fixture
def gate() -> Callable[..., None]:
    return load_cpu_kernels().gate


GATE_UP = torch.ones(3, 64)
GATED = torch.zeros(3, 32)
ARGUMENTS = {
    "is_bf16": False,
    "num_rows": 3,
    "size": 32,
    "gate_up": GATE_UP,
    "gated": GATED,
    "num_threads": 1,
}


@pytest.mark.compiler
def test_arguments_are_passed_by_name_in_any_order(gate: Callable[..., None]) -> None:
    out = torch.zeros(3, 32)
    gate(**dict(reversed((ARGUMENTS | {"gated": out}).items())))
    assert torch.allclose(out, torch.nn.functional.silu(GATE_UP[:, :32]))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("changed", "missing"),
    [({"sise": 32}, "size"), ({"gated": None}, ""), ({"gated": 4096}, ""), ({"size": 0.5}, "")],
)
def test_wrong_arguments_are_refused_before_the_call(
    gate: Callable[..., None], changed: dict[str, object], missing: str
) -> None:
    arguments = {name: one for name, one in (ARGUMENTS | changed).items() if name != missing}
    with pytest.raises((TypeError, AttributeError, ctypes.ArgumentError)):
        gate(**arguments)
    assert not GATED.any()


@pytest.mark.compiler
def test_null_goes_only_where_the_header_allows_it() -> None:
    rows, normed, kernels = torch.ones(3, 32), torch.zeros(3, 32), load_cpu_kernels()
    arguments = {
        "is_bf16": False,
        "num_rows": 3,
        "size": 32,
        "rows": rows,
        "added": None,
        "weight": torch.ones(32),
        "epsilon": 0.0,
        "weight_offset": 0.0,
        "sums": None,
        "normed": normed,
        "num_threads": 1,
    }
    kernels.rms_norm(**arguments)
    assert torch.equal(normed, rows)
    with pytest.raises(AttributeError):
        kernels.rms_norm(**arguments | {"weight": None})


@pytest.mark.compiler
def test_the_compiler_is_asked_once_for_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_cpu_kernels()
    monkeypatch.setattr("sgl_pipeline.pp_runner.cpu_kernels.library.build_library", pytest.fail)
    assert load_cpu_kernels() is kernels
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="no-such-compiler"):
        load_cpu_kernels()


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
