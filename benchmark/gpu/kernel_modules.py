"""Compiles the FlashInfer modules that a stage calls on a card, file by file, with pip's nvcc.

Called by `build_kernels.py`, which packs them, and `check_cuda.py` and its tests, which look at
what was compiled. What is built stays: a second call compiles only what is missing. FlashInfer
reads its settings when it is imported, so `prepare` must come before that.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmark.gpu.kernel_wheels import ROOT, install_compiler
from sgl_pipeline.errors import ConfigurationError, KernelBuildError
from sgl_pipeline.pp_runner.flashinfer.toolkit import linked_toolkit, pip_toolkit

FOLDER = ROOT / "build" / "cuda-kernels"
ARCHITECTURE = "9.0a"  # Hopper: H100, H200
HEAD_DIMS = (128, 64)
_E4M3_DIM = 128  # of the modules for e4m3 keys and values
_DTYPE, _INDEX, _E4M3 = torch.bfloat16, torch.int32, torch.float8_e4m3fn
_LOG_LINES = 20  # of a failed compilation, in the error

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Build:
    """One module after compilation; `cpu_s` and `wall_s` are what this call took, so they say
    nothing about a module of which `compiled_files` were not all."""

    name: str
    library_name: str
    library: Path
    num_files: int
    compiled_files: int
    wall_s: float
    cpu_s: float


def prepare(folder: Path = FOLDER, architecture: str = ARCHITECTURE) -> Path:
    """Installs compiler and headers into `folder` and sets this process's environment for them.

    Returns the root of the toolkit: links to pip's wheels, whatever else the machine has.
    Raises ConfigurationError when FlashInfer was imported before.
    """
    if "flashinfer" in sys.modules:
        raise ConfigurationError("flashinfer was imported before its kernels' folder was chosen")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    wheels = install_compiler(folder)
    sys.path.insert(0, str(wheels))
    compiler = pip_toolkit()
    if compiler is None:
        raise ConfigurationError(f"there is no nvidia/cu13/bin/nvcc in {wheels}; remove {folder}")
    toolkit = linked_toolkit(compiler, folder)
    os.environ["CUDA_HOME"] = str(toolkit)
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(folder)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = architecture
    os.environ["FLASHINFER_LOGGING_LEVEL"] = "warning"
    # nvcc and linker must be those of the toolkit and the machine, not of the caller's variables.
    for name in ("FLASHINFER_NVCC", "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS"):
        os.environ.pop(name, None)
    return toolkit


def module_makers() -> dict[str, Callable[[], Any]]:
    """Maps our name of each module to what makes its `JitSpecNvcc`; cheapest to compile first."""
    import flashinfer.jit as jit
    import flashinfer.jit.attention.modules as attention
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.rope import gen_rope_module

    def decode(dim: int, kv_dtype: torch.dtype = _DTYPE) -> Any:
        return attention.gen_batch_decode_module(
            _DTYPE, kv_dtype, _DTYPE, _INDEX, dim, dim, 0, False, False
        )

    def prefill(backend: str, dim: int, kv_dtype: torch.dtype = _DTYPE) -> Any:
        # FA2 has several forms; this is the one that `get_batch_prefill_module` loads.
        make = (
            attention._gen_batch_prefill_primary_module
            if backend == "fa2"
            else attention.gen_batch_prefill_module
        )
        return make(backend, _DTYPE, kv_dtype, _DTYPE, _INDEX, dim, dim, 0, False, False, False)

    makers: dict[str, Callable[[], Any]] = {
        "silu_and_mul": partial(jit.gen_act_and_mul_module, "silu"),
        "page": gen_page_module,
        "norm": gen_norm_module,
        "rope": gen_rope_module,
    }
    for dim in HEAD_DIMS:
        makers[f"decode-{dim}"] = partial(decode, dim)
    for backend in ("fa2", "fa3"):
        for dim in HEAD_DIMS:
            makers[f"prefill-{backend}-{dim}"] = partial(prefill, backend, dim)
    # FA3 has none.
    makers[f"decode-{_E4M3_DIM}-e4m3"] = partial(decode, _E4M3_DIM, _E4M3)
    makers[f"prefill-fa2-{_E4M3_DIM}-e4m3"] = partial(prefill, "fa2", _E4M3_DIM, _E4M3)
    return makers


MODULES = (
    *("silu_and_mul", "page", "norm", "rope"),
    *(f"decode-{dim}" for dim in HEAD_DIMS),
    *(f"prefill-{backend}-{dim}" for backend in ("fa2", "fa3") for dim in HEAD_DIMS),
    *(f"{kernels}-{_E4M3_DIM}-e4m3" for kernels in ("decode", "prefill-fa2")),
)


def compile_module(name: str, progress: Progress = print) -> Build:
    """Compiles and links module `name`. Raises KernelBuildError with the compiler's words."""
    spec = module_makers()[name]()
    spec.write_ninja()
    num_files = len(objects_of(spec))
    return build_targets(name, spec, [spec.jit_library_path], num_files, progress)


