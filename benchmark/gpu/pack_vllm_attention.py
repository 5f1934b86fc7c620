"""Packs vLLM's FA3 alone, a rival for `bench_gpu --parts kernels`, for a machine without network.

    python -m benchmark.gpu.pack_vllm_attention         # writes .gpu/vllm_attention.tar.xz

Downloads vLLM's wheel with pip (240 MB) and keeps the library, the Python that calls it and the
licence: 12 MiB, for the torch that this vLLM was built against. Unpack it and put the folder on
PYTHONPATH. A minute of one core. It has run on an H200.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmark.gpu.kernel_wheels import ROOT, download_for_python
from sgl_pipeline.errors import ConfigurationError

VERSION = "0.25.1"  # the newest that pins torch 2.11.0 and was read
ARCHIVE = ROOT / ".gpu" / "vllm_attention.tar.xz"
_PACKAGE = "vllm/vllm_flash_attn"
FILES = (
    f"{_PACKAGE}/__init__.py",
    f"{_PACKAGE}/flash_attn_interface.py",
    f"{_PACKAGE}/_vllm_fa3_C.abi3.so",
)
_LICENSES = ".dist-info/licenses/"


def main() -> None:
    """Exits with 1 and one message when the wheel cannot be had, or lacks a file."""
    arguments = parse_arguments(__doc__, ARCHIVE)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.archive.parent) as directory:
            print(f"downloading vllm {VERSION} (240 MB)", flush=True)
            wheel = download_for_python(Path(directory), f"vllm=={VERSION}", arguments.python)
            print("packing", flush=True)
            pack(wheel, arguments.archive)
    except subprocess.CalledProcessError:
        sys.exit(f"vllm {VERSION} could not be downloaded; pip says why above")
    except ConfigurationError as error:
        sys.exit(str(error))
    print(f"{arguments.archive}: {arguments.archive.stat().st_size / 2**20:.1f} MiB")


def parse_arguments(description: str | None, archive: Path) -> argparse.Namespace:
    """The arguments of a command that packs, to `archive` by default; makes its folder."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--archive", type=Path, default=archive, help="the pack")
    arguments = parser.parse_args()
    arguments.archive.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def pack(wheel: Path, archive: Path) -> None:
    """Writes `FILES` and the licences of the wheel to a .tar.xz, there whole or not at all.

    Raises ConfigurationError when a file is missing.
    """
    partial = archive.with_name(f"{archive.name}.partial")
    with zipfile.ZipFile(wheel) as content, tarfile.open(partial, "w:xz") as packed:
        for name in _wanted(content.namelist(), wheel.name):
            information = content.getinfo(name)
            member = tarfile.TarInfo(name)
            member.size, member.mode = information.file_size, 0o644
            with content.open(information) as source:
                packed.addfile(member, source)
    partial.replace(archive)


def _wanted(names: Sequence[str], wheel: str) -> list[str]:
    licenses = [name for name in names if _LICENSES in name and not name.endswith("/")]
    missing = [name for name in FILES if name not in names]
    if missing or not licenses:
        raise ConfigurationError(f"{wheel} has no {', '.join(missing) or 'licence'}")
    return [*FILES, *licenses]


if __name__ == "__main__":
    main()
