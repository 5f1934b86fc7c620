"""`--pp-max-micro-batch-size` over every policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pipelines import FakePipeline, make_request, new_scheduler

from sgl_pipeline.args import POLICIES, SchedulingArgs, ThrottleArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.throttle import PipelineLoad, limit_decodes, make_policy

LOADS = st.builds(
    PipelineLoad,
    step_id=st.integers(0, 9),
    pipeline_depth=st.integers(1, 8),
    waiting_tokens=st.sampled_from([0, 5000]),
    prompts=st.just(3),
    running_decodes=st.integers(200, 600),
    ready_decodes=st.integers(0, 200),
    free_pages=st.sampled_from([10, 600]),
    reserved_pages=st.just(5),
    total_pages=st.just(1000),
    steps_in_flight=st.integers(0, 3),
)


@given(policy=st.sampled_from(POLICIES), load=LOADS, most=st.integers(1, 200))
def test_no_policy_gives_a_step_more_decodes_than_the_limit(
    policy: str, load: PipelineLoad, most: int
) -> None:
    plain = make_policy(ThrottleArgs(policy=policy))
    limited = limit_decodes(plain, most)(load)
    assert limited.decodes <= most
    assert limited.decodes == min(most, plain(load).decodes)
    if load.ready_decodes <= most:
        assert limited == plain(load)


def test_prefill_gets_what_limited_decodes_leave_of_a_shared_budget() -> None:
    policy = make_policy(ThrottleArgs(policy="sarathi", max_prefill_tokens=512))
    load = PipelineLoad(
        step_id=0,
        pipeline_depth=1,
        waiting_tokens=5000,
        prompts=3,
        running_decodes=100,
        ready_decodes=100,
        free_pages=900,
        reserved_pages=0,
        total_pages=1000,
        steps_in_flight=0,
    )
    assert policy(load).prefill_tokens == 412
    limited = limit_decodes(policy, 30)(load)
    assert (limited.decodes, limited.prefill_tokens) == (30, 482)
    assert limit_decodes(policy, None) is policy


@pytest.mark.parametrize("policy", POLICIES)
def test_all_decodes_take_turns_under_the_limit(policy: str) -> None:
    scheduler = new_scheduler(
        SchedulingArgs(max_decodes_per_step=3),
        ThrottleArgs(policy=policy),
        num_pages=100,
        num_stages=2,
        context_length=100,
    )
    pipeline = FakePipeline(scheduler, page_size=16)
    requests = [make_request(str(number), [number], 8) for number in range(20)]
    for request in requests:
        scheduler.add(request)
    pipeline.drain()
    decodes = [microbatch.num_decodes for microbatch in pipeline.microbatches]
    assert max(decodes) == 3
    assert all(len(request.output_ids) == 8 for request in requests)
    # Knobs that change while the server runs bring another policy, under the same limit.
    scheduler.use_policy(make_policy(ThrottleArgs(policy="sarathi")), "radix")
    for number in range(20):
        scheduler.add(make_request(f"later {number}", [number], 8))
    pipeline.drain()
    assert max(microbatch.num_decodes for microbatch in pipeline.microbatches) == 3


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--pp-max-micro-batch-size 0 .* 1"):
        SchedulingArgs(max_decodes_per_step=0)
