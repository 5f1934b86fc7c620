"""What Triton's kernels round has the bits of plain torch, and they compile for cards.

Here their arithmetic runs in Triton's interpreter, which knows no fused multiplication and
addition: that cards do not use them is seen in what is compiled.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rounding_cases import CASES

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.layer_kernels.row_rounding import TorchRowRounding, open_row_rounding

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
HOPPER, AMPERE = 90, 80


@pytest.mark.multiproc
def test_codes_have_the_bits_of_plain_torch_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    places = (str(ROOT), str(ROOT / "test"), os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(places)
    command = [sys.executable, "-m", "support.rounding_cases"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_codes_have_the_bits_of_plain_torch_on_a_gpu(case: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    CASES[case](torch.device("cuda"))


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize("kind", ["fp8 rows", "int8 rows", "pages"])
def test_the_kernels_compile_for_cards_and_fuse_nothing(
    kind: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the compiler and assembler of Triton's wheel, which need no card."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_kernel(kind, capability)
    code = compiled.asm["ptx"]
    assert f".target sm_{capability}" in code and compiled.asm["cubin"]
    assert "fma" not in code
    assert ("div.rn.f32" in code) is (kind != "pages"), "a division that is no approximation"


def compile_kernel(kind: str, capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sgl_pipeline.pp_runner.layer_kernels import triton_rounding

    if kind == "pages":
        kernel, constants = triton_rounding.append_e4m3, {"BLOCK": 1024}
        pointers = {"key": "*bf16", "value": "*bf16", "key_pages": "*u8", "value_pages": "*u8"}
        types = {**pointers, "slots": "*i64"}
    else:
        kernel, is_int8 = triton_rounding.round_groups, kind == "int8 rows"
        types = {"x": "*bf16", "values": "*i8" if is_int8 else "*u8", "scales": "*fp32"}
        constants = {"LARGEST": 127.0 if is_int8 else 448.0, "IS_INT8": is_int8, "BLOCK": 4096}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    return triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 8, "enable_fp_fusion": triton_rounding.FUSES},
    )


def test_a_cpu_rounds_in_plain_torch() -> None:
    assert isinstance(open_row_rounding(CPU), TorchRowRounding)


def test_a_card_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(
        sys.modules, "sgl_pipeline.pp_runner.layer_kernels.triton_rounding", raising=False
    )
    with pytest.raises(ConfigurationError, match=r"Triton.*install triton.*--stage-kernels torch"):
        open_row_rounding(torch.device("cuda"))


def test_a_card_on_which_triton_cannot_compile_is_told_so() -> None:
    """A CPU build of torch has no card at all."""
    if torch.cuda.is_available():
        pytest.skip("for machines without a card")
    with pytest.raises(ConfigurationError, match=r"Triton.*cannot be used") as caught:
        open_row_rounding(torch.device("cuda"))
    assert "\n" not in str(caught.value)
