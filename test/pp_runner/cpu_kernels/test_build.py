"""The build cache: compiled once, safe to share between stages, named errors when it cannot be."""

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner.cpu_kernels.build import build_library, find_compiler

pytestmark = pytest.mark.compiler

TINY_SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.cpp"
    path.write_text(TINY_SOURCE)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "sgl_pipeline"


@pytest.fixture
def counting_compiler(tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    """The real compiler behind a script that notes each compilation (a call with -o)."""
    log = tmp_path / "compilations"
    log.touch()
    script = tmp_path / "compiler.sh"
    real = shlex.join(find_compiler())
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *" -o "*) echo once >> {shlex.quote(str(log))};; esac\n'
        f'exec {real} "$@"\n'
    )
    script.chmod(0o700)
    yield [str(script)], log


def test_a_second_build_is_the_cached_one(
    source: Path,
    cache: Path,
    counting_compiler: tuple[list[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler, log = counting_compiler
    first = build_library("tiny", [source], [], compiler, cache)
    assert build_library("tiny", [source], [], compiler, cache) == first
    assert capsys.readouterr().err == (
        "sgl_pipeline: compiling tiny for this machine's CPU, once ...\n"
    )
    assert log.read_text() == "once\n"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_another_source_or_compiler_is_another_library(
    source: Path, cache: Path, counting_compiler: tuple[list[str], Path]
) -> None:
    first = build_library("tiny", [source], [], find_compiler(), cache)
    assert build_library("tiny", [source], [], counting_compiler[0], cache) != first
    source.write_text(TINY_SOURCE.replace("42", "43"))
    assert build_library("tiny", [source], [], find_compiler(), cache) != first


def test_another_header_is_another_library(source: Path, cache: Path) -> None:
    header = source.with_name("tiny.h")
    header.write_text("// one")
    first = build_library("tiny", [source], [header], find_compiler(), cache)
    header.write_text("// two")
    assert build_library("tiny", [source], [header], find_compiler(), cache) != first


@pytest.mark.multiproc
def test_stages_that_start_at_once_compile_once_and_all_load_it(
    source: Path, cache: Path, counting_compiler: tuple[list[str], Path]
) -> None:
    compiler, log = counting_compiler
    program = (
        "import ctypes, sys\n"
        "from pathlib import Path\n"
        "from sgl_pipeline.pp_runner.cpu_kernels.build import build_library\n"
        "source, compiler, cache = sys.argv[1:]\n"
        "library = build_library('tiny', [Path(source)], [], [compiler], Path(cache))\n"
        "print(ctypes.CDLL(str(library)).answer())\n"
    )
    command = [sys.executable, "-c", program, str(source), *compiler, str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    stages = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [stage.communicate(timeout=120)[0] for stage in stages] == ["42\n"] * 4
    assert log.read_text() == "once\n"
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".so"]


def test_a_compiler_error_is_shown_and_leaves_nothing_behind(source: Path, cache: Path) -> None:
    source.write_text("this is not C++\n")
    with pytest.raises(KernelBuildError, match="this is not C"):
        build_library("tiny", [source], [], find_compiler(), cache)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_a_missing_compiler_is_named(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    with pytest.raises(KernelBuildError, match="no-such-compiler"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelBuildError, match="install one or set CXX"):
        find_compiler()


def test_a_cache_that_others_may_write_is_refused(source: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o770)
    with pytest.raises(KernelBuildError, match="chmod 700"):
        build_library("tiny", [source], [], find_compiler(), cache)


def test_a_cache_that_cannot_be_made_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KernelBuildError, match="XDG_CACHE_HOME"):
        build_library("tiny", [source], [], find_compiler(), tmp_path / "file" / "cache")
