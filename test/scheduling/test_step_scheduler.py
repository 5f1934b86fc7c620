"""The scheduler's promises, one by one, in a virtual pipeline."""

from typing import Any

import pytest
from fault_schedules.fake_model import logprobs_of
from support.pipelines import (
    FakePipeline,
    logprobs_when_alone,
    make_request,
    output_when_alone,
)

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.errors import ProtocolError, QueueFullError, RequestError
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.requests import FinishReason, LogprobRows, Request, RequestState
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.throttle import PipelineLoad, TokenBudget, make_policy

ABORTED = FinishReason("abort", message="the client went away")


def pipeline_of(
    num_pages: int = 1000,
    num_stages: int = 1,
    throttle: ThrottleArgs | None = None,
    **scheduling: Any,
) -> FakePipeline:
    """Pages of one token and budgets that are never short, unless told otherwise."""
    args = SchedulingArgs(**({"page_size": 1} | scheduling))
    policy = make_policy(throttle or ThrottleArgs(policy="sarathi"))
    scheduler = StepScheduler(
        args, policy, num_pages=num_pages, num_stages=num_stages, context_length=100_000
    )
    return FakePipeline(scheduler, args.page_size)


def small_chunks(tokens: int, policy: str = "sarathi") -> ThrottleArgs:
    return ThrottleArgs(policy=policy, max_prefill_tokens=tokens, min_prefill_tokens=1)


def add(pipeline: FakePipeline, *requests: Request) -> None:
    for request in requests:
        pipeline.scheduler.add(request)


def shape(microbatch: Microbatch | None) -> list[tuple[str, int, int]]:
    assert microbatch is not None
    return [(chunk.request.request_id, chunk.start, chunk.length) for chunk in microbatch.chunks]


def all_pages_are_back(pipeline: FakePipeline) -> bool:
    load = pipeline.scheduler.load()
    return load.free_pages == load.total_pages and load.waiting_tokens == 0


# The walk of one request


def test_a_request_prefills_then_decodes_and_frees_its_pages() -> None:
    pipeline = pipeline_of(radix_cache=False)
    request = make_request("r", [1, 2, 3], max_new_tokens=3)
    add(pipeline, request)
    events = pipeline.drain()
    assert [shape(m) for m in pipeline.microbatches] == [
        [("r", 0, 3)],
        [("r", 3, 1)],
        [("r", 4, 1)],
    ]
    assert [event.token_ids for event in events] == [(t,) for t in output_when_alone(request)]
    assert [event.finish for event in events] == [None, None, FinishReason("length")]
    assert request.state is RequestState.FINISHED
    assert all_pages_are_back(pipeline)


def test_no_new_tokens_finishes_after_prefill_and_fills_the_cache() -> None:
    pipeline = pipeline_of()
    add(pipeline, make_request("first", [1, 2, 3, 4], max_new_tokens=0))
    (event,) = pipeline.drain()
    assert (event.token_ids, event.finish) == ((), FinishReason("length"))
    assert pipeline.microbatches[0].num_samples == 0
    second = make_request("second", [1, 2, 3, 4], max_new_tokens=1)
    add(pipeline, second)
    pipeline.drain()
    assert second.cached_tokens == 3


def test_no_new_tokens_but_log_probabilities_draw_one_token_and_drop_it() -> None:
    pipeline = pipeline_of()
    request = make_request("scored", [1, 2, 3, 4], max_new_tokens=0, logprob_start=1)
    add(pipeline, request)
    (event,) = pipeline.drain()
    assert (event.token_ids, event.finish) == ((), FinishReason("length"))
    assert pipeline.microbatches[0].num_samples == 1
    assert request.output_ids == []
    assert logprobs_of(request) == logprobs_when_alone(request)
    assert len(logprobs_of(request)) == 3


@pytest.mark.parametrize(("rows", "named"), [([], "0 chunks, 1 are due"), ([2], "2 positions, 3")])
def test_log_probabilities_of_another_number_are_a_protocol_error(
    rows: list[int], named: str
) -> None:
    pipeline = pipeline_of()
    add(pipeline, make_request("r", [1, 2, 3], logprob_start=0))
    pipeline.schedule()
    with pytest.raises(ProtocolError, match=named):
        pipeline.scheduler.on_result(
            0, [3], 0.0, [LogprobRows(count, bytes(4 * count)) for count in rows]
        )


