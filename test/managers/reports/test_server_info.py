"""`/server_info` speaks of the plan in use."""

from support.moves import movable_core, stages_get_ready, stages_switch

from sgl_pipeline.args import PipelineArgs, StageArgs
from sgl_pipeline.managers.reports.server_info import describe_start, describe_state
from sgl_pipeline.messages import StageLoaded
from sgl_pipeline.pipeline.worker_roster import PipelineCapacity


def test_the_plan_is_the_one_in_use_and_old_predictions_are_gone() -> None:
    core = movable_core(2, 2)
    loaded = tuple(
        StageLoaded(stage=stage, num_pages=64, page_bytes=400, weight_bytes=9, load_seconds=0.0)
        for stage in range(2)
    )
    capacity = PipelineCapacity(core.plan, (1.0, 2.0), 64, loaded, "torch", "torch", 100)
    start = describe_start(PipelineArgs(stages=StageArgs(model_path="", dtype="float32")), capacity)
    facts = start | describe_state(core.state(0.0))
    assert (facts["layer_partition"], facts["plan_epoch"]) == ([2, 2], 0)
    assert facts["predicted_step_ms_of_stages"] == [1.0, 2.0]
    assert facts["page_bytes_of_layer"] == 100
    core.migration.move_to((1, 3), 1.0)
    stages_get_ready(core, 2.0)
    stages_switch(core, 3.0)
    facts = start | describe_state(core.state(4.0))
    assert (facts["layer_partition"], facts["plan_epoch"]) == ([1, 3], 1)
    assert facts["predicted_step_ms_of_stages"] is None
