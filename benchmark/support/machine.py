"""Facts of the machine and the software that made a dated result.

Used by the benchmarks in this folder. Reads only; a fact that is not available is left out.
"""

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmark.support.paths import (
    LLAMA_CPP_VERSION,
    OPENVINO_DIRECTORY,
    ROOT,
    VLLM_DIRECTORY,
    ZENTORCH_DIRECTORY,
)

_PACKAGES = ("sgl_pipeline", "sglang", "torch", "transformers", "flashinfer-python")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")

# Of the environments of other engines.
_PEER_PACKAGES = (
    (VLLM_DIRECTORY, "vllm"),
    (ZENTORCH_DIRECTORY, "zentorch"),
    (OPENVINO_DIRECTORY, "openvino_genai"),
)


def describe_machine() -> dict[str, str]:
    """CPU model, usable cores, vector features, memory, kernel, and the GPUs where there are."""
    facts = {
        "cores": str(len(usable_cores())),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load_average_15_min": f"{os.getloadavg()[2]:.1f}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
        facts["cpu"] = fields.get("model name", "unknown")
        flags = fields.get("flags", "").split()
        facts["cpu_features"] = " ".join(name for name in _CPU_FEATURES if name in flags)
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return facts | ({"gpus": "; ".join(gpus.splitlines())} if gpus else {})


def describe_software() -> dict[str, str]:
    """Versions of Python and the packages that matter, and the commit, `+changes` if edited."""
    facts = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    for directory, package in _PEER_PACKAGES:
        for folder in directory.glob(f"lib/python3*/site-packages/{package}-*.dist-info"):
            facts[package] = folder.name.removeprefix(f"{package}-").removesuffix(".dist-info")
    with contextlib.suppress(OSError):
        facts["llama.cpp"] = f"of {LLAMA_CPP_VERSION.read_text(encoding='utf-8').strip()}"
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    if commit:
        edited = _output("git", "-C", str(ROOT), "status", "--porcelain")
        facts["commit"] = commit + ("+changes" if edited else "")
    return facts


def usable_cores() -> list[int]:
    """Ids of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def _output(*command: str) -> str:
    """The output of the command, or nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
