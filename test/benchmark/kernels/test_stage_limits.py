"""The least time of a step, worked out by hand, and shares that add up."""

from dataclasses import replace

import pytest
from support.workloads import fixed_lengths

from benchmark.kernels.stage_limits import (
    CoreRates,
    StageShares,
    StageWork,
    shares_table,
    stage_shares,
)
from benchmark.models.preset import Preset
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.simulator.experiment import Cluster, simulate

PRESET = Preset(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
# Queries, keys, values and output: 8 x 8, 2 of 8 x 4, 8 x 8; three matrices of 8 x 16.
LAYER_WEIGHTS = 64 + 2 * 32 + 64 + 3 * 128


@pytest.fixture(scope="module")
def records() -> list[StepRecord]:
    pipeline = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie", num_stages=2)
    simulation = simulate(
        pipeline, ThrottleArgs(policy="throttle"), SchedulingArgs(), fixed_lengths(8, 300, 8)
    )
    return [step.record for step in simulation.steps]


def test_a_step_of_decodes_is_bound_by_reading(records: list[StepRecord]) -> None:
    step = next(record for record in records if record.prefill_tokens == 0)
    rates = CoreRates(read_bytes_per_ms=10.0, flops_per_ms=1e9)
    keys_and_values = 2 * step.attended_tokens * 2 * 4
    layers = 2 * (2 * LAYER_WEIGHTS + keys_and_values) / 10.0
    assert StageWork(PRESET, 2, has_head=False).limit_ms(step, rates) == pytest.approx(layers)
    head = 2 * 100 * 8 / 10.0
    assert StageWork(PRESET, 2, has_head=True).limit_ms(step, rates) == pytest.approx(layers + head)


def test_a_step_of_prefill_is_bound_by_its_products(records: list[StepRecord]) -> None:
    step = max(records, key=lambda record: record.prefill_tokens)
    rates = CoreRates(read_bytes_per_ms=1e9, flops_per_ms=100.0)
    rows = step.prefill_tokens + step.decodes
    products = rows * 2 * LAYER_WEIGHTS + 2 * step.attended_tokens * 2 * 8
    limit = StageWork(PRESET, 2, has_head=False).limit_ms(step, rates)
    assert limit == pytest.approx(2 * products / 100.0)


def test_the_shares_of_a_stage_add_up(records: list[StepRecord]) -> None:
    work = [StageWork(PRESET, 2, has_head=stage == 1) for stage in range(2)]
    rows = stage_shares("throttle", records, work, CoreRates(1e6, 1e6))
    assert [row.stage for row in rows] == [0, 1]
    for row in rows:
        parts = (row.limit, row.beyond_limit, row.activations, row.metadata, row.slot)
        assert sum(parts) == pytest.approx(1.0)
        assert 0.0 < row.limit < 1.0


def test_the_table_has_a_row_for_each_policy_and_stage() -> None:
    row = StageShares(
        policy="throttle",
        stage=0,
        duration_s=2.0,
        limit=0.5,
        beyond_limit=0.2,
        activations=0.1,
        metadata=0.1,
        slot=0.1,
    )
    lines = shares_table([row, replace(row, limit=0.7), replace(row, stage=1)]).splitlines()
    assert len(lines) == 2 + 2
    assert "60.0 (50.0 to 70.0)" in lines[2]