def compile_host_part(name: str, progress: Progress = print) -> tuple[Build, list[Path]]:
    """Compiles a module without its kernels: the planner and its binding.

    Returns the object files too; there is no library. Raises KernelBuildError.
    """
    spec = module_makers()[name]()
    spec.write_ninja()
    objects = [o for source, o in objects_of(spec).items() if "_kernel_mask_" not in source.name]
    return build_targets(name, spec, objects, len(objects), progress), objects


def objects_of(spec: Any) -> dict[Path, Path]:
    """Maps the CUDA sources of a module to the object files that its ninja file makes of them."""
    rules = re.findall(r"^build (\S+): cuda_compile (\S+)$", spec.ninja_path.read_text(), re.M)
    return {Path(source): Path(target) for target, source in rules}


def build_targets(
    name: str, spec: Any, targets: Sequence[Path], num_files: int, progress: Progress = print
) -> Build:
    """Makes ninja build the targets, of which `num_files` are compiled in a fresh folder.

    Args:
        spec: a `JitSpecNvcc` of FlashInfer whose ninja file is written.

    Raises KernelBuildError with the compiler's words.
    """
    before_s, before_cpu_s = time.monotonic(), _children_cpu_s()
    compiled = _run_ninja(name, spec, targets, progress)
    build = Build(
        name=name,
        library_name=spec.name,
        library=spec.jit_library_path,
        num_files=num_files,
        compiled_files=compiled,
        wall_s=time.monotonic() - before_s,
        cpu_s=_children_cpu_s() - before_cpu_s,
    )
    done = f"{compiled} of {num_files} files compiled" if compiled else "was built"
    progress(f"{name}: {done}, {build.wall_s:.1f} s ({build.cpu_s:.1f} s of CPU time)")
    return build


def _run_ninja(name: str, spec: Any, targets: Sequence[Path], progress: Progress) -> int:
    """Builds the targets with as many jobs as `MAX_JOBS` says; returns how many files it compiled.

    Reports each file as it starts, for a single one may take minutes.
    """
    ninja = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
    if ninja is None:
        raise KernelBuildError("there is no ninja; install it (pip install ninja)")
    jobs = os.environ.get("MAX_JOBS", "")
    command = [ninja, "-v", "-C", str(spec.build_dir), "-f", str(spec.ninja_path)]
    command += [f"-j{jobs}"] if jobs.isdigit() else []
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    lines, compiled = [], 0
    with subprocess.Popen(
        [*command, *map(str, targets)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            step = re.match(r"\[(\d+)/(\d+)\] .* -c (\S+)", line)
            if step:
                compiled += 1
                progress(f"{name}: {step[1]} of {step[2]}, {Path(step[3]).name}")
    log = spec.build_dir / "build.log"
    log.write_text("".join(lines), encoding="utf-8")
    if process.returncode != 0:
        raise KernelBuildError(
            f"{name} does not compile:\n{_first_errors(lines)}\nall of it: {log}"
        )
    return compiled


def _first_errors(lines: Sequence[str]) -> str:
    """The first lines that name an error, or else the last ones of all; no compiler commands."""
    plain = [line.rstrip()[:300] for line in lines if " -c " not in line]
    errors = [line for line in plain if re.search(r"\berror\b|cannot find|No such file", line)]
    return "\n".join(errors[:_LOG_LINES] or plain[-_LOG_LINES:])


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
