"""Lets every Python of an environment import torchvision beside a CPU build of torch.

`python -m sgl_pipeline.managers.torchvision_hook` copies this module into site-packages,
under a name of its own, and has it run whenever a Python of the environment starts. The copy must
not import `sgl_pipeline` then: a Python that is started in another work tree would never take the
package from there. When torchvision is imported, as `import sglang` may do, `torchvision_shim` runs
first.
"""

import importlib.abc
import importlib.machinery
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

COPY_NAME = "sgl_pipeline_torchvision"


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
    shutil.copyfile(__file__, directory / f"{COPY_NAME}.py")
    file = directory / f"{COPY_NAME}.pth"
    file.write_text(f"import {COPY_NAME}; {COPY_NAME}.install_hook()\n")
    return file


if __name__ == "__main__":
    write_path_file(Path(sysconfig.get_path("purelib")))
