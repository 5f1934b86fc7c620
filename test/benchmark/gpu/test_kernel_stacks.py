"""Registers and stacks of compiled kernels, read from recorded text of cuobjdump 13.1."""

import json
from pathlib import Path

import pytest

from benchmark.gpu import check_cuda, kernel_stacks
from benchmark.gpu.kernel_modules import MODULES, Build
from benchmark.gpu.kernel_stacks import (
    Kernel,
    Module,
    parse_usage,
    problems_of,
    read_bounds,
    read_module,
    texts_of,
)
from sgl_pipeline.errors import ConfigurationError, KernelBuildError

FA2 = (
    "_ZN10flashinfer34BatchPrefillWithPagedKVCacheKernelILb1ENS_12KernelTraitsILNS_8MaskModeE0E"
    "Lj{rows}ELj1ELj{steps}ELj8ELj8ELj1ELj4ELNS_15PosEncodingModeE0E13__nv_bfloat1613__nv_fp8_e4m3"
    "S4_fiNS_16DefaultAttentionILb0ELb0ELb0ELb0EEELb1EEE11PagedParamsEEvT1_"
)
TEXT = f"""
Fatbin elf code:
================
arch = sm_90a
code version = [1,8]
host = linux
compile_size = 64bit
compressed

Resource usage:
 Common:
  GLOBAL:25 CONSTANT[4]:200
 Function {FA2.format(rows=16, steps=8)}:
  REG:255 STACK:304 SHARED:1024 LOCAL:0 CONSTANT[0]:912 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {FA2.format(rows=16, steps=2)}:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:912 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90a
code version = [1,8]
host = linux
compile_size = 64bit

Resource usage:
 Common:
  GLOBAL:0
 Function scale:
  REG:21 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:548 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
WIDE = "BatchPrefillWithPagedKVCacheKernel<1,0,16,1,8,8,8,1,4,0,0,0,0,0,1>"


def test_registers_and_stack_of_every_kernel_are_read() -> None:
    module = parse_usage(TEXT)
    assert module.targets == ("sm_90a",)
    usage = [(kernel.registers, kernel.stack_bytes) for kernel in module.kernels]
    assert usage == [(255, 304), (168, 0), (21, 8)]
    assert module.kernels[0].name == FA2.format(rows=16, steps=8)
    assert module.stacks() == {WIDE: 304, "scale<>": 8}


def test_of_kernels_with_one_label_the_largest_stack_counts() -> None:
    kernels = tuple(Kernel(f"_Z5scale{kind}", 1, stack) for kind, stack in (("f", 16), ("i", 8)))
    assert Module(("sm_90a",), kernels).stacks() == {"scale<>": 16}


@pytest.mark.parametrize(("bound", "is_above"), [(304, False), (296, True), (None, True)])
def test_a_kernel_above_its_bound_is_named(bound: int | None, is_above: bool) -> None:
    """One that has none recorded may have no stack."""
    bounds = {"m": {"scale<>": 8} | ({} if bound is None else {WIDE: bound})}
    found = problems_of({"m": parse_usage(TEXT)}, bounds)
    assert (
        found
        == [
            f"m: {WIDE} takes 304 bytes of stack, its bound is {bound or 0}",
        ]
        * is_above
    )


def test_a_module_for_another_card_is_named() -> None:
    (found,) = problems_of({"m": parse_usage(TEXT.replace("sm_90a", "sm_80"))}, {"m": {}})[:1]
    assert found == "m is for sm_80, not for sm_90a"


def test_the_tables_say_what_spills() -> None:
    modules, kernels, _ = texts_of({"m": parse_usage(TEXT)})
    assert "| m | 3 | 255 | 2 | 304 |" in modules
    assert f"| m | `{WIDE}` | 304 |" in kernels and "| m | `scale<>` | 8 |" in kernels


def test_the_bounds_are_of_the_packs_modules() -> None:
    bounds = read_bounds()
    assert set(bounds) == set(MODULES)
    attention = [name for name, stacks in bounds.items() if stacks]
    assert sorted(attention) == sorted(name for name in MODULES if name.startswith("prefill"))
    assert all(stack > 0 for stacks in bounds.values() for stack in stacks.values())


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: int = 0) -> None:
    """Prints `text`, whatever it is asked."""
    path = folder / "cuobjdump"
    (folder / "text").write_text(text)
    path.write_text(f"#!/bin/sh\ncat {folder}/text\nexit {status}\n")
    path.chmod(0o755)
    monkeypatch.setattr(kernel_stacks, "find_cuobjdump", lambda: str(path))


@pytest.mark.multiproc
def test_a_library_is_read_by_cuobjdump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, TEXT)
    assert read_module(tmp_path / "m.so") == parse_usage(TEXT)
    for text, status in (("does not contain device code", 0), (TEXT, 255)):
        tool(tmp_path, monkeypatch, text, status)
        with pytest.raises(KernelBuildError, match=r"m\.so has no kernels"):
            read_module(tmp_path / "m.so")


def test_without_cuobjdump_the_wheel_that_has_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="Triton's wheel"):
        kernel_stacks.find_cuobjdump()


@pytest.mark.multiproc
def test_a_pack_that_spills_more_fails_until_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, monkeypatch, TEXT)
    bounds = tmp_path / "bounds.json"
    bounds.write_text("{}")
    monkeypatch.setattr(kernel_stacks, "BOUNDS", bounds)
    monkeypatch.setattr(kernel_stacks, "prebuilt_libraries", lambda: {"norm": tmp_path / "norm.so"})
    assert kernel_stacks.main(["--no-save"]) == 1
    assert "FAILED: norm: scale<> takes 8 bytes" in capsys.readouterr().out
    assert kernel_stacks.main(["--no-save", "--record"]) == 0
    assert json.loads(bounds.read_text()) == {"norm": {WIDE: 304, "scale<>": 8}}
    monkeypatch.setattr(kernel_stacks, "prebuilt_libraries", dict)
    assert kernel_stacks.main(["--no-save"]) == 1


@pytest.mark.multiproc
@pytest.mark.parametrize("bound", [304, 296])
def test_make_check_cuda_builds_the_packs_modules_and_fails_above_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    built = list[str]()

    def compiled(name: str, *_: object, **__: object) -> Build:
        built.append(name)
        return Build(name, name, tmp_path / f"{name}.so", 1, 1, 0.0, 0.0)

    tool(tmp_path, monkeypatch, TEXT)
    bounds = tmp_path / "bounds.json"
    bounds.write_text(json.dumps({name: {"scale<>": 8, WIDE: bound} for name in MODULES}))
    monkeypatch.setattr(kernel_stacks, "BOUNDS", bounds)
    monkeypatch.setattr("sys.argv", ["check_cuda"])
    for name in ("compile_module", "build_planner"):
        monkeypatch.setattr(check_cuda, name, compiled)
    monkeypatch.setattr(check_cuda, "prepare", lambda: None)
    monkeypatch.setattr(check_cuda, "run_tests", lambda options: 0)
    with pytest.raises(SystemExit) as ended:
        check_cuda.main()
    assert ended.value.code == (0 if bound == 304 else 1)
    assert built == [*MODULES, *check_cuda.PLANNERS]
    assert {"decode-128-e4m3", "prefill-fa2-128-e4m3"} < set(check_cuda.PLANNERS)
