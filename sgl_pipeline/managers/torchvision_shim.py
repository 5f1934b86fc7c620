"""Lets `import torchvision` succeed beside a CPU build of torch.

`import sglang` imports torchvision, whose registry wheel is compiled for CUDA: its operators cannot
load next to a CPU torch, and its Python half then refuses to import. Every process that imports
sglang must call it before; it must never touch an installation whose operators load.
"""

import importlib.machinery
import importlib.util

import torch

# The operators that torchvision's Python half names while it is imported; nothing here calls them.
_BARE_SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# Its compiled extension: the first name up to torchvision 0.28, the second from 0.29 on.
_EXTENSIONS = ("_C", "_C_stable")


def install_torchvision_shim() -> bool:
    """Defines bare operator schemas where torchvision's own cannot load; idempotent.

    Returns whether the replacements are in use. A call of one still fails: they have no kernel.
    """
    package = importlib.util.find_spec("torchvision")
    if package is None or _loads_own_operators(package):
        return False
    for name, schema in _BARE_SCHEMAS.items():
        namespace, operator = name.split("::")
        if not hasattr(getattr(torch.ops, namespace), operator):
            torch.library.define(name, schema)
    return True


def _loads_own_operators(package: importlib.machinery.ModuleSpec) -> bool:
    """True if torchvision's compiled extension is there and fits this torch."""
    loaders = (
        importlib.machinery.ExtensionFileLoader,
        importlib.machinery.EXTENSION_SUFFIXES,
    )
    for directory in package.submodule_search_locations or ():
        finder = importlib.machinery.FileFinder(directory, loaders)
        for extension in map(finder.find_spec, _EXTENSIONS):
            if extension is None or extension.origin is None:
                continue
            try:
                torch.ops.load_library(extension.origin)
            except OSError:
                return False
            return True
    return False