def test_chunks_of_one_prompt_are_in_flight_in_consecutive_steps() -> None:
    pipeline = pipeline_of(num_stages=3, throttle=small_chunks(4))
    add(pipeline, make_request("r", list(range(12))))
    pipeline.fill()
    assert [shape(m) for m in pipeline.microbatches] == [
        [("r", 0, 4)],
        [("r", 4, 4)],
        [("r", 8, 4)],
    ]
    assert [m.num_samples for m in pipeline.microbatches] == [0, 0, 1]


def test_a_microbatch_has_decodes_first_then_running_then_new_prefills() -> None:
    pipeline = pipeline_of(throttle=small_chunks(8))
    add(pipeline, make_request("decode", [1, 2]))
    pipeline.schedule()
    pipeline.complete()
    add(pipeline, make_request("long", list(range(10, 20))), make_request("short", [7, 8]))
    assert shape(pipeline.schedule()) == [("decode", 2, 1), ("long", 0, 7)]
    pipeline.complete()
    assert shape(pipeline.schedule()) == [("decode", 3, 1), ("long", 7, 3), ("short", 0, 2)]
    assert pipeline.microbatches[-1].num_decodes == 1


@pytest.mark.parametrize(
    ("prompt_tokens", "chunks"),
    [(64, [64]), (72, [72]), (73, [64, 9]), (136, [64, 72]), (1, [1])],
)
def test_a_tiny_tail_goes_along_with_the_chunk_before_it(
    prompt_tokens: int, chunks: list[int]
) -> None:
    pipeline = pipeline_of(throttle=small_chunks(64))
    add(pipeline, make_request("r", list(range(prompt_tokens)), max_new_tokens=0))
    pipeline.drain()
    assert [m.num_tokens for m in pipeline.microbatches] == chunks


@pytest.mark.parametrize("extra", [0, 2])
def test_no_more_steps_are_in_flight_than_stages_and_extra(extra: int) -> None:
    pipeline = pipeline_of(num_stages=3, throttle=small_chunks(2), extra_steps_in_flight=extra)
    add(pipeline, make_request("r", list(range(50))))
    pipeline.fill()
    assert pipeline.steps_in_flight == 3 + extra


def test_no_more_requests_run_than_allowed() -> None:
    pipeline = pipeline_of(max_running_requests=2)
    add(pipeline, *(make_request(str(n), [n]) for n in range(5)))
    pipeline.schedule()
    assert (pipeline.scheduler.num_running, pipeline.scheduler.num_waiting) == (2, 3)


def test_nothing_to_do_is_no_microbatch() -> None:
    assert pipeline_of().scheduler.next_microbatch(0.0) is None


# Results


def test_a_result_out_of_turn_or_of_the_wrong_size_is_a_protocol_error() -> None:
    pipeline = pipeline_of()
    scheduler = pipeline.scheduler
    with pytest.raises(ProtocolError, match="none is in flight"):
        scheduler.on_result(0, [], 0.0)
    add(pipeline, make_request("r", [1]))
    pipeline.schedule()
    with pytest.raises(ProtocolError, match=r"step 1 .* 0 "):
        scheduler.on_result(1, [3], 0.0)
    with pytest.raises(ProtocolError, match="2 tokens, 1 "):
        scheduler.on_result(0, [3, 3], 0.0)
    assert scheduler.on_result(0, [3], 0.0)[0].token_ids == (3,)


# The radix cache


def test_a_second_request_computes_only_what_the_first_did_not() -> None:
    pipeline = pipeline_of(page_size=16)
    prefix = list(range(1000))
    add(pipeline, make_request("first", [*prefix, 1, 2], max_new_tokens=1))
    pipeline.drain()
    second = make_request("second", [*prefix, 3, 4], max_new_tokens=1)
    add(pipeline, second)
    assert shape(pipeline.schedule()) == [("second", 992, 10)]
    assert second.cached_tokens == 992


def test_the_output_of_a_finished_request_can_be_matched_but_for_its_last_token() -> None:
    pipeline = pipeline_of()
    first = make_request("first", [1, 2, 3], max_new_tokens=3)
    add(pipeline, first)
    pipeline.drain()
    second = make_request("second", [1, 2, 3, *first.output_ids, 9, 9])
    add(pipeline, second)
    pipeline.schedule()
    # Nobody fed the last sampled token back, so there is no key and value of it.
    assert second.cached_tokens == 5


