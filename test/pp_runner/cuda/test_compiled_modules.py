"""pip's nvcc compiles FlashInfer's modules for a card, and each loads and answers.

Slow, and in need of wheels that the CPU set lacks: `make check-cuda` runs it.
"""

import re
import subprocess

import pytest
import torch
from support.compiled_kernels import cuda_toolkit, load_module, run_by_check_cuda

from benchmark.gpu.kernel_modules import MODULES, module_makers

pytestmark = [pytest.mark.cuda_toolkit, pytest.mark.slow, run_by_check_cuda]

ROWS = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
WIDE = torch.zeros(4, 256, dtype=torch.bfloat16)
PAGES = torch.zeros(2, 16, 2, 128, dtype=torch.bfloat16)
INDEX = torch.zeros(4, dtype=torch.int32)
TABLE = torch.zeros(5, 128)
BYTES = torch.zeros(1 << 20, dtype=torch.uint8)
NONE = torch.empty(0, dtype=torch.bfloat16)
NONE_E4M3 = torch.empty(0, dtype=torch.float8_e4m3fn)

WANTS_CUDA = "must be a CUDA tensor"
# These do not look where a tensor lies; the CUDA runtime stops them.
NO_DEVICE = "CUDA driver version is insufficient|no CUDA-capable device"
Call = tuple[str, tuple[object, ...], str]  # function, arguments, the error's message


def decode_plan(dim: int, keys: torch.Tensor) -> Call:
    sizes = (3, 2, 2, 16, True, -1, 0.0, dim, dim)
    return "plan", (BYTES, BYTES, BYTES, INDEX, *sizes, NONE, keys), NO_DEVICE


def prefill_plan(dim: int, *of_fa2: object) -> Call:
    sizes = (3, 3, 2, 2, 16, False, dim, dim, True, -1)
    return "plan", (BYTES, BYTES, BYTES, INDEX, INDEX, INDEX, *sizes, *of_fa2), NO_DEVICE


CALLS = {
    "page": (
        "append_paged_kv_cache",
        (ROWS, ROWS, INDEX, INDEX, PAGES, PAGES, INDEX, INDEX, INDEX, 0),
        WANTS_CUDA,
    ),
    "silu_and_mul": ("silu_and_mul", (WIDE[:, :128], WIDE, False), NO_DEVICE),
    "rope": (
        "apply_rope_pos_ids_cos_sin_cache",
        (ROWS, ROWS, ROWS, ROWS, TABLE, INDEX, False),
        WANTS_CUDA,
    ),
    "norm": ("rmsnorm", (WIDE, WIDE, WIDE[0], 1e-6, False), WANTS_CUDA),
    "decode-128": decode_plan(128, NONE),
    "decode-64": decode_plan(64, NONE),
    "decode-128-e4m3": decode_plan(128, NONE_E4M3),
    "prefill-fa2-128": prefill_plan(128, -1, False, 0, 0),
    "prefill-fa2-64": prefill_plan(64, -1, False, 0, 0),
    "prefill-fa2-128-e4m3": prefill_plan(128, -1, False, 0, 0),
    "prefill-fa3-128": prefill_plan(128),
    "prefill-fa3-64": prefill_plan(64),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_module_compiles_loads_and_turns_tensors_of_the_cpu_away(name: str) -> None:
    function, arguments, message = CALLS[name]
    module = load_module(name)
    with pytest.raises(Exception, match=message):
        module[function](*arguments)


def test_compiler_and_headers_are_of_one_release() -> None:
    """CCCL refuses a compiler of another release than the runtime's headers."""
    toolkit = cuda_toolkit()
    version = subprocess.run(
        [toolkit / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True
    ).stdout
    compiler = re.search(r"release (\d+)\.(\d+),", version)
    headers = re.search(
        r"#define CUDART_VERSION\s+(\d+)", (toolkit / "include/cuda_runtime_api.h").read_text()
    )
    assert compiler and headers
    assert int(headers[1]) == int(compiler[1]) * 1000 + int(compiler[2]) * 10


def test_every_module_is_called() -> None:
    assert sorted(CALLS) == sorted(MODULES)


def test_every_module_of_a_pack_can_be_made() -> None:
    cuda_toolkit()
    makers = module_makers()
    assert sorted(makers) == sorted(MODULES)
    assert len({make().name for make in makers.values()}) == len(MODULES)
