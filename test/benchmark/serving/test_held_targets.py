"""What is read off a server's steps, load by load, and how it is shown."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from benchmark.serving.held_targets import (
    WARM_UPS,
    Reached,
    Setting,
    reached_by_load,
)
from benchmark.serving.held_targets_plot import draw
from benchmark.support.loads import Load
from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.simulator.experiment import Cluster, simulate
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds

SETTINGS = (Setting(), Setting(tpot_ms=12.0), Setting(ttft_ms=1.0))
LOADS = (Load(num_requests=4, requests_per_s=1.0), Load(num_requests=9, requests_per_s=8.0))
# The prompts of a load, whose length tells the loads apart.
PROMPT_TOKENS = (64, 64, 500, 2000)


def served(setting: Setting) -> list[StepRecord]:
    """The steps of all loads, a minute between them, all requests of one at once."""
    ids, counts = TokenIds(), [load.num_requests for load in (*WARM_UPS, *LOADS)]
    requests = [
        SimulatedRequest(arrival_s=60.0 * number, prompt=(ids.fresh(tokens),), output=ids.fresh(20))
        for number, (count, tokens) in enumerate(zip(counts, PROMPT_TOKENS, strict=True))
        for _ in range(count)
    ]
    pipeline = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie", num_stages=2)
    scheduling = SchedulingArgs(radix_cache=False)
    steps = simulate(pipeline, setting.throttle, scheduling, requests).steps
    return [step.record for step in steps]


@pytest.fixture(scope="module")
def reached() -> list[Reached]:
    return [
        one
        for setting in SETTINGS
        for one in reached_by_load(setting, "server", served(setting), LOADS)
    ]


def test_each_load_is_read_off_its_own_steps_after_the_warm_ups() -> None:
    records = served(SETTINGS[0])
    ends = list(accumulate(load.num_requests for load in (*WARM_UPS, *LOADS)))
    ended = [request for record in records for request in record.ended]
    for one, number in zip(
        reached_by_load(SETTINGS[0], "server", records, LOADS), (2, 3), strict=True
    ):
        own = ended[ends[number - 1] : ends[number]]
        assert {request.prompt_tokens for request in own} == {PROMPT_TOKENS[number]}
        ttfts_ms = sorted(request.first_token_ms for request in own)
        assert ttfts_ms[0] <= one.ttft_p50_ms <= one.ttft_p95_ms <= ttfts_ms[-1]
        assert one.rate_per_s == LOADS[number - 2].requests_per_s


def test_a_target_that_nothing_meets_is_missed_by_every_request_and_by_its_steps(
    reached: list[Reached],
) -> None:
    free, tpot, ttft = ([one for one in reached if one.setting == setting] for setting in SETTINGS)
    assert all(one.late_requests == 0.0 for one in free)
    assert all(set(one.missed_steps.values()) == {0.0} for one in free)
    assert all(one.late_requests == 1.0 for one in ttft)
    assert all(one.missed_steps["TTFT"] > 0.0 == one.missed_steps["TPOT"] for one in ttft)
    assert all(one.missed_steps["TTFT"] == 0.0 for one in tpot)
    assert {one.by_time_share for one in reached} == {1.0}


def test_the_plot_names_targets_and_sources(reached: list[Reached], tmp_path: Path) -> None:
    simulated = [replace(one, source="simulator") for one in reached]
    draw([*reached, *simulated], tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    for words in ("no target, server", "12 ms, simulator", "1 ms, server", "requests/s"):
        assert f"<!-- {words} -->" in text, words