def test_pages_become_matchable_only_when_their_step_has_returned() -> None:
    pipeline = pipeline_of(num_stages=2)
    first, second = make_request("first", [1, 2, 3]), make_request("second", [1, 2, 9])
    add(pipeline, first)
    pipeline.schedule()
    pipeline.scheduler.abort("first", ABORTED)
    add(pipeline, second)
    assert shape(pipeline.schedule()) == [("second", 0, 3)]
    assert second.cached_tokens == 0
    pipeline.drain()
    assert second.output_ids == output_when_alone(second)


def test_of_several_chunks_in_flight_only_those_that_returned_can_be_matched() -> None:
    pipeline = pipeline_of(num_stages=3, throttle=small_chunks(4))
    add(pipeline, make_request("first", list(range(12))))
    pipeline.fill()
    pipeline.complete()
    pipeline.scheduler.abort("first", ABORTED)
    second = make_request("second", list(range(12)))
    add(pipeline, second)
    assert shape(pipeline.schedule()) == [("second", 4, 4)]
    pipeline.drain()
    assert second.output_ids == output_when_alone(second)


def test_a_prefix_in_work_counts_once_and_is_computed_once() -> None:
    pipeline = pipeline_of(num_stages=2)
    prefix = list(range(100))
    first, second = make_request("first", [*prefix, 1]), make_request("second", [*prefix, 2])
    add(pipeline, first, second)
    assert pipeline.scheduler.load().waiting_tokens == 102
    pipeline.schedule()
    assert pipeline.scheduler.load().waiting_tokens == 1
    assert pipeline.schedule() is None
    pipeline.complete()
    assert shape(pipeline.schedule()) == [("first", 101, 1), ("second", 100, 1)]
    assert second.cached_tokens == 100


def test_who_waited_for_an_aborted_prefill_goes_on_at_once() -> None:
    pipeline = pipeline_of(num_stages=2, throttle=small_chunks(4))
    first, second = make_request("first", list(range(20))), make_request("second", list(range(20)))
    add(pipeline, first, second)
    pipeline.schedule()
    pipeline.complete()
    pipeline.schedule()
    pipeline.scheduler.abort("first", ABORTED)
    assert shape(pipeline.schedule()) == [("second", 4, 4)]
    pipeline.drain()
    assert second.output_ids == output_when_alone(second)
    assert all_pages_are_back(pipeline)


def test_long_prompts_are_matchable_chunk_by_chunk() -> None:
    pipeline = pipeline_of(throttle=small_chunks(10))
    add(pipeline, make_request("first", list(range(50))))
    pipeline.schedule()
    pipeline.complete()
    second = make_request("second", [*range(8), 99])
    add(pipeline, second)
    assert shape(pipeline.schedule()) == [("first", 10, 10)]
    pipeline.scheduler.abort("first", ABORTED)
    pipeline.drain()
    assert second.cached_tokens == 8


def test_the_cache_can_be_switched_off() -> None:
    pipeline = pipeline_of(radix_cache=False)
    for name in ("first", "second"):
        request = make_request(name, list(range(30)))
        add(pipeline, request)
        pipeline.drain()
        assert request.cached_tokens == 0
        assert request.output_ids == output_when_alone(request)


def test_namespaces_do_not_share_pages() -> None:
    pipeline = pipeline_of()
    for number, namespace in enumerate(["", "a", "b"]):
        request = make_request(str(number), [1, 2, 3], namespace=namespace)
        add(pipeline, request)
        pipeline.drain()
        assert request.cached_tokens == 0


def test_flushing_is_refused_while_busy_and_empties_the_cache_when_idle() -> None:
    pipeline = pipeline_of()
    add(pipeline, make_request("first", [1, 2, 3]))
    assert not pipeline.scheduler.flush_cache()
    pipeline.drain()
    assert pipeline.scheduler.flush_cache()
    second = make_request("second", [1, 2, 3])
    add(pipeline, second)
    pipeline.drain()
    assert second.cached_tokens == 0


# Aborts


def abort_while_waiting(pipeline: FakePipeline) -> None:
    pipeline.scheduler.abort("victim", ABORTED)


def abort_with_chunks_in_flight(pipeline: FakePipeline) -> None:
    pipeline.fill()
    assert pipeline.steps_in_flight == 3
    pipeline.scheduler.abort("victim", ABORTED)


def abort_between_chunks(pipeline: FakePipeline) -> None:
    pipeline.schedule()
    pipeline.complete()
    pipeline.scheduler.abort("victim", ABORTED)


