"""Lists the modules that a stage calls and that are there as prebuilt kernels.

`kernel_pack.py` writes the list of what it packed, for people and scripts; `bench_gpu.py` believes
no list, but looks for each module where FlashInfer will.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from benchmark.gpu.kernel_modules import module_makers
from benchmark.gpu.session import Session
from sgl_pipeline.pp_runner.flashinfer.kernel_builds import building_kernels

LIST_NAME = "kernel_modules.json"  # in the folder of the pack
PART = "prebuilt kernels"  # by which a result names what is missing
_PREBUILT_ONLY = "FLASHINFER_DISABLE_JIT"


def write_list(site: Path, libraries: Mapping[str, str], python_version: str) -> None:
    """Writes the list of a pack.

    Args:
        libraries: maps our names of the packed modules to FlashInfer's.
        python_version: that the pack is for.
    """
    content = {"python": python_version, "modules": dict(libraries)}
    (site / LIST_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_list(site: Path) -> dict[str, str]:
    """The `libraries` that `write_list` was given."""
    content = json.loads((site / LIST_NAME).read_text(encoding="utf-8"))
    return dict(content["modules"])


def missing_modules() -> list[str]:
    """Our names of the modules that FlashInfer finds no prebuilt library of, in the order of
    `kernel_modules.MODULES`.

    Raises ConfigurationError where FlashInfer cannot be used.
    """
    with building_kernels():
        return [name for name, make in module_makers().items() if not make().is_aot]


def prebuilt_libraries() -> dict[str, Path]:
    """The libraries that FlashInfer finds prebuilt, by our names of their modules.

    Raises ConfigurationError where FlashInfer cannot be used.
    """
    with building_kernels():
        specs = {name: make() for name, make in module_makers().items()}
        return {name: spec.aot_path for name, spec in specs.items() if spec.is_aot}


def name_missing(session: Session) -> None:
    """Names what is missing before anything is measured, where nothing may be compiled."""
    if session.is_rehearsal or not os.environ.get(_PREBUILT_ONLY):
        return
    missing = missing_modules()
    for name in missing:
        session.skip(f"what calls {name}", "the pack has no such module")
    if not missing:
        session.say(f"all {len(module_makers())} modules are there")
