"""Equation 3 by hand, its edges, and the paper's case studies."""

import pytest

from sgl_pipeline.args import POLICIES, ThrottleArgs
from sgl_pipeline.throttle import PipelineLoad, make_policy

ARGS = ThrottleArgs(policy="throttle")


def load(**changes: int) -> PipelineLoad:
    """An idle pipeline of four stages, all of whose 1000 pages are free, with `changes`."""
    values = {
        "step_id": 0,
        "pipeline_depth": 4,
        "waiting_tokens": 0,
        "prompts": 2,
        "running_decodes": 0,
        "ready_decodes": 0,
        "free_pages": 1000,
        "reserved_pages": 4,
        "total_pages": 1000,
        "steps_in_flight": 0,
    }
    return PipelineLoad(**(values | changes))


def prefill_tokens(args: ThrottleArgs = ARGS, **changes: int) -> int:
    return make_policy(args)(load(**changes)).prefill_tokens


def test_waiting_tokens_are_spread_over_the_configured_steps() -> None:
    assert prefill_tokens(waiting_tokens=8000) == 1000


def test_a_share_of_the_waiting_tokens_is_rounded_up() -> None:
    assert prefill_tokens(waiting_tokens=8001) == 1001


def test_full_free_memory_and_a_huge_queue_give_exactly_the_maximum() -> None:
    for pause in (0.0, 0.05, 0.1, 0.3, 0.7):
        args = ThrottleArgs(pause_free_share=pause)
        assert prefill_tokens(args, waiting_tokens=10**9) == args.prefill_limit


def test_prefill_shrinks_linearly_with_free_memory() -> None:
    # (0.525 - 0.05) / (1 - 0.05) = 0.5
    assert prefill_tokens(waiting_tokens=10**9, free_pages=525) == 1024


def test_prefill_never_shrinks_below_the_minimum_above_the_threshold() -> None:
    assert prefill_tokens(waiting_tokens=10**9, free_pages=51) == ARGS.min_prefill_tokens
    assert prefill_tokens(waiting_tokens=3) == ARGS.min_prefill_tokens


@pytest.mark.parametrize("busy", [{"running_decodes": 1}, {"steps_in_flight": 1}])
def test_prefill_stops_below_kv_threshold(busy: dict[str, int]) -> None:
    assert prefill_tokens(waiting_tokens=10**9, free_pages=49, **busy) == 0
    assert prefill_tokens(waiting_tokens=10**9, free_pages=50, **busy) > 0


def test_prefill_goes_on_below_the_threshold_when_nothing_else_moves() -> None:
    assert prefill_tokens(waiting_tokens=800, free_pages=0) == 100
    assert prefill_tokens(waiting_tokens=10**9, free_pages=0) == ARGS.prefill_limit


@pytest.mark.parametrize("policy", POLICIES)
def test_full_memory_and_a_short_queue_give_the_minimum_or_more(policy: str) -> None:
    tokens = prefill_tokens(ThrottleArgs(policy=policy), waiting_tokens=1)
    assert ARGS.min_prefill_tokens <= tokens <= ThrottleArgs(policy=policy).prefill_limit


def test_without_the_waiting_term_memory_alone_decides() -> None:
    args = ThrottleArgs(policy="no-wt")
    assert prefill_tokens(args, waiting_tokens=8) == 2048
    assert prefill_tokens(args, waiting_tokens=8, free_pages=525) == 1024
    assert prefill_tokens(args, waiting_tokens=8, free_pages=49, running_decodes=1) == 0
    assert prefill_tokens(args, waiting_tokens=8, free_pages=49) == 2048


def test_without_the_memory_term_what_waits_decides_up_to_the_maximum() -> None:
    args = ThrottleArgs(policy="no-ut")
    assert prefill_tokens(args, waiting_tokens=8000, free_pages=50) == 1000
    assert prefill_tokens(args, waiting_tokens=10**9, free_pages=50) == 2048
    assert prefill_tokens(args, waiting_tokens=10**9, free_pages=49, running_decodes=1) == 0


def test_without_the_threshold_prefill_never_pauses() -> None:
    args = ThrottleArgs(policy="no-threshold", pause_free_share=0.3)
    assert prefill_tokens(args, waiting_tokens=10**9) == 2048
    assert prefill_tokens(args, waiting_tokens=10**9, free_pages=250) == 512
    assert prefill_tokens(args, waiting_tokens=10**9, free_pages=0, running_decodes=1) == 32


def test_the_ablations_leave_the_decodes_as_they_are() -> None:
    busy = load(waiting_tokens=10**9, free_pages=300, running_decodes=26, ready_decodes=26)
    for policy in ("throttle", "throttle-adaptive", "no-wt", "no-ut", "no-threshold"):
        assert make_policy(ThrottleArgs(policy=policy))(busy).decodes == 7


def test_prefill_and_decode_budgets_are_independent() -> None:
    budgets = {
        make_policy(ARGS)(load(waiting_tokens=8000, running_decodes=n, ready_decodes=n))
        for n in (0, 40)
    }
    assert {(b.prefill_tokens, b.decodes) for b in budgets} == {(1000, 0), (1000, 10)}


def test_a_budget_tells_which_term_bound_it() -> None:
    def bound_by(policy: str = "throttle", **changes: int) -> str:
        return make_policy(ThrottleArgs(policy=policy))(load(**changes)).bound_by

    assert bound_by(waiting_tokens=8000) == "WT"
    assert bound_by(waiting_tokens=8000, free_pages=200) == "UT"
    assert bound_by(waiting_tokens=10**9) == "MaxP"
    assert bound_by(waiting_tokens=8) == bound_by(waiting_tokens=10**9, free_pages=51) == "MinP"
    assert bound_by(waiting_tokens=10**9, free_pages=49, running_decodes=1) == "pause"
    assert bound_by("no-wt", waiting_tokens=8, free_pages=900) == "UT"
    assert bound_by("no-ut", waiting_tokens=8000, free_pages=60) == "WT"


def test_a_burst_is_spread_over_the_steps() -> None:
    """Case study T = 3: each step takes a third of what still waits, none takes a peak."""
    args = ThrottleArgs(prefill_spread_steps=3)
    waiting, taken = 3000, []
    while waiting:
        taken.append(min(waiting, prefill_tokens(args, waiting_tokens=waiting)))
        waiting -= taken[-1]
    assert taken[:4] == [1000, 667, 445, 296]
    assert taken == sorted(taken, reverse=True)
    assert min(taken[:-1]) >= args.min_prefill_tokens


def test_a_nearly_full_cache_slows_prefill_down_before_it_pauses() -> None:
    """Case study: KV filling up while many prompts wait."""
    budgets = [
        prefill_tokens(waiting_tokens=10**9, free_pages=free, running_decodes=8)
        for free in (1000, 500, 250, 100, 60, 40)
    ]
    assert budgets == [2048, 970, 431, 107, 32, 0]
