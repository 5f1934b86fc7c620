"""The simulator against real GPU serving runs: nothing in it was fitted to them."""

import csv
from pathlib import Path
from statistics import mean

import pytest

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster, simulate
from sgl_pipeline.simulator.pipeline_costs import HostCosts
from sgl_pipeline.simulator.summary import summarize
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds

DATA = Path(__file__).parent / "data"
TOLERANCE = 0.05


@pytest.mark.parametrize(
    ("file", "model", "tensor_parallel"),
    [
        ("measured_rtxpro6000_llama-3.1-8b.csv", "Llama-3.1-8B", 1),
        ("measured_rtxpro6000_qwen3-32b.csv", "Qwen3-32B", 2),
    ],
)
def test_a_real_run_at_one_stage_is_predicted_within_five_percent(
    file: str, model: str, tensor_parallel: int
) -> None:
    with (DATA / file).open() as lines:
        rows = [
            {name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)
        ]
    ids = TokenIds()
    workload = [
        SimulatedRequest(
            arrival_s=row["arrival_s"],
            prompt=(ids.fresh(int(row["input_tokens"])),),
            output=ids.fresh(int(row["output_tokens"])),
        )
        for row in rows
    ]
    # As the run was made: vLLM's queue and budget, 128 sequences, and its asynchronous scheduling,
    # which keeps the processor's work off the path.
    cluster = Cluster(
        model=model,
        device="rtxpro6000",
        num_stages=1,
        tensor_parallel=tensor_parallel,
        host=HostCosts(),
    )
    simulation = simulate(
        cluster,
        ThrottleArgs(policy="greedy-queue", max_prefill_tokens=2048),
        SchedulingArgs(max_running_requests=128),
        workload,
    )
    summary = summarize(simulation)
    ttft_ms = mean(row["first_token_s"] - row["arrival_s"] for row in rows) * 1e3
    tpot_ms = 1e3 * mean(
        (row["last_token_s"] - row["first_token_s"]) / (row["output_tokens"] - 1) for row in rows
    )
    e2e_ms = mean(row["last_token_s"] - row["arrival_s"] for row in rows) * 1e3
    duration_s = max(row["last_token_s"] for row in rows)
    assert summary.num_requests == len(rows)
    assert summary.ttft_ms.mean == pytest.approx(ttft_ms, rel=TOLERANCE)
    assert summary.tpot_ms.mean == pytest.approx(tpot_ms, rel=TOLERANCE)
    assert summary.e2e_ms.mean == pytest.approx(e2e_ms, rel=TOLERANCE)
    assert summary.duration_s == pytest.approx(duration_s, rel=TOLERANCE)
