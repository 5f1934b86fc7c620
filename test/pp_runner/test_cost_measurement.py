"""What a worker measures before it knows its stage: positive times for every part of the model."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support.tiny_models import NUM_LAYERS, VOCAB_SIZE, tiny_model

from sgl_pipeline.messages import StageAssignment
from sgl_pipeline.pp_runner import cost_measurement
from sgl_pipeline.pp_runner.cost_measurement import measure_stage_costs
from sgl_pipeline.pp_runner.model_spec import read_model_spec
from sgl_pipeline.stage_costs import TYPICAL_STEP
from sgl_pipeline.stage_plan import StagePlan


def assignment(path: Path, dtype: str = "float32") -> StageAssignment:
    return StageAssignment(
        stage=0,
        plan=StagePlan(0, (2, 2)),
        model_path=str(path),
        load_format="safetensors",
        dtype=dtype,
        device="cpu",
        attention_backend="auto",
        layer_kernels="auto",
        page_size=16,
        max_total_tokens=None,
        memory_fraction=0.5,
        links=("",),
        cpu_threads=1,
        cpu_cores=(),
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "glm4"])
def test_every_layer_the_embedding_and_the_head_take_some_time(name: str) -> None:
    costs = measure_stage_costs(assignment(tiny_model(name)))
    assert len(costs.layers_ms) == NUM_LAYERS
    assert min(*costs.layers_ms, costs.embedding_ms, costs.head_ms) > 0


def test_layers_of_a_kind_share_one_time() -> None:
    costs = measure_stage_costs(assignment(tiny_model("qwen3"), "bfloat16"))
    assert len(set(costs.layers_ms)) == 1


def test_a_part_of_a_large_vocabulary_stands_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("qwen3")
    monkeypatch.setattr(cost_measurement, "_median_ms", lambda calls, *_: dict.fromkeys(calls, 2.0))
    monkeypatch.setattr(cost_measurement, "_MOST_TABLE_BYTES", VOCAB_SIZE // 4 * 64 * 4)
    costs = measure_stage_costs(assignment(path))
    assert (costs.embedding_ms, costs.head_ms) == (2.0, 8.0)


def test_a_model_of_few_positions_is_measured_as_well() -> None:
    spec = dataclasses.replace(read_model_spec(tiny_model("qwen3")), context_length=3)
    inputs = cost_measurement._typical_inputs(spec, 16, torch.device("cpu"))
    assert inputs.num_tokens == TYPICAL_STEP.decodes + 2
    assert len(inputs.sampling) == TYPICAL_STEP.decodes
