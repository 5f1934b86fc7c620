from pathlib import Path

import msgspec
import pytest
from sglang.srt.managers.load_snapshot import (
    DisaggregationMetrics,
    LoadSnapshot,
    ShmLoadSnapshotReader,
)
from support.pipelines import FakePipeline, make_request

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.managers.reports.load_report import LoadReport, loads_path
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.pipeline.pipeline_state import RoomsState
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy
from sgl_pipeline.wire.stage_messages import StageLoaded

GIB = 2**30


def test_a_report_tells_what_runs_what_waits_and_what_is_full(tmp_path: Path) -> None:
    args = SchedulingArgs(page_size=4, max_running_requests=1)
    policy = make_policy(ThrottleArgs(policy="sarathi"))
    steps = StepScheduler(args, policy, num_pages=10, num_stages=1, context_length=100)
    pipeline = FakePipeline(steps, page_size=4)
    stages = (stage(GIB // 10), stage(GIB // 10))
    capacity = PipelineCapacity(StagePlan(0, (1, 1)), None, 10, stages, "torch", "torch", GIB // 10)
    report = LoadReport(loads_path(str(tmp_path)), args, capacity)
    reader = ShmLoadSnapshotReader(loads_path(str(tmp_path)), dp_size=1)

    def published(now_s: float) -> LoadSnapshot:
        report.publish(pipeline.core.state(now_s, compiling_requests=3))
        load = reader.read(0)
        assert load is not None
        return load

    assert (published(100.0).num_running_reqs, published(100.0).token_usage) == (0, 0.0)
    steps.add(make_request("running", [1] * 8, 10))
    steps.add(make_request("waiting", [1] * 8 + [2] * 6, 10))
    pipeline.schedule()
    pipeline.complete()
    pipeline.core.history.decodes = 30
    load = published(102.0)
    assert (load.num_running_reqs, load.num_waiting_reqs) == (1, 1)
    assert load.queues is not None and (load.queues.waiting, load.queues.grammar) == (1, 3)
    assert (load.num_used_tokens, load.num_total_tokens) == (8, 8 + 14)
    assert load.num_waiting_uncached_tokens == 6
    assert (load.max_total_num_tokens, load.max_running_requests) == (40, 1)
    assert load.token_usage == 0.2
    assert load.gen_throughput == 15.0
    assert load.total_prefill_uncached_tokens == 8
    assert load.memory is not None and load.memory.kv_cache_gb == pytest.approx(2.0, abs=0.001)
    assert load.memory.weight_gb == 1.0
    pipeline.drain()
    assert published(103.0).cache_hit_rate == round(8 / 22, 4)
    reader.close()
    report.close()


def test_the_fuller_of_pages_and_state_slots_is_the_usage(tmp_path: Path) -> None:
    args = SchedulingArgs(page_size=4, num_state_slots=4)
    policy = make_policy(ThrottleArgs(policy="sarathi"))
    steps = StepScheduler(args, policy, num_pages=10, num_stages=1, context_length=100)
    pipeline = FakePipeline(steps, page_size=4)
    capacity = PipelineCapacity(StagePlan(0, (1,)), None, 10, (stage(1),), "torch", "torch", 1)
    report = LoadReport(loads_path(str(tmp_path)), args, capacity)
    steps.add(make_request("a", [1] * 8, 10))
    pipeline.schedule()
    state = pipeline.core.state(1.0)
    # Its own slot and that of its snapshot, which is not matchable yet.
    assert (state.state_slots, state.free_state_slots, state.evictable_state_slots) == (4, 2, 0)
    assert state.state_usage == 0.5
    load = report.publish(state)
    assert (load.token_usage, load.max_running_requests) == (0.5, 4)
    pipeline.drain()
    state = pipeline.core.state(2.0)
    assert (state.free_state_slots, state.evictable_state_slots, state.state_usage) == (3, 1, 0.0)
    report.close()


def test_a_report_has_upstreams_counts_of_rooms(tmp_path: Path) -> None:
    args = SchedulingArgs(page_size=4)
    policy = make_policy(ThrottleArgs(policy="sarathi"))
    steps = StepScheduler(args, policy, num_pages=10, num_stages=1, context_length=100)
    pipeline = FakePipeline(steps, page_size=4)
    capacity = PipelineCapacity(StagePlan(0, (1,)), None, 10, (stage(GIB),), "torch", "torch", GIB)
    report = LoadReport(loads_path(str(tmp_path)), args, capacity, "decode")
    state = pipeline.core.state(100.0, compiling_requests=0)
    assert report.publish(state).disaggregation == DisaggregationMetrics("decode")
    rooms = RoomsState(
        mode="decode",
        num_peers=1,
        bootstrap_requests=3,
        transfer_requests=4,
        transferred=2,
        transfer_s=0.5,
        loaded_bytes=2 * GIB,
    )
    for mode, queues in (("decode", (0, 0, 3, 4)), ("prefill", (3, 4, 0, 0))):
        with_rooms = msgspec.structs.replace(state, rooms=msgspec.structs.replace(rooms, mode=mode))
        assert report.publish(with_rooms).disaggregation == DisaggregationMetrics(
            "decode", *queues, kv_transfer_speed_gb_s=4.0, kv_transfer_latency_ms=250.0
        )
    report.close()


def stage(page_bytes: int) -> StageLoaded:
    return StageLoaded(
        stage=0, num_pages=10, page_bytes=page_bytes, weight_bytes=GIB // 2, load_seconds=0.0
    )
