"""How modules are compiled: what is built stays, a failure says why. A script is the compiler."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark.gpu.check_cuda import read_report, read_workspaces
from benchmark.gpu.kernel_modules import build_targets, objects_of, prepare
from sgl_pipeline.errors import ConfigurationError, KernelBuildError


def spec_of(folder: Path, compiler: str, names: str = "first second") -> SimpleNamespace:
    """As FlashInfer makes it: sources, a ninja file that compiles each, and a link."""
    lines = [f"nvcc = {compiler}", "rule cuda_compile", "  command = $nvcc -c $in -o $out"]
    lines += ["rule link", "  command = cat $in > $out"]
    library = folder / "module.so"
    for name in names.split():
        (folder / f"{name}.cu").write_text(name)
        lines.append(f"build {folder}/{name}.cuda.o: cuda_compile {folder}/{name}.cu")
    objects = " ".join(f"{folder}/{name}.cuda.o" for name in names.split())
    ninja_file = folder / "build.ninja"
    ninja_file.write_text("\n".join([*lines, f"build {library}: link {objects}", ""]))
    return SimpleNamespace(
        name="module", ninja_path=ninja_file, build_dir=folder, jit_library_path=library
    )


def compiler_of(folder: Path, script: str) -> str:
    """A command that is called as nvcc is: `-c SOURCE -o OBJECT`."""
    path = folder / "compiler.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return shlex.quote(str(path))


def test_what_is_built_stays(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, compiler_of(tmp_path, 'cp "$2" "$4"'))
    lines: list[str] = []
    build = build_targets("m", spec, [spec.jit_library_path], 2, lines.append)
    assert build.compiled_files == 2
    assert build.library.read_text() == "firstsecond"
    assert sum("first.cu" in line or "second.cu" in line for line in lines) == 2
    again = build_targets("m", spec, [spec.jit_library_path], 2, lines.append)
    assert again.compiled_files == 0
    assert "was built" in lines[-1]
    (tmp_path / "second.cuda.o").unlink()
    assert build_targets("m", spec, [spec.jit_library_path], 2).compiled_files == 1


def test_a_part_is_compiled_alone(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, compiler_of(tmp_path, 'cp "$2" "$4"'))
    part = objects_of(spec)[tmp_path / "first.cu"]
    assert build_targets("m", spec, [part], 1).compiled_files == 1
    assert part.exists()
    assert not spec.jit_library_path.exists()


def test_as_many_files_at_once_as_max_jobs_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compilation lasts until two run at once, or gives up."""
    script = f"""touch "$4.running"
for i in $(seq $TRIES); do
  [ $(ls {tmp_path}/*.running | wc -l) = 2 ] && cp "$2" "$4" && exit 0; sleep 0.05
done; rm "$4.running"; echo alone; exit 1"""
    spec = spec_of(tmp_path, compiler_of(tmp_path, script))
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.setenv("TRIES", "5")
    with pytest.raises(KernelBuildError, match="alone"):
        build_targets("m", spec, [spec.jit_library_path], 2)
    monkeypatch.setenv("MAX_JOBS", "2")
    monkeypatch.setenv("TRIES", "600")
    assert build_targets("m", spec, [spec.jit_library_path], 2).compiled_files == 2


def test_a_failure_gives_the_compilers_words_and_the_log(tmp_path: Path) -> None:
    words = 'error: "CUDA compiler and CUDA toolkit headers are incompatible"'
    spec = spec_of(tmp_path, compiler_of(tmp_path, f"echo '{words}'; exit 2"))
    with pytest.raises(KernelBuildError) as raised:
        build_targets("module", spec, [spec.jit_library_path], 2)
    assert words in str(raised.value)
    assert "module does not compile" in str(raised.value)
    assert words in (tmp_path / "build.log").read_text()
    assert " -c " not in str(raised.value)


def test_flashinfer_must_not_be_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    with pytest.raises(ConfigurationError, match="imported before"):
        prepare(tmp_path)


def test_cases_that_did_not_pass_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="test_a[1]" time="1.5"/>'
        '<testcase name="test_a[2]" time="0.5"><properties><property name="needed 8/2" value="5"/>'
        '<property name="given 8/2" value="9"/></properties><failure/></testcase>'
        '<testcase name="test_a[3]" time="0"><skipped/></testcase>'
        '<testcase name="test_b" time="2"><properties><property name="needed 8/2" value="4"/>'
        "</properties></testcase></testsuite></testsuites>"
    )
    assert read_report(report) == [
        {"test": "test_a", "cases": 3, "bad": 2, "s": 2.0},
        {"test": "test_b", "cases": 1, "bad": 0, "s": 2.0},
    ]
    assert read_workspaces(report) == {"8/2": {"needed": 5, "given": 9}}
