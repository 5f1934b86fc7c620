"""The reserve for growing decodes in place of the threshold, by hand."""

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.throttle import PipelineLoad, TokenBudget, make_policy

ARGS = ThrottleArgs(policy="throttle-adaptive")


def prefill_tokens(args: ThrottleArgs = ARGS, **changes: int) -> int:
    return budget(args, **changes).prefill_tokens


def budget(args: ThrottleArgs = ARGS, **changes: int) -> TokenBudget:
    """Of four stages with a long queue, all of whose 1000 pages are free, with `changes`."""
    values = {
        "step_id": 0,
        "pipeline_depth": 4,
        "waiting_tokens": 10**9,
        "prompts": 100,
        "running_decodes": 8,
        "ready_decodes": 2,
        "free_pages": 1000,
        "reserved_pages": 4,
        "total_pages": 1000,
        "steps_in_flight": 3,
    }
    return make_policy(args)(PipelineLoad(**(values | changes)))


def test_the_maximum_is_that_of_gllms_code_unless_set() -> None:
    assert ARGS.prefill_limit == 8192
    assert ThrottleArgs(policy="throttle").prefill_limit == 2048
    for reserved in (0, 4, 100, 999):
        assert prefill_tokens(reserved_pages=reserved) == 8192
    args = ThrottleArgs(policy="throttle-adaptive", max_prefill_tokens=512)
    assert prefill_tokens(args) == 512


def test_prefill_shrinks_with_the_free_pages_above_the_reserve() -> None:
    # (600 - 200) / (1000 - 200) = 0.5
    assert prefill_tokens(free_pages=600, reserved_pages=200) == 4096
    # The minimum does not lift what memory allows: 8192 * 1 / 800 = 10.24
    assert prefill_tokens(free_pages=201, reserved_pages=200) == 10


def test_prefill_pauses_while_the_decodes_may_need_all_that_is_free() -> None:
    assert prefill_tokens(free_pages=200, reserved_pages=200) == 0
    assert prefill_tokens(free_pages=200, reserved_pages=5000) == 0
    assert prefill_tokens(free_pages=200, reserved_pages=200, running_decodes=0) == 0


def test_the_pause_is_lifted_when_nothing_else_moves() -> None:
    nothing_moves = {"running_decodes": 0, "ready_decodes": 0, "steps_in_flight": 0}
    assert prefill_tokens(free_pages=2, **nothing_moves) == 8192
    assert prefill_tokens(free_pages=2, waiting_tokens=8000, **nothing_moves) == 1000


def test_several_prompts_are_spread_and_a_single_one_is_not() -> None:
    assert prefill_tokens(waiting_tokens=8000, prompts=2) == 1000
    assert prefill_tokens(waiting_tokens=8, prompts=2) == ARGS.min_prefill_tokens
    assert prefill_tokens(waiting_tokens=8000, prompts=1) == 8192


def test_a_budget_tells_which_term_bound_it() -> None:
    assert budget().bound_by == "MaxP"
    assert budget(free_pages=600).bound_by == "UT"
    assert budget(waiting_tokens=8000).bound_by == "WT"
    assert budget(waiting_tokens=8).bound_by == "MinP"
    assert budget(free_pages=200, reserved_pages=200).bound_by == "pause"
