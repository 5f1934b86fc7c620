"""What the scheduler lets go of is gone at once, without a run of the garbage collector."""

import gc

import pytest
from support.pipelines import make_request, new_scheduler

from sgl_pipeline.args import SCHEDULE_POLICIES, SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import FinishReason


@pytest.mark.parametrize("schedule_policy", SCHEDULE_POLICIES)
def test_serving_leaves_no_cyclic_garbage(schedule_policy: str) -> None:
    """The scheduler process puts off full collections because of this (front/garbage.py)."""
    scheduler = new_scheduler(
        SchedulingArgs(page_size=2, max_running_requests=8, schedule_policy=schedule_policy),
        ThrottleArgs(policy="sarathi"),
        num_pages=60,
        num_stages=1,
    )
    gc.collect()
    gc.disable()
    try:
        for number in range(200):
            prompt = [number % 3] * 9 + [number] * 10
            scheduler.add(make_request(str(number), prompt, 30))
            if number % 10 == 0:
                scheduler.abort(str(number), FinishReason("abort"))
        while (microbatch := scheduler.next_microbatch(0.0)) is not None:
            scheduler.on_result(microbatch.step_id, [1] * microbatch.num_samples, 0.0)
        assert scheduler.is_idle
        assert scheduler.num_retractions > 0
        del microbatch
        assert scheduler.flush_cache()
        assert gc.collect() == 0
    finally:
        gc.enable()
