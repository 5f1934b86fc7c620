"""The checks of models with experts, rehearsed on a CPU: they tell a wrong expert, not rounding."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from support.gpu_recipe import README

from benchmark.gpu import checks, expert_checks
from benchmark.gpu.shapes import (
    REHEARSED_SPARSE_MODEL,
    SPARSE_MODEL,
    SPARSE_MODELS,
    spec_of,
)
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, Linear, Routing
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.moe import SparseMlp, StackedExperts
from sgl_pipeline.pp_runner.weights.checkpoint import DummyWeights
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix

CPU = torch.device("cpu")
SPEC = spec_of(REHEARSED_SPARSE_MODEL)
NUM_STAGES = 4  # that a stage check compares
RUNS_A_STEP = 2 * SPEC.num_layers  # the history's and the step's


@pytest.fixture(autouse=True)
def inference() -> None:
    torch.set_grad_enabled(False)


def test_the_experts_of_a_layer_agree() -> None:
    check = expert_checks.check_experts(SPEC, "tiny-moe", CPU)
    assert check.error > 0 and check.passed


def test_an_expert_in_anothers_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    load = StackedExperts.load

    def misplaced(*arguments: object) -> StackedExperts:
        experts = load(*arguments)  # type: ignore[arg-type]
        experts._down[[2, 3]] = experts._down[[3, 2]]
        return experts

    monkeypatch.setattr(StackedExperts, "load", misplaced)
    assert not expert_checks.check_experts(SPEC, "tiny-moe", CPU).passed


class OneWrongExpert(TorchKernels):
    """The third of a model."""

    def __init__(self) -> None:
        self.count = 0

    def gated_linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        self.count += 1
        assert isinstance(weight, torch.Tensor)
        return super().gated_linear(-weight if self.count == 3 else weight, bias)


def test_a_wrong_expert_of_a_stage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_for = checks.kernels_for

    def kernels(
        device: torch.device, dtype: torch.dtype, name: str, spec: DecoderSpec
    ) -> LayerKernels:
        return OneWrongExpert() if name == "auto" else kernels_for(device, dtype, name, spec)

    assert all(check.passed for check in checks.check_stage(SPEC, "tiny-moe", CPU, "auto"))
    monkeypatch.setattr(checks, "kernels_for", kernels)
    found = checks.check_stage(SPEC, "tiny-moe", CPU, "auto")
    assert not all(check.passed for check in found)


def routing_of_a_check(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """The experts of every row, [layers and runs of a step, its stages]."""
    seen = list[torch.Tensor]()
    mix: Callable[[SparseMlp, torch.Tensor, Routing], torch.Tensor] = SparseMlp._mix

    def watched(mlp: SparseMlp, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        seen.append(routing.experts.sort(dim=1).values)
        return mix(mlp, x, routing)

    with monkeypatch.context() as patch:
        patch.setattr(SparseMlp, "_mix", watched)
        checks.check_stage(SPEC, "tiny-moe", CPU, "auto")
    steps = [
        seen[first : first + NUM_STAGES * RUNS_A_STEP]
        for first in range(0, len(seen), NUM_STAGES * RUNS_A_STEP)
    ]
    return [step[run::RUNS_A_STEP] for step in steps for run in range(RUNS_A_STEP)]


def test_rounding_sends_no_row_to_another_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    routings = routing_of_a_check(monkeypatch)
    assert len(routings) == 3 * RUNS_A_STEP
    assert all(torch.equal(one, same[0]) for same in routings for one in same)
    assert {*torch.cat([same[0] for same in routings]).flatten().tolist()} == {*range(8)}
    monkeypatch.setattr(
        checks, "checked_weights", lambda spec, device: DummyWeights(torch.bfloat16, device)
    )
    routings = routing_of_a_check(monkeypatch)
    assert not all(torch.equal(one, same[0]) for same in routings for one in same)


def test_the_check_fits_a_card_of_80_gb() -> None:
    """The judge is in fp32; the yardstick and two stages are in bf16."""
    preset = dataclasses.replace(SPARSE_MODELS[SPARSE_MODEL], num_hidden_layers=4)
    numbers = sum(math.prod(shape) for shape in preset.tensor_shapes().values())
    gigabytes = numbers * (4 + 3 * 2) / 1e9
    assert gigabytes < 40
    assert f"{gigabytes:.0f} GB" in README


def test_the_shape_is_that_of_the_model() -> None:
    """Of Qwen/Qwen3-30B-A3B's config.json; 30.5 billion parameters by its card."""
    spec = spec_of(SPARSE_MODEL)
    assert spec.experts is not None
    assert (spec.experts.num_experts, spec.experts.experts_per_token) == (128, 8)
    assert (spec.hidden_size, spec.experts.inner_size, spec.num_layers) == (2048, 768, 48)
    assert (spec.num_query_heads, spec.num_kv_heads, spec.head_dim) == (32, 4, 128)
    shapes = SPARSE_MODELS[SPARSE_MODEL].tensor_shapes().values()
    assert sum(map(math.prod, shapes)) / 1e9 == pytest.approx(30.5, rel=0.01)
