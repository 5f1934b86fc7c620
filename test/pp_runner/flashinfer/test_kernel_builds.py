"""What FlashInfer finds when it compiles, and the one line that a user gets when it cannot."""

import os
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.bare_machine import BareMachine
from support.fake_flashinfer import FakeFlashInferFunctions, Fakes
from support.paged_attention import attention_shape

from benchmark.gpu.shapes import spec_of
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner import kernel_choice
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.cuda.first_calls import call_layer_kernels, plan_decode_and_prefill
from sgl_pipeline.pp_runner.cuda.graphed_layers import DECODE_ROWS
from sgl_pipeline.pp_runner.flashinfer import kernel_builds
from sgl_pipeline.pp_runner.flashinfer.flashinfer_kernels import (
    FlashInferFunctions,
    FlashInferKernels,
)
from sgl_pipeline.pp_runner.flashinfer.kernel_builds import building_kernels
from sgl_pipeline.pp_runner.kernel_choice import (
    BackendChoice,
    make_attention_backend,
    make_layer_kernels,
)
from sgl_pipeline.pp_runner.layer_kernels.row_rounding import TorchRowRounding

SHAPE = AttentionShape(
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=64,
    value_dim=64,
    page_size=16,
    scale=0.125,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
)
# nvcc's complaint about headers of another release, inside what ninja prints.
NINJA_OUTPUT = """Ninja build failed. Ninja output:
[1/2] /opt/bin/nvcc -Xcompiler -Werror=switch -c norm.cu -o norm.o
FAILED: [code=2] norm.o
cuda_toolkit.h:41:6: error: #error "CUDA compiler and CUDA toolkit headers are incompatible"
1 error detected in the compilation of "norm.cu".
ninja: build stopped: subcommand failed.
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BareMachine:
    """One where pip's toolkit is the only one."""
    machine = BareMachine(tmp_path, monkeypatch)
    find_toolkit = kernel_builds.find_toolkit
    monkeypatch.setattr(
        kernel_builds, "find_toolkit", lambda cache: find_toolkit(cache, machine.no_toolkit)
    )
    return machine


def furnish(machine: BareMachine) -> None:
    machine.add_compiler()
    machine.add_command("ninja")
    machine.add_wheels()


def one_line(error: BaseException) -> str:
    message = str(error)
    assert message.startswith("FlashInfer cannot be used: ")
    assert message.endswith(", or choose --stage-attention-backend torch --stage-kernels torch")
    assert "\n" not in message
    return message


@pytest.mark.compiler
def test_flashinfer_finds_pips_toolkit_and_the_norm_that_is_tested(machine: BareMachine) -> None:
    furnish(machine)
    with building_kernels():
        assert Path(os.environ["CUDA_HOME"]).parent == machine.cache
        assert os.environ["FLASHINFER_USE_CUDA_NORM"] == "1"
    with building_kernels():  # the second import finds what the first one set
        assert Path(os.environ["CUDA_HOME"]).parent == machine.cache


def test_the_users_own_settings_stay(machine: BareMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("c++", "gcc", "ninja"):
        machine.add_command(name)
    path = os.environ["PATH"]
    monkeypatch.setenv("CUDA_HOME", "/somewhere/cuda")
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "0")
    with building_kernels():
        assert os.environ["CUDA_HOME"] == "/somewhere/cuda"
        assert os.environ["FLASHINFER_USE_CUDA_NORM"] == "0"
        assert os.environ["PATH"] == path


def test_ninja_is_found_where_pip_puts_it(
    machine: BareMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("c++", "gcc"):
        machine.add_command(name)
    monkeypatch.setenv("CUDA_HOME", "/somewhere/cuda")
    scripts = machine.root / "scripts"
    scripts.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", {"scripts": str(scripts)}.get)
    with (
        pytest.raises(ConfigurationError, match="pip install ninja") as caught,
        building_kernels(),
    ):
        pass
    one_line(caught.value)
    (scripts / "ninja").touch(mode=0o700)
    with building_kernels():
        assert os.environ["PATH"].split(os.pathsep) == [str(machine.commands), str(scripts)]


def test_prebuilt_kernels_need_no_compiler(
    machine: BareMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with building_kernels():
        assert "CUDA_HOME" not in os.environ
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    (machine.site_packages / "flashinfer_jit_cache.py").touch()
    with building_kernels():
        assert "CUDA_HOME" not in os.environ


def test_a_missing_compiler_is_one_line_that_says_what_to_install(machine: BareMachine) -> None:
    def refused() -> str:
        with pytest.raises(ConfigurationError) as caught:
            make_attention_backend(BackendChoice("flashinfer"), SHAPE)
        with pytest.raises(ConfigurationError) as again:
            make_layer_kernels(BackendChoice("flashinfer"))
        assert str(again.value) == str(caught.value)
        return one_line(caught.value)

    assert "(c++); install g++" in refused()
    machine.add_command("c++")
    assert "(gcc); install g++" in refused()
    machine.add_command("gcc")
    machine.add_command("ninja")
    assert "no CUDA 13 toolkit" in refused()


def test_the_compilers_of_the_environment_are_looked_for(
    machine: BareMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(machine)
    monkeypatch.setenv("CXX", "g++-99 -m64")
    with (
        pytest.raises(ConfigurationError, match=r"g\+\+-99"),
        building_kernels(),
    ):
        pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(NINJA_OUTPUT), "compiler and CUDA toolkit headers are incompatible"),
        (RuntimeError("JIT compilation is disabled via FLASHINFER_DISABLE_JIT."), "_JIT, or"),
        (RuntimeError(), "RuntimeError"),
        (FileNotFoundError(2, "No such file or directory", "ninja"), "'ninja'"),
        (OSError("libcudart.so.13: cannot open shared object file"), "libcudart.so.13"),
        (ModuleNotFoundError("No module named 'flashinfer'"), "install requirements/cuda.txt"),
    ],
)
def test_what_flashinfer_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(ConfigurationError) as caught, building_kernels():
        raise error
    assert said in one_line(caught.value)


