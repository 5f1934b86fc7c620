"""Which CUDA toolkit FlashInfer is given, and pip's wheels as one that it can link with."""

import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.bare_machine import BareMachine, make_toolkit

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.flashinfer import toolkit
from sgl_pipeline.pp_runner.flashinfer.toolkit import find_toolkit


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BareMachine:
    return BareMachine(tmp_path, monkeypatch)


def find(machine: BareMachine) -> Path:
    return find_toolkit(machine.cache, machine.no_toolkit)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_what_the_user_names_is_taken_as_it_is(
    machine: BareMachine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    machine.add_wheels()
    make_toolkit(machine.no_toolkit)
    monkeypatch.setenv(variable, "/somewhere/cuda")
    assert find(machine) == Path("/somewhere/cuda")
    assert not machine.cache.exists()


def test_a_whole_toolkit_on_the_machine_goes_before_pips(machine: BareMachine) -> None:
    machine.add_wheels()
    assert find_toolkit(machine.cache, make_toolkit(machine.no_toolkit)) == machine.no_toolkit
    # nvcc on PATH goes before both.
    assert find_toolkit(machine.cache, make_toolkit(machine.root)) == machine.root


def only_a_wrapper(machine: BareMachine) -> None:
    machine.add_command("nvcc")


def without_a_compiler(machine: BareMachine) -> None:
    (make_toolkit(machine.no_toolkit) / "bin" / "nvcc").unlink()


def without_cublas(machine: BareMachine) -> None:
    (make_toolkit(machine.no_toolkit) / "include" / "cublasLt.h").unlink()


def of_cuda_12(machine: BareMachine) -> None:
    make_toolkit(machine.no_toolkit, version=12090)


UNFIT = pytest.mark.parametrize(
    ("install", "reason"),
    [
        (only_a_wrapper, "lacks include/cuda.h"),
        (without_a_compiler, "lacks bin/nvcc"),
        (without_cublas, "lacks include/cublasLt.h"),
        (of_cuda_12, "is not of CUDA 13"),
    ],
)


@pytest.mark.compiler
@UNFIT
def test_a_toolkit_that_would_not_do_gives_way_to_pips(
    machine: BareMachine, install: Callable[[BareMachine], None], reason: str
) -> None:
    install(machine)
    machine.add_compiler()
    machine.add_wheels()
    assert find(machine).parent == machine.cache


@UNFIT
def test_without_pips_the_reason_is_named(
    machine: BareMachine, install: Callable[[BareMachine], None], reason: str
) -> None:
    install(machine)
    with pytest.raises(ConfigurationError, match=f"{reason}.*set CUDA_HOME.*cuda.txt") as caught:
        find(machine)
    assert "\n" not in str(caught.value)


@pytest.mark.compiler
def test_flashinfers_link_line_works_with_pips_wheels(machine: BareMachine) -> None:
    """As FlashInfer 0.7.2 links (`jit/cpp_ext.py`), with a runtime library of one function."""
    machine.add_compiler()
    wheels = machine.add_wheels()
    runtime = wheels / "lib" / "libcudart.so.13"
    runtime.unlink()
    source = machine.root / "kernel.cpp"
    source.write_text('extern "C" int cudaFree(void*) { return 0; }')
    compile_shared = ["c++", "-shared", "-fPIC", str(source)]
    subprocess.run([*compile_shared, "-Wl,-soname,libcudart.so.13", "-o", runtime], check=True)
    source.write_text('extern "C" int cudaFree(void*); int f() { return cudaFree(nullptr); }')
    home = find(machine)
    module = machine.root / "module.so"
    flags = [f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    strict = ["-Wl,--no-undefined", "-Wl,--no-as-needed"]
    subprocess.run([*compile_shared, *strict, *flags, "-o", module], check=True)
    assert b"\0libcudart.so.13\0" in module.read_bytes()
    assert b"\0libcuda.so.1\0" in module.read_bytes()
    for path in ("bin/nvcc", "include/cublasLt.h", "nvvm/bin/cicc"):
        assert (home / path).samefile(wheels / path)
    assert stat.S_IMODE(machine.cache.stat().st_mode) == 0o700


@pytest.mark.compiler
def test_the_folder_is_made_once_and_anew_for_other_wheels(machine: BareMachine) -> None:
    machine.add_compiler()
    wheels = machine.add_wheels()
    first = find(machine)
    (machine.commands / "c++").unlink()
    assert find(machine) == first
    machine.add_compiler()
    (wheels / "lib" / "libcublas.so.13").touch()
    assert (find(machine) / "lib64" / "libcublas.so").exists()


@pytest.mark.compiler
def test_stages_that_start_at_once_share_one_whole_folder(
    machine: BareMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.add_compiler()
    machine.add_wheels()
    both_build = threading.Barrier(2)
    compile_stub = toolkit._compile_stub

    def compile_together(library: Path) -> None:
        compile_stub(library)
        both_build.wait(timeout=30)

    monkeypatch.setattr(toolkit, "_compile_stub", compile_together)
    found: list[Path] = []
    stages = [threading.Thread(target=lambda: found.append(find(machine))) for _ in range(2)]
    for stage in stages:
        stage.start()
    for stage in stages:
        stage.join()
    assert len(found) == 2 and found[0] == found[1]
    assert list(machine.cache.iterdir()) == [found[0]]


@pytest.mark.compiler
def test_a_folder_that_could_not_be_finished_is_not_left(machine: BareMachine) -> None:
    machine.add_command("c++", "echo 'ld: cannot find crti.o' >&2; exit 1")
    machine.add_wheels()
    with pytest.raises(ConfigurationError, match=r"c\+\+ cannot link a library: ld: cannot find"):
        find(machine)
    assert list(machine.cache.iterdir()) == []
    machine.add_compiler()
    assert (find(machine) / "lib64" / "stubs" / "libcuda.so").exists()


def test_a_cache_that_others_can_write_to_is_refused(machine: BareMachine) -> None:
    machine.add_wheels()
    machine.cache.mkdir(parents=True)
    machine.cache.chmod(0o777)
    with pytest.raises(ConfigurationError, match=r"writable by others.*chmod 700"):
        find(machine)


def test_a_cache_that_cannot_be_written_is_named(machine: BareMachine) -> None:
    machine.add_wheels()
    machine.cache.parent.write_text("a file where a folder should be")
    with pytest.raises(ConfigurationError, match=r"cannot be made.*CUDA_HOME.*WORKSPACE_BASE"):
        find(machine)
