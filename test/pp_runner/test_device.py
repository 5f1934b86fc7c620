"""Backends by name, pinning, and how many pages fit; all on a machine without a GPU."""

import os
from pathlib import Path

import pytest
import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.messages import StageAssignment
from sgl_pipeline.pp_runner.attention.backend import AttentionShape
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.device import (
    DEFAULT_CPU_KV_TOKENS,
    BackendChoice,
    choose_attention_backend,
    choose_layer_kernels,
    kv_page_capacity,
    make_attention_backend,
    make_layer_kernels,
    open_device,
    pin_threads,
)
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model_spec import model_spec
from sgl_pipeline.stage_plan import StagePlan

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SPEC = model_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
)


def shape(device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> AttentionShape:
    return SPEC.attention_shape(16, dtype, device)


def assignment(max_total_tokens: int | None, page_size: int = 16) -> StageAssignment:
    return StageAssignment(
        stage=1,
        plan=StagePlan(0, (4, 2)),
        model_path="",
        load_format="dummy",
        dtype="float32",
        device="cpu",
        attention_backend="auto",
        layer_kernels="auto",
        page_size=page_size,
        max_total_tokens=max_total_tokens,
        memory_fraction=0.8,
        links=(),
        cpu_threads=1,
        cpu_cores=(),
    )


def test_auto_is_flashinfer_on_a_gpu():
    assert choose_attention_backend("auto", shape(CUDA)) == BackendChoice("flashinfer")


def test_auto_without_a_compiler_is_torch_with_a_notice(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    choice = choose_attention_backend("auto", shape())
    assert choice.name == "torch"
    assert "no-such-compiler" in choice.notice


def test_cpu_without_a_compiler_is_an_error_and_not_a_fallback(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match="compiler"):
        make_attention_backend(BackendChoice("cpu"), shape())


@pytest.mark.parametrize(
    ("name", "device", "named"),
    [
        ("flashinfer", CPU, "flashinfer needs --device cuda"),
        ("cpu", CUDA, "cpu needs --device cpu"),
        ("triton", CPU, "'triton' is unknown; choose from auto, flashinfer, cpu, torch"),
    ],
)
def test_a_backend_that_cannot_run_there_is_refused(name, device, named):
    with pytest.raises(ConfigurationError, match=named):
        choose_attention_backend(name, shape(device))


def test_the_compiled_kernels_refuse_fp16_and_auto_goes_to_torch():
    with pytest.raises(ConfigurationError, match=r"float16.*--stage-attention-backend torch"):
        choose_attention_backend("cpu", shape(dtype=torch.float16))
    choice = choose_attention_backend("auto", shape(dtype=torch.float16))
    assert choice.name == "torch"
    assert "float16" in choice.notice


def test_torch_is_made_when_asked_for():
    assert isinstance(make_attention_backend(BackendChoice("torch"), shape()), TorchAttention)


@pytest.mark.compiler
def test_layer_kernels_are_compiled_on_a_cpu_and_flashinfers_on_a_gpu():
    for name in ("auto", "cpu"):
        choice = choose_layer_kernels(name, torch.bfloat16, CPU)
        assert choice == BackendChoice("cpu")
        assert isinstance(make_layer_kernels(choice), CompiledKernels)
    for choice in (
        choose_layer_kernels("torch", torch.bfloat16, CPU),
        choose_layer_kernels("auto", torch.float32, CUDA),
    ):
        assert choice == BackendChoice("torch")
        assert isinstance(make_layer_kernels(choice), TorchKernels)
    for name in ("auto", "flashinfer"):
        choice = choose_layer_kernels(name, torch.bfloat16, CUDA)
        assert choice == BackendChoice("flashinfer")


def test_layer_kernels_that_cannot_be_had_are_named(monkeypatch):
    with pytest.raises(ConfigurationError, match="cpu needs --device cpu, this is cuda"):
        choose_layer_kernels("cpu", torch.bfloat16, CUDA)
    with pytest.raises(ConfigurationError, match="flashinfer needs --device cuda, this is cpu"):
        choose_layer_kernels("flashinfer", torch.bfloat16, CPU)
    with pytest.raises(ConfigurationError, match=r"no layer kernels for torch.float32.*torch"):
        choose_layer_kernels("flashinfer", torch.float32, CUDA)
    with pytest.raises(ConfigurationError, match="'triton' is unknown; choose from auto"):
        choose_layer_kernels("triton", torch.float32, CPU)
    with pytest.raises(ConfigurationError, match=r"float16.*--stage-kernels torch"):
        choose_layer_kernels("cpu", torch.float16, CPU)
    assert "float16" in choose_layer_kernels("auto", torch.float16, CPU).notice
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match="no-such-compiler"):
        choose_layer_kernels("cpu", torch.float32, CPU)
    choice = choose_layer_kernels("auto", torch.float32, CPU)
    assert choice.name == "torch" and "no-such-compiler" in choice.notice


def test_devices_that_are_not_there_are_refused():
    assert open_device("cpu", 3) == CPU
    with pytest.raises(ConfigurationError, match="'tpu' is not supported"):
        open_device("tpu", 0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="use --device cpu"):
            open_device("cuda", 0)


def test_a_core_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match="9999"):
        pin_threads(1, (9999,))


def test_threads_and_cores_are_set():
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        pin_threads(1, (min(cores),))
        assert os.sched_getaffinity(0) == {min(cores)}
        assert torch.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def test_capacity_on_a_cpu_is_a_fixed_size_or_what_was_asked_for():
    default = kv_page_capacity(assignment(None), SPEC, CPU, torch.float32)
    assert default.num_pages * 16 == DEFAULT_CPU_KV_TOKENS
    # Two layers of keys and values for 16 tokens, 2 heads of 8 fp32 numbers.
    assert default.page_bytes == 2 * 2 * 16 * 2 * 8 * 4
    assert kv_page_capacity(assignment(100), SPEC, CPU, torch.float32).num_pages == 6


def test_less_than_a_page_names_the_knobs():
    with pytest.raises(ConfigurationError, match=r"--max-total-tokens 15 .* --page-size"):
        kv_page_capacity(assignment(15), SPEC, CPU, torch.float32)


def test_more_than_memory_holds_names_the_limit_and_the_knob():
    with pytest.raises(ConfigurationError, match=r"room for \d+ MiB.*lower --max-total-tokens"):
        kv_page_capacity(assignment(10**13), SPEC, CPU, torch.float32)


def test_only_device_and_backend_leaves_know_of_cuda():
    package = Path(__file__).parents[2] / "sgl_pipeline" / "pp_runner"
    askers = [path.name for path in package.glob("*.py") if "torch.cuda." in path.read_text()]
    assert set(askers) <= {"device.py"}
