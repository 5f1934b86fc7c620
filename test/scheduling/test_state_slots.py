"""A request of a model with states owns a slot, from its admission to the end of its last step."""

from random import Random

import pytest
from support.pipelines import (
    FakePipeline,
    make_request,
    new_pipeline,
    new_scheduler,
    output_when_alone,
)

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.requests import FinishReason, Request
from sgl_pipeline.scheduling.recovery_log import RecoveryLog
from sgl_pipeline.scheduling.state_slots import StateSlots

ABORTED = FinishReason("abort", message="the client went away")


def pipeline_of(
    num_state_slots: int, *, num_pages: int = 64, num_stages: int = 2, **options: object
) -> FakePipeline:
    args = SchedulingArgs(
        page_size=4,
        radix_cache=False,
        num_state_slots=num_state_slots,
        **options,  # type: ignore[arg-type]
    )
    throttle = ThrottleArgs(policy="sarathi", max_prefill_tokens=8, min_prefill_tokens=1)
    return new_pipeline(args, throttle, num_pages=num_pages, num_stages=num_stages)


def add(pipeline: FakePipeline, *names: str, max_new_tokens: int = 6) -> list[Request]:
    requests = [make_request(name, [ord(name) % 5] * 3, max_new_tokens) for name in names]
    for request in requests:
        pipeline.scheduler.add(request)
    return requests


def test_as_many_requests_run_as_there_are_slots() -> None:
    pipeline = pipeline_of(2)
    first, second, third = add(pipeline, "a", "b", "c")
    pipeline.fill()
    assert {first.state_slot, second.state_slot} == {0, 1}
    assert third.state_slot is None and pipeline.scheduler.num_running == 2
    pipeline.drain()
    assert third.output_ids == output_when_alone(third)
    assert pipeline.scheduler.state_slots.num_free == 2


def test_a_model_without_states_has_no_slots() -> None:
    pipeline = new_pipeline(num_pages=16, num_stages=1)
    (request,) = add(pipeline, "a")
    pipeline.fill()
    assert request.state_slot is None and not pipeline.scheduler.state_slots.are_taken
    pipeline.drain()


def test_the_slot_of_an_aborted_request_is_free_when_its_last_step_is_back() -> None:
    pipeline = pipeline_of(1)
    first, second = add(pipeline, "a", "b")
    first.prompt_ids += [1] * 13
    first.prefill_end = 16
    pipeline.fill()
    assert first.steps_in_flight == 2
    pipeline.scheduler.abort("a", ABORTED)
    pipeline.complete()
    pipeline.fill()
    assert (first.state_slot, second.state_slot) == (0, None)
    pipeline.complete()
    pipeline.fill()
    assert (first.state_slot, second.state_slot) == (None, 0)
    pipeline.drain()
    assert second.output_ids == output_when_alone(second)


def test_a_retracted_request_gives_its_slot_back_and_takes_one_again() -> None:
    pipeline = pipeline_of(3, num_pages=5, num_stages=1)
    requests = add(pipeline, "a", "b", "c", max_new_tokens=12)
    pipeline.drain()
    assert pipeline.scheduler.num_retractions > 0
    for request in requests:
        assert request.output_ids == output_when_alone(request)


def test_lost_stages_make_all_begin_at_position_0_with_slots_of_their_own() -> None:
    pipeline = pipeline_of(2)
    requests = add(pipeline, "a", "b")
    pipeline.fill()
    pipeline.complete()
    pipeline.lose_stages()
    assert [one.state_slot for one in requests] == [None, None]
    assert [one.num_computed for one in requests] == [0, 0]
    assert pipeline.scheduler.state_slots.num_free == 2
    pipeline.drain()
    for request in requests:
        assert request.output_ids == output_when_alone(request)


def test_requests_go_on_where_a_stage_is_handed_over() -> None:
    pipeline = pipeline_of(1)
    (request,) = add(pipeline, "a")
    pipeline.fill()
    while pipeline.steps_in_flight:
        pipeline.complete()
    assert request.num_computed > 0
    before = (request.num_computed, request.state_slot, [*request.pages])
    pipeline.core.hand_over(0, "worker 0 leaves", pipeline.now_s)
    assert (request.num_computed, request.state_slot, request.pages) == before


