"""What a worker measures before it knows its stage: positive times for every part of the model."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantized_models import INT8_ROWS, INT8_WEIGHTS, compressed, write_config
from support.tiny_models import NUM_LAYERS, VOCAB_SIZE, tiny_model
from support.work_clock import WorkClock

from sgl_pipeline.args import StageArgs
from sgl_pipeline.costs.stage_costs import (
    TYPICAL_STEP,
    MadeUpStep,
    PartCosts,
    PartSample,
    StageCosts,
)
from sgl_pipeline.migration.partition import balanced_layer_counts
from sgl_pipeline.pp_runner import cost_measurement
from sgl_pipeline.pp_runner.cost_measurement import measure_part_costs
from sgl_pipeline.pp_runner.kernel_choice import choose_layer_kernels, make_layer_kernels
from sgl_pipeline.pp_runner.model.generic.probe import probe
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.stage_model_choice import load_stage_model
from sgl_pipeline.pp_runner.stopwatch import HostStopwatch
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepWork
from sgl_pipeline.wire.stage_messages import StageAssignment

VOCAB_OF_A_LARGE_HEAD = 18_300  # 10 times the work of a layer of this size


def assignment(path: Path, dtype: str = "float32", **more: Any) -> StageAssignment:
    return StageAssignment(
        stage=0,
        plan=StagePlan(0, (2, 2)),
        args=StageArgs(model_path=str(path), dtype=dtype, **more),
        page_size=16,
        links=("",),
        cpu_threads=1,
        cpu_cores=(),
    )


def stage_costs(costs: PartCosts) -> StageCosts:
    return StageCosts.of(costs.kinds, costs.samples[0])


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "glm4", "qwen3.5"])
def test_every_layer_the_embedding_and_the_head_take_some_time(name: str) -> None:
    costs = stage_costs(measure_part_costs(assignment(tiny_model(name)), [TYPICAL_STEP]))
    assert len(costs.layers_ms) == NUM_LAYERS
    assert min(*costs.layers_ms, costs.embedding_ms, costs.head_ms) > 0


@pytest.mark.compiler
def test_quantized_parts_have_the_bytes_that_the_stage_will_hold() -> None:
    plain = assignment(tiny_model("qwen3"), "bfloat16")
    rounded = assignment(tiny_model("qwen3"), "bfloat16", quantization="w8a8_int8")
    sizes = [measure_part_costs(each, [TYPICAL_STEP]).sizes for each in (plain, rounded)]
    spec = read_model_spec(tiny_model("qwen3"), "w8a8_int8")
    kernels = make_layer_kernels(choose_layer_kernels("auto", torch.bfloat16, torch.device("cpu")))
    model = NativeStageModel.load(
        spec,
        tiny_model("qwen3"),
        layers=range(NUM_LAYERS),
        is_first=True,
        is_last=True,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=kernels,
    )
    assert sizes[1].weight_bytes(0, NUM_LAYERS) == model.weight_bytes
    assert sizes[1].layers_bytes[0] < 0.6 * sizes[0].layers_bytes[0]
    assert sizes[1].head_bytes < 0.6 * sizes[0].head_bytes
    assert sizes[1].embedding_bytes == sizes[0].embedding_bytes


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.compiler)])
@pytest.mark.parametrize(("kv_cache_dtype", "row_bytes"), [("int8", 36), ("fp8_e4m3", 32)])
def test_pages_have_the_bytes_of_their_codes(
    kv_cache_dtype: str, row_bytes: int, dtype: str
) -> None:
    coded = assignment(tiny_model("qwen3"), dtype, kv_cache_dtype=kv_cache_dtype)
    sizes = measure_part_costs(coded, [TYPICAL_STEP]).sizes
    kv_heads = read_model_spec(tiny_model("qwen3")).num_kv_heads
    assert sizes.page_layer_bytes == 2 * coded.page_size * kv_heads * row_bytes


def test_layers_of_a_kind_share_one_time() -> None:
    own = assignment(tiny_model("qwen3"), "bfloat16")
    costs = stage_costs(measure_part_costs(own, [TYPICAL_STEP]))
    assert len(set(costs.layers_ms)) == 1


def costs_by_work(
    path: Path, most_table_bytes: int | None, ms_per_operator: float, ms_per_number: float
) -> StageCosts:
    """What is found with a clock that goes by the work alone, see `WorkClock`."""
    own = assignment(path, attention_backend="torch", layer_kernels="torch")
    with WorkClock(ms_per_operator, ms_per_number) as clock:
        stopwatch = HostStopwatch(clock.now_s)
        steps = [TYPICAL_STEP]
        return stage_costs(
            cost_measurement._measure(own, torch.device("cpu"), stopwatch, most_table_bytes, steps)
        )


def test_a_fixed_cost_of_a_call_counts_once_however_little_of_the_head_is_timed() -> None:
    path, table_bytes = tiny_model("qwen3"), VOCAB_SIZE * 64 * 4
    whole = costs_by_work(path, None, 0.02, 1e-5)
    for share_of_table in (2, 16):
        part = costs_by_work(path, table_bytes // share_of_table, 0.02, 1e-5)
        assert part.head_ms == pytest.approx(whole.head_ms)
        assert part.layers_ms == pytest.approx(whole.layers_ms)
        assert part.embedding_ms == pytest.approx(whole.embedding_ms)
    # A good part of it is fixed: with a quarter of the time for the dozens of operators it grows.
    assert costs_by_work(path, None, 0.0, 1e-5).head_ms < 0.8 * whole.head_ms


def test_the_head_of_a_model_on_four_gpus_does_not_take_all_layers_from_the_last_stage(
    tmp_path: Path,
) -> None:
    """36 layers of 0.11 ms, of which 0.08 are for as many operators, and a head of 0.36. Were its
    operators multiplied by the share of the table, the last stage would have three layers."""
    config = json.loads((tiny_model("qwen3") / "config.json").read_text())
    config |= {"num_hidden_layers": 36, "layer_types": None, "vocab_size": VOCAB_OF_A_LARGE_HEAD}
    config["max_position_embeddings"] = 16  # keeps the attention of the stand-in's layers small
    (tmp_path / "config.json").write_text(json.dumps(config))
    operators, numbers = (
        costs_by_work(tmp_path, None, *unit).layers_ms[0] for unit in ((1.0, 0.0), (0.0, 1.0))
    )
    table_bytes = VOCAB_OF_A_LARGE_HEAD * config["hidden_size"] * 4
    for most_bytes in (None, table_bytes // 18):
        costs = costs_by_work(tmp_path, most_bytes, 0.08 / operators, 0.03 / numbers)
        assert costs.layers_ms == (pytest.approx(0.11),) * 36
        assert costs.head_ms == pytest.approx(0.36, abs=0.005)
        assert balanced_layer_counts([costs] * 4) == (10, 10, 10, 6)


def test_the_whole_head_is_timed_on_a_gpu_and_a_part_of_it_on_a_cpu() -> None:
    spec = read_model_spec(tiny_model("qwen3"))
    assert cost_measurement._table_sizes(
        spec, 4, cost_measurement._most_table_bytes(torch.device("cuda"))
    ) == [VOCAB_SIZE]
    large = dataclasses.replace(spec, vocab_size=10**6)
    limit_bytes = cost_measurement._most_table_bytes(torch.device("cpu"))
    assert limit_bytes == 64 * 2**20
    assert cost_measurement._table_sizes(large, 4, limit_bytes) == [2**16, 2**18]
    assert cost_measurement._table_sizes(
        large, 4, cost_measurement._most_table_bytes(torch.device("cuda"))
    ) == [10**6]


def test_noise_makes_no_row_of_the_head_cheaper_than_nothing_or_dearer_than_all_of_it() -> None:
    assert cost_measurement._head_ms([10], [3.0], 10) == 3.0
    # 1 ms and 0.2 a row; then no slope, a negative one, and one steeper than from nothing.
    assert cost_measurement._head_ms([5, 10], [2.0, 3.0], 100) == pytest.approx(21.0)
    assert cost_measurement._head_ms([5, 10], [3.0, 3.0], 100) == 3.0
    assert cost_measurement._head_ms([5, 10], [3.5, 3.0], 100) == 3.0
    assert cost_measurement._head_ms([5, 10], [0.1, 3.0], 100) == pytest.approx(30.0)


def test_a_model_of_few_positions_is_measured_as_well() -> None:
    spec = dataclasses.replace(read_model_spec(tiny_model("qwen3")), context_length=3)
    step = TYPICAL_STEP.within(spec.context_length)
    shape = spec.attention_shapes(16, torch.float32, torch.device("cpu"))[0]
    inputs = cost_measurement._step_inputs(step, spec, shape)
    assert inputs.num_tokens == TYPICAL_STEP.decodes + 2
    assert len(inputs.sampling) == TYPICAL_STEP.decodes


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_each_step_is_timed_by_itself_and_the_parts_are_weighed(name: str) -> None:
    path = tiny_model(name)
    steps = [MadeUpStep(3, 20, 0), MadeUpStep(0, 0, 40, prompt_start=10), MadeUpStep(2, 5, 7)]
    costs = measure_part_costs(assignment(path), steps)
    assert [sample.work for sample in costs.samples] == [step.work for step in steps]
    assert [sample.tail_ms > 0 for sample in costs.samples] == [True, False, True]
    spec = read_model_spec(path)
    model = NativeStageModel.load(
        spec,
        path,
        layers=range(spec.num_layers),
        is_first=True,
        is_last=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=make_layer_kernels(
            choose_layer_kernels("torch", torch.float32, torch.device("cpu"))
        ),
    )
    assert costs.sizes.weight_bytes(0, spec.num_layers) == model.weight_bytes
    assert costs.sizes.page_layer_bytes == 2 * 16 * spec.num_kv_heads * spec.head_dim * 4
    assert costs.memory_bytes > 0


def test_layers_that_transformers_computes_are_measured_as_well() -> None:
    path = tiny_model("qwen3")
    spec = probe(path)
    generic = assignment(path, generic_spec=spec.to_json(), model_impl="transformers")
    costs, native = (measure_part_costs(one, [TYPICAL_STEP]) for one in (generic, assignment(path)))
    assert costs.sizes == native.sizes
    assert costs.kinds == native.kinds
    assert min(costs.samples[0].kinds_ms) > 0
    model = load_stage_model(
        spec,
        path,
        layers=range(spec.num_layers),
        is_first=True,
        is_last=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=make_layer_kernels(
            choose_layer_kernels("torch", torch.float32, torch.device("cpu"))
        ),
    )
    assert costs.sizes.weight_bytes(0, spec.num_layers) == model.weight_bytes


def test_without_steps_only_the_parts_are_weighed() -> None:
    costs = measure_part_costs(assignment(tiny_model("qwen3")), [])
    assert not costs.samples
    assert min(costs.sizes.layers_bytes) > 0


def test_a_made_up_step_has_the_work_of_its_chunks() -> None:
    step = MadeUpStep(decodes=3, context_tokens=20, prompt_tokens=4, prompt_start=10)
    assert step.work == StepWork(7, 3, 3 * 21, 11 + 12 + 13 + 14, 3)


@pytest.mark.compiler
def test_layers_that_are_quantized_and_layers_that_are_not_have_times_and_bytes_of_their_own(
    tmp_path: Path,
) -> None:
    """A checkpoint that leaves its first and its fourth layer at 16 bits."""
    shutil.copytree(tiny_model("qwen3"), tmp_path / "mixed")
    config = compressed(INT8_WEIGHTS, INT8_ROWS, "int-quantized")
    ignored = ["lm_head", "re:.*layers[.][03][.].*"]
    write_config(tmp_path / "mixed", config | {"ignore": ignored})
    own = assignment(tmp_path / "mixed", load_format="dummy")
    costs = measure_part_costs(own, [TYPICAL_STEP])
    assert costs.kinds == tuple(int(layer not in (0, 3)) for layer in range(NUM_LAYERS))
    assert len(costs.samples[0].kinds_ms) == 2
    plain, rounded = costs.sizes.layers_bytes[0], costs.sizes.layers_bytes[1]
    assert rounded < 0.6 * plain
    spec = read_model_spec(tmp_path / "mixed")
    model = NativeStageModel.load(
        spec,
        tmp_path / "mixed",
        layers=range(NUM_LAYERS),
        is_first=True,
        is_last=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=make_layer_kernels(
            choose_layer_kernels("torch", torch.float32, torch.device("cpu"))
        ),
        load_format="dummy",
    )
    assert costs.sizes.weight_bytes(0, NUM_LAYERS) == model.weight_bytes


def test_the_split_gives_a_stage_more_of_the_faster_quantized_layers() -> None:
    """Eight layers, of which the last four take half the time."""
    kinds = (0, 0, 0, 0, 1, 1, 1, 1)
    costs = StageCosts.of(kinds, PartSample(TYPICAL_STEP.work, (2.0, 1.0), 0.0, 0.0))
    assert balanced_layer_counts([costs] * 2) == (3, 5)
