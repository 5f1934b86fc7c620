"""`sgl-pipeline bench`: SGLang's own load generator, with its own flags."""

import runpy
import sys
from collections.abc import Sequence

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim


def main(argv: Sequence[str]) -> int:
    """Runs `sglang.bench_serving`, which ends the process itself after an error."""
    install_torchvision_shim()
    sys.argv = ["sgl-pipeline bench", *argv]
    runpy.run_module("sglang.bench_serving", run_name="__main__")
    return 0