def abort_with_a_decode_in_flight(pipeline: FakePipeline) -> None:
    pipeline.fill()
    for _ in range(3):
        pipeline.complete()
    pipeline.schedule()
    assert pipeline.microbatches[-1].num_decodes == 1
    pipeline.scheduler.abort("victim", ABORTED)


def abort_a_ready_decode(pipeline: FakePipeline) -> None:
    pipeline.fill()
    for _ in range(3):
        pipeline.complete()
    pipeline.scheduler.abort("victim", ABORTED)


@pytest.mark.parametrize(
    "abort",
    [
        abort_while_waiting,
        abort_with_chunks_in_flight,
        abort_between_chunks,
        abort_with_a_decode_in_flight,
        abort_a_ready_decode,
    ],
)
@pytest.mark.parametrize("radix_cache", [True, False])
def test_an_abort_in_any_state_brings_all_pages_back(abort: Any, radix_cache: bool) -> None:
    pipeline = pipeline_of(
        num_pages=40, num_stages=3, throttle=small_chunks(4), radix_cache=radix_cache
    )
    victim = make_request("victim", list(range(12)))
    add(pipeline, victim)
    abort(pipeline)
    assert (victim.state, victim.finish) == (RequestState.FINISHED, ABORTED)
    pipeline.scheduler.check_invariants()
    assert pipeline.drain() == []
    assert all_pages_are_back(pipeline)
    assert pipeline.scheduler.abort("victim", ABORTED) is None
    # The stages forget it with the next step, and the next request is none the wiser.
    other = make_request("other", list(range(12)))
    add(pipeline, other)
    released = pipeline.scheduler.next_microbatch(0.0)
    assert released is not None
    assert (victim in released.released) == (abort is not abort_while_waiting)


def test_a_retracted_request_can_be_aborted() -> None:
    pipeline, _, young = pipeline_under_pressure()
    while not young.num_retractions:
        pipeline.schedule()
        pipeline.complete()
    assert young.state is RequestState.WAITING
    assert pipeline.scheduler.abort("young", ABORTED) is young
    pipeline.drain()
    assert all_pages_are_back(pipeline)


# Memory pressure


def pipeline_under_pressure(
    num_stages: int = 1, **scheduling: Any
) -> tuple[FakePipeline, Request, Request]:
    """Two requests that fit one after the other, but not together, in ten pages."""
    pipeline = pipeline_of(num_pages=10, num_stages=num_stages, **scheduling)
    old = make_request("old", [1, 2], max_new_tokens=8)
    young = make_request("young", [3, 4], max_new_tokens=8)
    add(pipeline, old, young)
    return pipeline, old, young


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("radix_cache", [True, False])
def test_the_youngest_is_retracted_and_recomputed(num_stages: int, radix_cache: bool) -> None:
    pipeline, old, young = pipeline_under_pressure(num_stages, radix_cache=radix_cache)
    finished = [event.request for event in pipeline.drain() if event.finish]
    assert finished == [old, young]
    assert (old.num_retractions, young.num_retractions) == (0, pipeline.scheduler.num_retractions)
    assert young.num_retractions > 0
    for request in (old, young):
        assert request.output_ids == output_when_alone(request)


def test_a_retracted_request_finds_its_own_pages_but_does_not_report_them() -> None:
    pipeline, _, young = pipeline_under_pressure()
    pipeline.drain()
    again = [
        chunk
        for microbatch in pipeline.microbatches
        for chunk in microbatch.chunks
        if chunk.request is young and not chunk.is_decode and chunk.end > 2
    ]
    assert again[0].start > 0
    assert young.cached_tokens == 0


def test_priority_goes_before_arrival_in_retraction() -> None:
    pipeline = pipeline_of(num_pages=10)
    low = make_request("low", [1, 2], max_new_tokens=8)
    high = make_request("high", [3, 4], max_new_tokens=8, priority=1)
    add(pipeline, low, high)
    pipeline.drain()
    assert (low.num_retractions > 0, high.num_retractions) == (True, 0)


def test_a_request_with_a_step_in_flight_is_never_retracted() -> None:
    pipeline, old, young = pipeline_under_pressure(num_stages=2, radix_cache=False)
    while not pipeline.scheduler.is_idle:
        before = {request: request.steps_in_flight for request in (old, young)}
        counts = {request: request.num_retractions for request in (old, young)}
        if pipeline.schedule() is None:
            pipeline.complete()
        for request in (old, young):
            assert request.num_retractions == counts[request] or before[request] == 0


