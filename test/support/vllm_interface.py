"""vLLM's attention interface on a machine without a GPU: as it is called, and what it computes.

The real one, from a pack on PYTHONPATH, runs over an empty driver; its two operators get kernels
for CPUs. Written against vLLM 0.25.1.
"""

import ctypes
import importlib
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmark.gpu.vllm_attention import MODULE
from sgl_pipeline.pp_runner.cpu_kernels.build import find_compiler

_OPERATORS = "_vllm_fa3_C"
_DRIVER = "int cuTensorMapEncodeTiled(void) { return 100; /* CUDA_ERROR_NO_DEVICE */ }"


def attend_by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Causal attention, [T, Hq, D], where a chunk's last row sees all its keys."""
    rows, group = [], q.shape[1] // k.shape[2]
    for chunk, num_keys in enumerate(seqused_k.tolist()):
        queries = q[cu_seqlens_q[chunk] : cu_seqlens_q[chunk + 1]].float()
        keys, values = (
            pages[page_table[chunk].long()].flatten(0, 1)[:num_keys].repeat_interleave(group, 1)
            for pages in (k.float(), v.float())
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(num_keys - len(queries) + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(rows).to(q.dtype)


class OperatorCalls:
    """The arguments of the last call of each operator, by their names in its schema."""

    def __init__(self) -> None:
        self.schedule: dict[str, Any] = {}
        self.forward: dict[str, Any] = {}
        operators = getattr(torch.ops, _OPERATORS)
        self._names = {
            name: [each.name for each in getattr(operators, name).default._schema.arguments]
            for name in ("get_scheduler_metadata", "fwd")
        }
        self._library = torch.library.Library(_OPERATORS, "IMPL")
        self._library.impl("get_scheduler_metadata", self._take_schedule, "CPU")
        self._library.impl("fwd", self._take_forward, "CPU")

    def _take_schedule(self, *arguments: Any) -> torch.Tensor:
        self.schedule = dict(zip(self._names["get_scheduler_metadata"], arguments, strict=False))
        return torch.zeros(4, dtype=torch.int32)

    def _take_forward(self, *arguments: Any) -> list[torch.Tensor]:
        self.forward = given = dict(zip(self._names["fwd"], arguments, strict=False))
        names = ("cu_seqlens_q", "seqused_k", "page_table", "softmax_scale")
        result = attend_by_definition(
            given["q"], given["k"], given["v"], **{name: given[name] for name in names}
        )
        given["out"].copy_(result)
        nothing = torch.empty(0)
        return [given["out"], nothing, nothing, nothing]


def import_vllm_interface(scratch: Path) -> ModuleType:
    """The pack's; skips the test where there is none.

    Args:
        scratch: for an empty driver, where the machine has none.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("python -m benchmark.gpu.pack_vllm_attention packs it; nothing on PYTHONPATH")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        _load_empty_driver(scratch)
    return importlib.import_module(MODULE)


def _load_empty_driver(scratch: Path) -> None:
    source, library = scratch / "driver.c", scratch / "libcuda.so.1"
    source.write_text(_DRIVER)
    flags = ["-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*find_compiler(), *flags, str(source), "-o", str(library)], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
