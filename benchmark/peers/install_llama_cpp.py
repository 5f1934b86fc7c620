"""Builds llama.cpp's server, its tool that rounds and one that times: `build/peers/llama_cpp/bin`.

Run once by hand, `python -m benchmark.peers.install_llama_cpp` (ten minutes on two cores, needs a
C++ compiler); `engines.py` then starts the server. The sources are those that the package
`llama-cpp-python` carries; CMake and ninja come from the same registry, into an environment of
their own. Compiled for this machine's processor: do not copy the programs to another.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmark.support.command import Command, Options
from benchmark.support.environments import install_set
from benchmark.support.paths import LLAMA_CPP_DIRECTORY, LLAMA_CPP_VERSION
from sgl_pipeline.errors import ConfigurationError

PACKAGE = "llama-cpp-python"
PACKAGE_VERSION = "0.3.36"
PROGRAMS = ("llama-server", "llama-quantize", "llama-batched-bench")
_REQUIREMENTS = Path(__file__).with_name("llama_cpp_requirements.txt")
_SETTINGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # which is a download
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return Command(__spec__.name, __doc__, saves=False).run(_install_ours, argv)


def _install_ours(options: Options) -> None:
    install(LLAMA_CPP_DIRECTORY)
    for name in PROGRAMS:
        print(f"Done: {llama_program(LLAMA_CPP_DIRECTORY, name)}")


def install(directory: Path) -> None:
    """Creates `directory` anew, compiles in a temporary folder and leaves the programs in `bin`.

    Raises ConfigurationError: before it begins, where a C++ compiler is missing; where a step
    fails.
    """
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise ConfigurationError("a C++ compiler is missing; install one (Debian: g++)")
    install_set(directory, _REQUIREMENTS)
    with tempfile.TemporaryDirectory() as folder:
        sources = _sources(directory, Path(folder))
        built = Path(folder) / "build"
        tools = directory / "bin"
        settings = [f"-D{name}={value}" for name, value in _SETTINGS.items()]
        settings.append(f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}")
        _run([tools / "cmake", "-S", sources, "-B", built, "-G", "Ninja", *settings])
        _run([tools / "ninja", "-C", built, *PROGRAMS])
        for name in PROGRAMS:
            shutil.copy2(built / "bin" / name, tools / name)
    version = directory / LLAMA_CPP_VERSION.name
    version.write_text(f"{PACKAGE} {PACKAGE_VERSION}\n", encoding="utf-8")


def _sources(directory: Path, folder: Path) -> Path:
    """llama.cpp as the package carries it, unpacked into `folder`."""
    command: list[str | Path] = [directory / "bin" / "python", "-m", "pip", "download", "-qq"]
    command += ["--no-deps", "--no-binary", PACKAGE, "--dest", folder]
    _run([*command, f"{PACKAGE}=={PACKAGE_VERSION}"])
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (sources,) = folder.glob("*/vendor/llama.cpp")
    return sources


def _run(command: list[str | Path]) -> None:
    if subprocess.run(command).returncode != 0:
        raise ConfigurationError(f"{Path(command[0]).name} failed; its output above says why")


def llama_program(directory: Path, name: str) -> Path:
    """One of PROGRAMS in an installation.

    Raises ConfigurationError where it is missing.
    """
    path = directory / "bin" / name
    if not path.exists():
        raise ConfigurationError(
            f"llama.cpp is not installed in {directory}; "
            "run python -m benchmark.peers.install_llama_cpp"
        )
    return path


if __name__ == "__main__":
    sys.exit(main())