@pytest.mark.parametrize(
    "error",
    [ConfigurationError("no kernel for float32"), torch.OutOfMemoryError("80 GiB"), TypeError("q")],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(type(error)) as caught, building_kernels():
        raise error
    assert caught.value is error


def test_a_stage_that_starts_compiles_and_fails_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any request, and with the user's way out instead of a traceback."""

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    fakes = Fakes(SHAPE)
    fakes.prefill.plan = fail  # type: ignore[method-assign]
    monkeypatch.setattr(kernel_choice, "FlashInferAttention", lambda *_: fakes.attention)
    with pytest.raises(ConfigurationError) as caught:
        make_attention_backend(BackendChoice("flashinfer"), SHAPE)
    assert "no kernel image" in one_line(caught.value)

    monkeypatch.setattr(kernel_choice, "FlashInferKernels", lambda **options: object())
    monkeypatch.setattr(kernel_choice, "call_layer_kernels", fail)
    with pytest.raises(ConfigurationError) as caught:
        make_layer_kernels(BackendChoice("flashinfer"))
    assert "no kernel image" in one_line(caught.value)


def test_a_start_calls_every_function_of_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [name for name in vars(FlashInferFunctions) if not name.startswith("_")]
    called: set[str] = set()

    class Recorded(FakeFlashInferFunctions):
        def __getattribute__(self, name: str) -> object:
            called.add(name)
            return super().__getattribute__(name)

    call_layer_kernels(FlashInferKernels(Recorded), SHAPE)
    assert len(used) >= 4
    assert called >= set(used)


def test_a_start_opens_what_rounds_keys_and_values() -> None:
    """In the place of FlashInfer's append; where it is missing, the start says so."""

    def fail() -> TorchRowRounding:
        raise ConfigurationError("no triton")

    coded = replace(SHAPE, coded_dtype=torch.float8_e4m3fn)
    call_layer_kernels(FlashInferKernels(FakeFlashInferFunctions, TorchRowRounding), coded)
    with pytest.raises(ConfigurationError, match="no triton"):
        call_layer_kernels(FlashInferKernels(FakeFlashInferFunctions, fail), coded)
    call_layer_kernels(FlashInferKernels(FakeFlashInferFunctions, fail), SHAPE)


def test_a_start_plans_both_wrappers_with_what_they_can_compute() -> None:
    fakes = Fakes(SHAPE, has_split=True)
    plan_decode_and_prefill(fakes.attention, SHAPE)
    planned = [call for call in fakes.recorder.calls if "plan" in call]
    assert planned == ["plan decode", "plan split", "plan decode", "plan prefill"]
    pages = torch.randn(2, 1, 16, 2, 64).bfloat16()
    out = fakes.attention.attend(torch.ones(2, 4, 64).bfloat16(), pages[0], pages[1])
    assert torch.equal(out[0, ::2], pages[1, 0, 0])  # one key: attention is its value
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("query_heads", [8, 40, 48])
def test_a_start_plans_both_prefill_wrappers_whatever_the_pages_and_heads(
    page_size: int, query_heads: int
) -> None:
    """With more heads than these a tile of each keeps FA3 busy, and FA2 has no step."""
    shape = attention_shape(query_heads, 8, 64, page_size, torch.bfloat16)
    fakes = Fakes(shape, has_split=True)
    plan_decode_and_prefill(fakes.attention, shape)
    assert {"plan prefill", "plan split"} < {*fakes.recorder.calls}


def test_products_are_tried_with_the_rows_that_have_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[int, ...]] = []
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setattr(
        kernel_choice, "FlashInferKernels", lambda *, tried_rows: tried.append(tried_rows)
    )
    monkeypatch.setattr(kernel_choice, "call_layer_kernels", lambda *_: None)
    for model in ("Qwen3-0.6B", "Qwen3-14B"):
        make_layer_kernels(BackendChoice("flashinfer"), SHAPE, spec_of(model))
    assert [max(rows) for rows in tried] == [2304, 448]
    assert tried[1] == (*DECODE_ROWS, 64, 128, 192, 256, 320, 384, 448)
    make_layer_kernels(BackendChoice("flashinfer"), SHAPE)
    assert tried[2] == ()
