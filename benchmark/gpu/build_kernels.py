"""Builds a pack of FlashInfer's kernels for a card, on a machine that needs no card and no CUDA.

    python -m benchmark.gpu.build_kernels                       # all; the fa3 modules take longest
    python -m benchmark.gpu.build_kernels --modules page norm rope silu_and_mul decode-128

Compiler, headers and FlashInfer come from pip's wheels (requirements/check-cuda.txt). The result,
`site.tar.xz`, is for a machine without network: unpack it, put the folder on PYTHONPATH and set
FLASHINFER_DISABLE_JIT=1 and FLASHINFER_USE_CUDA_NORM=1. An interrupted build goes on where it was.
As many files are compiled at once as MAX_JOBS says. A pack for sm_90a has run on an H200.
"""

import argparse
import sys
import time
from pathlib import Path

from benchmark.gpu.kernel_modules import ARCHITECTURE, FOLDER, MODULES, compile_module, prepare
from benchmark.gpu.kernel_pack import write_pack
from benchmark.gpu.kernel_wheels import install_compiler
from sgl_pipeline.errors import SglPipelineError


def main() -> None:
    """Exits with 1 and one message when something cannot be built."""
    arguments = parse_arguments()
    begin_s = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - begin_s:6.0f} s] {line}", flush=True)

    try:
        toolkit = prepare(arguments.folder, arguments.architecture)
        builds = [compile_module(name, report) for name in arguments.modules]
        archive = arguments.archive or arguments.folder / "site.tar.xz"
        report(f"packing {len(builds)} modules for Python {arguments.python}")
        wheels = install_compiler(arguments.folder)
        imported = write_pack(wheels, toolkit, builds, arguments.python, archive)
    except SglPipelineError as error:
        sys.exit(str(error))
    report(f"imported here from outside the pack: {imported}")
    report(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=MODULES, metavar="NAME")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--architecture", default=ARCHITECTURE, help="compute capability")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for wheels and objects")
    parser.add_argument("--archive", type=Path, help="the pack (site.tar.xz in the folder)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
