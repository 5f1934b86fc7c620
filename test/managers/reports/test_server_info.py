"""`/server_info` speaks of the plan in use."""

import json
from types import SimpleNamespace

import msgspec
import pytest
from support.moves import movable_core, stages_get_ready, stages_switch
from support.step_records import recovery_record, tier_state

from sgl_pipeline.args import PipelineArgs, SchedulingArgs, StageArgs
from sgl_pipeline.managers.reports.interval_line import status_line
from sgl_pipeline.managers.reports.server_info import (
    describe_page,
    describe_start,
    describe_state,
    summarize_start,
)
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.pipeline.pipeline_state import RoomsState
from sgl_pipeline.records.recovery_record import LostWorker, RecoveryRecord
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageLoaded


def test_the_plan_is_the_one_in_use_and_old_predictions_are_gone() -> None:
    core = movable_core(2, 2)
    loaded = tuple(
        StageLoaded(stage=stage, num_pages=64, page_bytes=400, weight_bytes=9, load_seconds=0.0)
        for stage in range(2)
    )
    capacity = PipelineCapacity(core.plan, (1.0, 2.0), 64, loaded, "torch", "torch", 100)
    args = PipelineArgs(stages=StageArgs(model_path="", dtype="float32"))
    start = describe_start(args, capacity, state_bytes=(0, 0, 0, 0))
    facts = start | describe_state(core.state(0.0))
    assert (facts["layer_partition"], facts["plan_epoch"]) == ([2, 2], 0)
    assert facts["predicted_step_ms_of_stages"] == [1.0, 2.0]
    assert facts["page_bytes_of_layer"] == 100
    assert " tokens, policy" in summarize_start(facts)
    assert " tokens in int8, policy" in summarize_start(facts | {"kv_cache_dtype": "int8"})
    assert ", 8 state slots, policy" in summarize_start(facts | {"state_slots": 8})
    assert (facts["state_slots"], facts["free_state_slots"]) == (0, 0)
    assert (facts["evictable_state_slots"], facts["max_mamba_cache_size"]) == (0, None)
    assert (facts["state_bytes"], facts["state_bytes_of_layer"]) == (0, 0)
    assert facts["mamba_track_interval"] == 0
    core.migration.move_to((1, 3), 1.0)
    stages_get_ready(core, 2.0)
    stages_switch(core, 3.0)
    facts = start | describe_state(core.state(4.0))
    assert (facts["layer_partition"], facts["plan_epoch"]) == ([1, 3], 1)
    assert facts["predicted_step_ms_of_stages"] is None


def test_states_are_told_under_sglangs_names_where_it_has_some() -> None:
    core = movable_core(2, 2)
    capacity = PipelineCapacity(core.plan, None, 64, (), "torch", "torch", 100, num_state_slots=8)
    scheduling = SchedulingArgs(num_state_slots=9, page_size=24)
    args = PipelineArgs(stages=StageArgs(model_path="", dtype="float32"), scheduling=scheduling)
    start = describe_start(args, capacity, state_bytes=(70, 70, 70, 0))
    assert (start["state_slots"], start["mamba_track_interval"]) == (8, 264)
    assert (start["state_bytes"], start["state_bytes_of_layer"]) == (210, 70)
    # A host is lost, and slots with it.
    state = msgspec.structs.replace(core.state(0.0), state_slots=5, free_state_slots=2)
    facts = start | describe_state(state)
    assert facts["max_mamba_cache_size"] == facts["state_slots"] == 5


@pytest.mark.parametrize(("num_state_slots", "most"), [(0, 256), (3, 3), (300, 256)])
def test_the_page_tells_how_many_requests_run_at_once(num_state_slots: int, most: int) -> None:
    scheduling = SchedulingArgs(num_state_slots=num_state_slots)
    args = PipelineArgs(stages=StageArgs(model_path="", dtype="float32"), scheduling=scheduling)
    page = describe_page(args, SimpleNamespace(served_model_name="m"))
    assert page["max_running_requests"] == most


def test_recoveries_are_listed_and_the_one_under_way_is_said() -> None:
    core = movable_core(2, 2)
    over = recovery_record()
    under_way = RecoveryRecord(began_s=20.0, incarnation=4, lost=(LostWorker(5, 0, "hangs"),))
    assert describe_state(core.state(15.0, 0, (over,)))["is_recovering"] is False
    facts = describe_state(core.state(21.0, 0, (over, under_way)))
    assert facts["is_recovering"] is True
    first, second = facts["recoveries"]
    assert (first["stages"], first["seconds"], first["is_over"]) == ([1], 2.5, True)
    assert (first["requests"], first["tokens"], first["reasons"]) == (2, 70, ["killed"])
    assert not first["is_planned"]
    assert (second["stages"], second["seconds"], second["is_over"]) == ([0], 1.0, False)


def test_how_many_stages_serve_is_said_beside_how_many_should() -> None:
    core = movable_core(2, 2)
    assert describe_state(core.state(1.0))["num_stages"] == 2
    assert status_line(core.state(0.0), core.state(1.0)).startswith("step 0: waiting")
    core.halt([1], "stage 1 was lost", 2.0)
    core.use_stages(StagePlan(1, (4,)), (4,), 2.0)
    core.start_over(1, num_pages=3)
    facts = describe_state(core.state(3.0))
    assert (facts["num_stages"], facts["layer_partition"], facts["total_pages"]) == (1, [4], 3)
    line = status_line(core.state(2.0), core.state(3.0))
    assert line.startswith("step 0, 1 of 2 stages: waiting")


def test_rooms_are_described() -> None:
    state = movable_core(2, 2).state(10.0)
    assert describe_state(state)["rooms"] is None
    rooms = RoomsState(mode="prefill", num_peers=1, bootstrap_requests=2, transfer_requests=3)
    described = describe_state(msgspec.structs.replace(state, rooms=rooms))["rooms"]
    assert (described["mode"], described["transfer_requests"]) == ("prefill", 3)


def test_a_store_is_described_and_in_the_line() -> None:
    state = movable_core(2, 2).state(10.0)
    assert describe_state(state)["store"] is None
    without = msgspec.structs.replace(state, now_s=20.0, tier=tier_state(backend=None))
    assert "store" not in status_line(state, without)
    later = msgspec.structs.replace(state, now_s=20.0, tier=tier_state())
    facts = json.loads(json.dumps(describe_state(later)))["store"]
    assert (facts["backend"], facts["missed_tokens"]["deadline"]) == ("file", 60)
    assert status_line(state, later).endswith(
        "store file: 20 tokens to load, 800 loaded, 700 saved"
    )
    again = msgspec.structs.replace(later, now_s=30.0, tier=tier_state(loaded_tokens=805))
    assert status_line(later, again).endswith(" 5 loaded, 0 saved")
