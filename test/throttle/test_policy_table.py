"""The names in `args/throttle_args.py` against the functions in `throttle/`, and what all share."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.args import POLICIES, ThrottleArgs
from sgl_pipeline.throttle import POLICY_TABLE, PipelineLoad, make_policy


def test_every_policy_of_the_command_line_has_a_function_and_no_other_has_one() -> None:
    assert tuple(POLICY_TABLE) == POLICIES


@given(
    policy=st.sampled_from(POLICIES),
    depth=st.integers(1, 9),
    waiting=st.integers(0, 10**7),
    prompts=st.integers(0, 3),
    ready=st.integers(0, 300),
    flying=st.integers(0, 300),
    free=st.integers(0, 1000),
    reserved=st.integers(0, 3000),
    steps=st.tuples(st.integers(0, 100), st.integers(0, 9)),
)
def test_every_policy_stays_within_its_bounds_and_never_stalls(
    policy: str,
    depth: int,
    waiting: int,
    prompts: int,
    ready: int,
    flying: int,
    free: int,
    reserved: int,
    steps: tuple[int, int],
) -> None:
    args = ThrottleArgs(policy=policy)
    load = PipelineLoad(
        step_id=steps[0],
        pipeline_depth=depth,
        waiting_tokens=waiting,
        prompts=prompts,
        running_decodes=ready + flying,
        ready_decodes=ready,
        free_pages=free,
        reserved_pages=reserved,
        total_pages=1000,
        steps_in_flight=steps[1],
    )
    answer = make_policy(args)(load)
    assert answer == make_policy(args)(load)
    assert 0 <= answer.prefill_tokens <= args.prefill_limit
    assert 0 <= answer.decodes <= ready
    assert answer.decodes > 0 or ready == 0
    if not load.running_decodes and not load.steps_in_flight:
        assert answer.prefill_tokens > 0
