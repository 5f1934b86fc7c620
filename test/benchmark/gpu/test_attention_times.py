"""Which kernels the GPU benchmark compares, on stand-ins for FlashInfer's wrappers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_flashinfer import (
    FakeDecodeWrapper,
    FakeGraphDecodeWrapper,
    FakePrefillWrapper,
    Recorder,
)

from benchmark.gpu.attention_times import (
    _flashinfer_decode,
    _flashinfer_prefill,
    decode_choices,
    prefill_choices,
    time_attention,
)
from benchmark.gpu.checks import row_error
from benchmark.gpu.device_times import Kernel, kernels_of, total_ms
from benchmark.gpu.shapes import Step, decode_step, prefill_step, spec_of
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape

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


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """With what options FlashInfer's wrappers were opened last."""
    options: dict[str, Any] = {}

    def open_decode(workspace: torch.Tensor, layout: str, **given: Any) -> FakeDecodeWrapper:
        options["decode"] = given
        if not given.get("use_cuda_graph"):
            return FakeDecodeWrapper(Recorder())
        return FakeGraphDecodeWrapper(
            Recorder(),
            num_rows=len(given["paged_kv_last_page_len_buffer"]),
            indices_buffer=given["paged_kv_indices_buffer"],
        )

    def open_prefill(workspace: torch.Tensor, layout: str, **given: Any) -> FakePrefillWrapper:
        options["prefill"] = given
        return FakePrefillWrapper(Recorder())

    library = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=open_decode,
        BatchPrefillWithPagedKVCacheWrapper=open_prefill,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    # Nothing is compiled here, and no compiler looked for.
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "1")
    monkeypatch.setattr("torch.cuda.Event", Recorder)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=132),
    )
    return options


def expected(step: Step) -> torch.Tensor:
    return time_attention(SHAPE, step, prefill_choices(SHAPE.device)["torch"]).output


@pytest.mark.parametrize("use_tensor_cores", [True, False])
def test_decodes_are_timed_on_the_graphs_wrapper_with_the_kernels_named(
    opened: dict[str, Any], use_tensor_cores: bool
) -> None:
    step = decode_step(5, 40)
    found = time_attention(SHAPE, step, lambda *given: _flashinfer_decode(use_tensor_cores, *given))
    assert opened["decode"]["use_cuda_graph"]
    assert opened["decode"]["use_tensor_cores"] is use_tensor_cores
    assert row_error(found.output, expected(step)) < 0.02
    assert found.plan_ms > 0 and found.layer_ms and found.layer_ms > 0


@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
def test_prefills_are_timed_with_the_kernels_named(
    opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    monkeypatch.setattr(
        "benchmark.gpu.attention_times.choose_attention_backend",
        lambda name, shape: SimpleNamespace(name=name),
    )
    step = prefill_step(30, 20)
    found = time_attention(SHAPE, step, lambda *given: _flashinfer_prefill(kernels, *given))
    assert opened["prefill"]["backend"] == kernels
    assert row_error(found.output, expected(step)) < 0.02


@pytest.mark.parametrize(("major", "names"), [(9, ["fa2", "fa3"]), (8, ["fa2"]), (12, ["fa2"])])
def test_fa3_is_for_hopper(monkeypatch: pytest.MonkeyPatch, major: int, names: list[str]) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (major, 0))
    assert list(prefill_choices(torch.device("cuda"))) == names


def test_decodes_go_without_tensor_cores_where_flashinfer_has_such_a_kernel() -> None:
    for model, names in (
        ("Qwen3-0.6B", ["tensor cores", "CUDA cores"]),
        ("Qwen3-8B", ["tensor cores", "CUDA cores"]),
        ("Qwen3-14B", ["tensor cores"]),
    ):
        shape = spec_of(model).attention_shapes(16, torch.bfloat16, torch.device("cuda"))[0]
        assert list(decode_choices(shape)) == names


def event(name: str, microseconds: float, device: str = "CUDA", is_span: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=getattr(torch.autograd.DeviceType, device),
        is_user_annotation=is_span,
        time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
    )


def test_kernels_are_added_up_by_name_for_each_call() -> None:
    events = [
        event("gemm", 100.0),
        event("norm", 30.0),
        event("gemm", 120.0),
        event("aten::mm", 500.0, "CPU"),
        event("step", 900.0, is_span=True),
    ]
    kernels = kernels_of(events, repeats=2)
    assert kernels == [Kernel("gemm", 1.0, 0.11), Kernel("norm", 0.5, 0.015)]
    assert total_ms(kernels) == pytest.approx(0.125)
    assert total_ms([]) is None
