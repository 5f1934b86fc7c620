"""Lets every Python of an environment import torchvision beside a CPU build of torch.

`python -m sgl_pipeline.managers.torchvision_hook` writes a file into site-packages that imports
this module whenever a Python of the environment starts. It imports nothing more until torchvision
is imported, as `import sglang` may do, and then runs `torchvision_shim` first.
"""

import importlib.abc
import importlib.machinery
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

FILE_NAME = "sgl_pipeline_torchvision.pth"


class _ShimBeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing itself; it is asked first, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

            install_torchvision_shim()
        return None


def install_hook() -> None:
    """Puts the finder before all others."""
    sys.meta_path.insert(0, _ShimBeforeTorchvision())


def write_path_file(directory: Path) -> Path:
    """The file by which `site` runs `install_hook` at the start of each Python."""
    file = directory / FILE_NAME
    file.write_text(f"import {__spec__.name} as hook; hook.install_hook()\n")
    return file


if __name__ == "__main__":
    write_path_file(Path(sysconfig.get_path("purelib")))