def test_a_prompt_that_fills_the_pool_runs_alone() -> None:
    """KV full with only prefill waiting: the throttle's pause must not become a deadlock."""
    for policy in ("throttle", "sarathi", "greedy-queue"):
        pipeline = pipeline_of(num_pages=100, num_stages=4, throttle=small_chunks(16, policy))
        requests = [make_request(str(n), [n] * 95, max_new_tokens=6) for n in range(3)]
        add(pipeline, *requests)
        pipeline.drain(max_steps=500)
        for request in requests:
            assert request.output_ids == output_when_alone(request)


def test_a_newcomer_leaves_each_running_request_a_page() -> None:
    pipeline = pipeline_of(num_pages=10, radix_cache=False)
    add(pipeline, make_request("old", [1, 2, 3, 4], max_new_tokens=2))
    pipeline.schedule()
    pipeline.complete()
    # Old holds four pages, its decode takes the fifth, and one more is kept for it.
    add(pipeline, make_request("five", [5] * 5, 0))
    assert shape(pipeline.schedule()) == [("old", 4, 1)]
    pipeline.complete()
    assert shape(pipeline.schedule()) == [("five", 0, 5)]


def test_a_prefill_whose_pages_a_later_decode_took_gets_them_back() -> None:
    """Both run, neither can go on: the one behind gives way."""
    pipeline = pipeline_of(num_pages=20, throttle=small_chunks(2), radix_cache=False)
    late = make_request("late", [1], max_new_tokens=15)
    add(pipeline, late)
    pipeline.schedule()
    pipeline.complete()
    first = make_request("first", list(range(17)), max_new_tokens=1, priority=1)
    add(pipeline, first)
    pipeline.drain()
    assert (late.num_retractions, first.num_retractions) == (1, 0)
    for request in (late, first):
        assert request.output_ids == output_when_alone(request)


# Refusals


def test_a_request_larger_than_the_pool_is_refused() -> None:
    pipeline = pipeline_of(num_pages=10)
    with pytest.raises(RequestError, match="--max-total-tokens") as caught:
        add(pipeline, make_request("r", [1] * 9, max_new_tokens=3))
    assert caught.value.status_code == 400
    assert pipeline.scheduler.is_idle


def test_a_full_queue_refuses_all_but_health_checks() -> None:
    pipeline = pipeline_of(max_queued_requests=2)
    add(pipeline, make_request("1", [1]), make_request("2", [1]))
    with pytest.raises(QueueFullError, match="--max-queued-requests") as caught:
        add(pipeline, make_request("3", [1]))
    assert caught.value.status_code == 503
    add(pipeline, make_request("HEALTH_CHECK_3", [1], max_new_tokens=1))
    assert len(pipeline.drain()) == 9


def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    pipeline = pipeline_of()
    add(pipeline, make_request("r", [1]))
    with pytest.raises(RequestError, match="already being served"):
        add(pipeline, make_request("r", [2]))
    pipeline.drain()
    add(pipeline, make_request("r", [2]))


def test_a_step_carries_the_load_and_the_budget_that_made_it() -> None:
    """The second ones where it was decided again, because nothing could run before a retraction."""
    decide = make_policy(small_chunks(2))
    decisions: list[tuple[PipelineLoad, TokenBudget]] = []

    def policy(load: PipelineLoad) -> TokenBudget:
        decisions.append((load, decide(load)))
        return decisions[-1][1]

    args = SchedulingArgs(page_size=1, radix_cache=False)
    scheduler = StepScheduler(args, policy, num_pages=20, num_stages=1, context_length=100)
    pipeline = FakePipeline(scheduler, 1)
    add(pipeline, make_request("late", [1], max_new_tokens=15))
    pipeline.schedule()
    pipeline.complete()
    add(pipeline, make_request("first", list(range(17)), max_new_tokens=1, priority=1))
    most_decisions = 0
    while not scheduler.is_idle:
        num_before = len(decisions)
        microbatch = pipeline.schedule()
        assert microbatch is not None
        most_decisions = max(most_decisions, len(decisions) - num_before)
        assert microbatch.load is decisions[-1][0]
        assert microbatch.budget is decisions[-1][1]
        assert microbatch.load.step_id == microbatch.step_id
        pipeline.complete()
    assert most_decisions == 2
