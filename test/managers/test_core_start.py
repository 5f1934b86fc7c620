"""The core of a server is built for the stages that there are."""

from types import SimpleNamespace
from typing import Any

from sgl_pipeline.args import PipelineArgs, SchedulingArgs, StageArgs
from sgl_pipeline.managers.core_start import build_core
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.stage_plan import StagePlan


def test_no_more_state_slots_are_given_than_the_stages_have() -> None:
    """They were replaced at the start, and memory holds fewer than were asked for."""
    args = PipelineArgs(
        stages=StageArgs(model_path="", dtype="float32", device="cpu", num_state_slots=8),
        scheduling=SchedulingArgs(num_state_slots=8, radix_cache=False),
    )
    capacity = PipelineCapacity(
        StagePlan(0, (2,)), None, 10, (), "torch", "torch", 1, num_state_slots=3
    )
    spec: Any = SimpleNamespace(attentions=(), states=())
    limits: Any = SimpleNamespace(context_length=64, vocab_size=9)
    core = build_core(args, spec, limits, capacity, None)
    assert (core.state(0.0).load.total_pages, core.state(0.0).state_slots) == (10, 3)
