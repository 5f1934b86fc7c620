"""The steps that build llama.cpp, with programs that only note how they were called."""

import re
import tarfile
from pathlib import Path

import pytest

from benchmark.peers import install_llama_cpp
from benchmark.peers.install_llama_cpp import PROGRAMS, install, llama_program
from sgl_pipeline.errors import ConfigurationError

REQUIREMENTS = Path("benchmark/peers/llama_cpp_requirements.txt")


def test_a_missing_compiler_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match="C\\+\\+ compiler is missing"):
        install(tmp_path / "llama_cpp")
    assert not (tmp_path / "llama_cpp").exists()


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `install` finds its tools: stand-ins that download, configure and compile nothing."""
    sources = tmp_path / "llama_cpp_python-1" / "vendor" / "llama.cpp"
    sources.mkdir(parents=True)
    with tarfile.open(tmp_path / "package.tar.gz", "w:gz") as packed:
        packed.add(sources.parents[1], arcname=sources.parents[1].name)

    def install_set(directory: Path, requirements: Path) -> None:
        bin_ = directory / "bin"
        bin_.mkdir(parents=True)
        # pip's target follows --dest; CMake's second word is the sources, ninja's the build.
        script(bin_ / "python", f'while [ "$1" != --dest ]; do shift; done; cp {packed.name} $2')
        script(bin_ / "cmake", f'test -d "$2" && echo "$@" > {tmp_path}/configured')
        made = " ".join(f"$2/bin/{name}" for name in PROGRAMS)
        script(bin_ / "ninja", f"mkdir -p $2/bin && touch {made}")

    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr(install_llama_cpp, "install_set", install_set)
    return tmp_path / "llama_cpp"


def test_the_programs_and_their_version_are_what_is_left(environment: Path) -> None:
    install(environment)
    for name in PROGRAMS:
        assert llama_program(environment, name).parent == environment / "bin"
    assert (environment / "version").read_text() == "llama-cpp-python 0.3.36\n"
    configured = (environment.parent / "configured").read_text()
    assert "-DGGML_NATIVE=ON" in configured and "/vendor/llama.cpp " in configured


def test_a_build_that_fails_leaves_no_program(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = install_llama_cpp.install_set

    def broken_set(directory: Path, requirements: Path) -> None:
        whole(directory, requirements)
        script(directory / "bin" / "ninja", "exit 1")

    monkeypatch.setattr(install_llama_cpp, "install_set", broken_set)
    with pytest.raises(ConfigurationError, match="ninja failed"):
        install(environment)
    with pytest.raises(ConfigurationError, match="install_llama_cpp"):
        llama_program(environment, "llama-server")


def test_every_requirement_is_pinned() -> None:
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