def test_a_higher_priority_takes_a_slot() -> None:
    pipeline = pipeline_of(1, preemption_threshold=0)
    (low,) = add(pipeline, "a")
    pipeline.fill()
    high = make_request("high", [1], 4, priority=5)
    pipeline.scheduler.add(high)
    while pipeline.steps_in_flight and high.state_slot is None:
        pipeline.complete()
        pipeline.fill()
    assert (low.state_slot, high.state_slot, low.num_retractions) == (None, 0, 1)
    pipeline.drain()
    assert low.output_ids == output_when_alone(low)


def test_a_tenant_behind_its_share_takes_a_slot() -> None:
    pipeline = pipeline_of(2, num_stages=1, fair_shares_by="user")
    for name in "ab":
        request = make_request(name, [1] * 3, 30, tenant="busy")
        pipeline.scheduler.add(request)
    for _ in range(3):
        pipeline.fill()
        pipeline.complete()
    newcomer = make_request("c", [2], 4, tenant="other")
    pipeline.scheduler.add(newcomer)
    pipeline.fill()
    assert newcomer.state_slot is not None
    pipeline.drain()


def test_who_waits_for_a_slot_is_told_so() -> None:
    pipeline = pipeline_of(1)
    add(pipeline, "a", "b")
    pipeline.fill()
    found = pipeline.core.explain("b")
    assert found is not None and found.rule == "state-slots"
    assert found.text == (
        "all 1 state slots (--max-mamba-cache-size) are taken, and each running request of this "
        "model needs one"
    )
    outlook = pipeline.scheduler.outlook("b")
    assert outlook is not None and outlook.max_running_requests == 1
    pipeline.drain()


def test_states_have_no_boundary_log() -> None:
    args = SchedulingArgs(page_size=4, radix_cache=False, num_state_slots=2)
    with pytest.raises(AssertionError, match="computed again alone"):
        new_scheduler(args, num_pages=4, num_stages=2, log=RecoveryLog(2, 4, 4))


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"radix_cache": True, "schedule_policy": "lpm"}, "lpm"), ({"draft_tokens": 3}, "NGRAM")],
)
def test_a_state_cannot_be_shared_or_taken_back(options: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigurationError, match=flag):
        SchedulingArgs(**{"radix_cache": False, "num_state_slots": 1} | options)  # type: ignore[arg-type]


def test_slots_have_one_owner_whatever_comes_and_goes() -> None:
    for seed in range(50):
        rng = Random(seed)
        slots, owners = StateSlots(rng.randint(1, 6)), list[Request]()
        for number in range(200):
            if not slots.are_taken and rng.random() < 0.6:
                owners.append(make_request(str(number), [1]))
                slots.give(owners[-1])
            elif owners:
                slots.take_back(owners.pop(rng.randrange(len(owners))))
            slots.check_owners(owners)
            assert len({one.state_slot for one in owners}) == len(owners)
            assert slots.num_free == slots.num_slots - len(owners)


def test_a_slot_that_comes_back_twice_is_noticed() -> None:
    slots, request = StateSlots(1), make_request("a", [1])
    slots.give(request)
    slots.take_back(request)
    slots.take_back(request)  # it has none any more
    request.state_slot = 0
    with pytest.raises(AssertionError, match="freed twice"):
        slots.take_back(request)


def test_slots_shrink_and_grow_while_none_is_in_use() -> None:
    slots = StateSlots(4)
    slots.resize(1)
    request = make_request("a", [1])
    slots.give(request)
    assert slots.are_taken and slots.in_use() == [0]
    with pytest.raises(AssertionError, match="in use"):
        slots.resize(4)
    slots.take_back(request)
    slots.resize(4)
    assert (slots.num_free, slots.in_use()) == (4, [])
    with pytest.raises(AssertionError):
        slots.resize(0)
