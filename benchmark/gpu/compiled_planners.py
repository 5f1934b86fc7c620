"""Links FlashInfer's planners, which run on the host, for a machine without a GPU.

A planner decides before each step how a card's blocks share the work. Here it is the library's own
compiled code over `cudart_standin.c` in the place of CUDA's runtime; kernels are left out where the
planner asks nothing of them. Called by `check_cuda.py` and its tests.
"""

import subprocess
from pathlib import Path

from benchmark.gpu.kernel_modules import (
    FOLDER,
    Build,
    Progress,
    compile_host_part,
    compile_module,
    module_makers,
    objects_of,
)
from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner.cpu_kernels.build import find_compiler

_STANDIN = Path(__file__).with_name("cudart_standin.c")
# The decode planner asks how many blocks of its kernel a multiprocessor holds: it takes the
# kernel's address, which must be there when the library is loaded.
_WITH_KERNELS = ("decode-128", "decode-128-e4m3")
PLANNERS = (*_WITH_KERNELS, "prefill-fa2-128", "prefill-fa2-128-e4m3", "prefill-fa3-128")


def build_planner(name: str, folder: Path = FOLDER, progress: Progress = print) -> Build:
    """Compiles what is missing of planner `name` and links it to where `planner_folder` says.

    Raises KernelBuildError.
    """
    if name in _WITH_KERNELS:
        build = compile_module(name, progress)
        objects = list(objects_of(module_makers()[name]()).values())
    else:
        build, objects = compile_host_part(name, progress)
    library = planner_folder(folder) / build.library_name / f"{build.library_name}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    standin = library.with_name("cudart_standin.o")
    _compile([*find_compiler(), "-x", "c", "-O1", "-fPIC", "-c", str(_STANDIN), "-o", str(standin)])
    # Bound to the stand-in inside, also in a process that has loaded the real runtime; and lazily,
    # for nothing that is left out is ever called.
    flags = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,lazy"]
    _compile([*find_compiler(), *flags, *map(str, objects), str(standin), "-o", str(library)])
    return build


def planner_folder(folder: Path = FOLDER) -> Path:
    """The folder of the planners, each as `NAME/NAME.so`, as FlashInfer wants its prebuilt
    libraries."""
    return folder / "planners"


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KernelBuildError(f"{command[0]} failed: {done.stderr.strip()}")
