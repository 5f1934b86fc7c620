"""Backends by name, on a machine without a GPU."""

from dataclasses import replace

import pytest
import torch
from support.instruction_sets import kernels_for
from support.quantized_models import FORMATS
from support.tiny_models import tiny_model

from sgl_pipeline.args import StageArgs
from sgl_pipeline.costs.stage_costs import TYPICAL_STEP
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner import cost_measurement, kernel_choice
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.cost_measurement import measure_part_costs
from sgl_pipeline.pp_runner.kernel_choice import (
    BackendChoice,
    GraphChoice,
    choose_attention_backend,
    choose_graphs,
    choose_layer_kernels,
    make_attention_backend,
    make_layer_kernels,
    quantization_notice,
)
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.weights.quantization_config import (
    choose_quantization,
    read_quantization,
)
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageAssignment

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def shape(device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> AttentionShape:
    return AttentionShape(
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=8,
        value_dim=8,
        page_size=16,
        scale=8**-0.5,
        dtype=dtype,
        device=device,
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


def test_prefill_kernels_without_flashinfers_attention_are_refused():
    with pytest.raises(ConfigurationError, match=r"fa3 chooses between.*attention is torch"):
        make_attention_backend(BackendChoice("torch"), shape(), "fa3")


def test_stages_and_their_measurement_hand_the_prefill_kernels_on(monkeypatch):
    """On a CPU, in the place of a GPU, both must end in the refusal."""
    monkeypatch.setattr(cost_measurement, "open_device", lambda name, index: torch.device("cpu"))
    assignment = StageAssignment(
        stage=0,
        plan=StagePlan(0, (2, 2)),
        args=StageArgs(
            model_path=str(tiny_model("qwen3")),
            load_format="dummy",
            dtype="float32",
            device="cuda",
            prefill_kernels="fa2",
            layer_kernels="torch",
        ),
        page_size=16,
        links=("",),
        cpu_threads=1,
        cpu_cores=(),
    )
    with pytest.raises(ConfigurationError, match="--stage-prefill-kernels fa2"):
        measure_part_costs(assignment, [TYPICAL_STEP])
    with pytest.raises(ConfigurationError, match="--stage-prefill-kernels fa2"):
        StageRunner(assignment, None, [shape()], 4, None)


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


def test_of_the_codes_a_gpu_has_e4m3_alone() -> None:
    e4m3 = replace(shape(CUDA, torch.bfloat16), coded_dtype=torch.float8_e4m3fn)
    for name, chosen in (("auto", "flashinfer"), ("flashinfer", "flashinfer"), ("torch", "torch")):
        assert choose_attention_backend(name, e4m3) == BackendChoice(chosen)
    coded = replace(shape(CUDA, torch.bfloat16), coded_dtype=torch.int8)
    for name in ("auto", "flashinfer", "torch"):
        with pytest.raises(ConfigurationError, match=r"int8 are for CPUs only.*--kv-cache-dtype"):
            choose_attention_backend(name, coded)


@pytest.mark.compiler
def test_slow_products_with_quantized_weights_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    int8 = choose_quantization("w8a8_int8", None, "lm_head")
    assert quantization_notice(BackendChoice("cpu"), None, torch.float16) == ""
    assert "kernels are torch" in quantization_notice(BackendChoice("torch"), int8, torch.bfloat16)
    assert "--dtype bfloat16" in quantization_notice(BackendChoice("cpu"), int8, torch.float32)
    old_machine = kernels_for("without AVX")
    monkeypatch.setattr(kernel_choice, "load_cpu_kernels", lambda: old_machine)
    int4 = read_quantization(FORMATS["awq"].config, "lm_head")
    rounding = choose_quantization("w4a8_int8", int4, "lm_head")
    fp8 = choose_quantization("fp8", None, "lm_head")
    mxfp4 = read_quantization({"quant_method": "mxfp4"}, "lm_head")
    every = (int8, int4, rounding, fp8, mxfp4)
    for one in every:
        notice = quantization_notice(BackendChoice("cpu"), one, torch.bfloat16)
        assert notice.endswith("avx2, fma and f16c")
    if kernels_for("native").has_int8_products:
        monkeypatch.setattr(
            kernel_choice, "load_cpu_kernels", lambda: kernels_for("without AVX-512")
        )
        for one in every:
            assert quantization_notice(BackendChoice("cpu"), one, torch.bfloat16) == ""


def test_quantized_weights_without_a_kernel_on_the_gpu_are_refused_by_name() -> None:
    fp8 = choose_quantization("fp8", None, "lm_head")

    def choose(name: str, capability: tuple[int, int]) -> BackendChoice:
        return choose_layer_kernels(name, torch.bfloat16, CUDA, fp8, lambda _: capability)

    for name in ("auto", "flashinfer"):
        assert choose(name, (8, 9)) == BackendChoice("flashinfer")
        with pytest.raises(
            ConfigurationError, match=r"of fp8 have no kernel here.*8\.0; --stage-kernels torch"
        ):
            choose(name, (8, 0))
    assert choose("torch", (8, 0)) == BackendChoice("torch")
    assert quantization_notice(BackendChoice("flashinfer"), fp8, torch.bfloat16) == ""


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_experts_take_graphs_only_where_their_groups_stay_on_the_gpu(dtype, capability):
    def choose(has_experts: bool) -> GraphChoice:
        return choose_graphs(
            "auto",
            BackendChoice("flashinfer"),
            [shape(CUDA, dtype)],
            has_experts,
            lambda _: capability,
        )

    assert choose(has_experts=False) == GraphChoice(True)
    stays = dtype == torch.bfloat16 and capability in [(9, 0), (10, 0), (10, 3)]
    choice = choose(has_experts=True)
    assert choice.is_on is stays
    if stays:
        assert choice.notice == ""
    else:
        number = ".".join(map(str, capability))
        assert str(dtype) in choice.notice and f"this GPU has {number}" in choice.notice


def test_layers_that_attend_in_two_ways_run_without_graphs() -> None:
    plain = shape(CUDA, torch.bfloat16)
    choice = choose_graphs(
        "auto", BackendChoice("flashinfer"), [plain, replace(plain, window=8), plain], False
    )
    assert not choice.is_on and "more than one way" in choice.notice


def test_graphs_are_off_where_they_were_switched_off_or_attention_is_not_flashinfers():
    for name, attention in (("off", "flashinfer"), ("auto", "torch"), ("auto", "cpu")):
        for has_experts in (False, True):
            choice = choose_graphs(name, BackendChoice(attention), [shape(CUDA)], has_experts)
            assert choice == GraphChoice(False)
