"""Requests whose prompts stay on the prefill server, which lends its pages for their attention."""

import pytest
from support.paired_servers import DecodeServer, PrefillServer, RoomWorld, room_request
from support.stored_pipeline import PAGE_SIZE, right_output

from sgl_pipeline.disaggregation.lent_rooms import UNUSED_S
from sgl_pipeline.disaggregation.offloaded_rooms import ANSWER_S, OffloadedRooms
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.disaggregation.rooms_state import decode_state, prefill_state
from sgl_pipeline.pipeline.pipeline_state import OffloadState
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.requests import LogprobSpec, Request, RequestState, Room

PROMPT = [token % 7 for token in range(3, 40)]
WHOLE_PAGES = len(PROMPT) // PAGE_SIZE
LENDS = RoomLimits(bootstrap_timeout_s=20.0, waiting_timeout_s=20.0, reserved_tokens=4, lends=True)
Pair = tuple[RoomWorld, PrefillServer, DecodeServer]


def pair(
    limits: RoomLimits = LENDS,
    prefill_layers: tuple[int, ...] = (3, 3),
    decode_layers: tuple[int, ...] = (2, 4),
    prefill_pages: int = 64,
    decode_pages: int = 32,
    log_pages: int | None = None,
    ratio: float | None = float("inf"),
) -> Pair:
    world = RoomWorld(limits, offload_ratio=ratio)
    prefill = world.add(PrefillServer, "p:1", prefill_layers, prefill_pages, log_pages)
    decode = world.add(DecodeServer, "d", decode_layers, decode_pages, log_pages)
    return world, prefill, decode


def both(world: RoomWorld, prompt: list[int] = PROMPT, tokens: int = 9) -> Request:
    """The half of the decode server."""
    number = world.new_room()
    first = room_request(f"p{number}", prompt, 1, Room(number))
    second = room_request(f"d{number}", prompt, tokens, Room(number, "p:1"))
    world.submit(world.prefills()[0], first)
    world.submit(world.decodes()[0], second)
    return second


def until_it_decodes(world: RoomWorld, request: Request, tokens: int = 2) -> None:
    for _ in range(200):
        world.step()
        if len(request.output_ids) >= tokens:
            return
    raise AssertionError("it never decodes")


@pytest.mark.parametrize(
    "layers", [((6,), (6,)), ((3, 3), (6,)), ((6,), (2, 4)), ((1, 5), (2, 1, 3))]
)
def test_the_keys_and_values_stay_where_the_prompt_was_computed(
    layers: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    world, prefill, decode = pair(prefill_layers=layers[0], decode_layers=layers[1])
    second = both(world)
    until_it_decodes(world, second)
    assert second.lease is not None and len(second.pages) == 1
    in_all = -(-(len(PROMPT) + 9 - 1) // PAGE_SIZE)
    assert prefill.tier.lent.num_pages == in_all
    assert prefill.tier.held.num_pages == 0, "they are not waited for"
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 9)
    assert decode.tier.arrivals.counts.loaded_pages == 0
    assert decode.core.history.prefill_tokens == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE
    assert decode.rooms.offloading.num_offloaded == 1
    assert decode.rooms.offloading.num_ended_early == 0


def test_a_prompt_of_whole_pages_computes_its_last_page_here() -> None:
    world, _, _ = pair()
    second = both(world, PROMPT[: 3 * PAGE_SIZE])
    until_it_decodes(world, second)
    assert second.leased_tokens == 2 * PAGE_SIZE
    world.run()
    world.check()


def test_a_room_whose_number_has_another_prompt_lends_nothing() -> None:
    world, prefill, decode = pair()
    number = world.new_room()
    world.submit(prefill, room_request("p", [5, *PROMPT], 1, Room(number)))
    second = room_request("d", PROMPT, 9, Room(number, prefill.name))
    world.submit(decode, second)
    for _ in range(20):
        world.step()
    assert second.lease is None and not second.output_ids
    assert "the room is another one" in decode.rooms.offloading.last_refusal
    assert prefill.tier.lent.num_leases == 0


def test_a_lost_stage_of_the_prefill_server_costs_time_only() -> None:
    world, prefill, decode = pair()
    second = both(world)
    until_it_decodes(world, second)
    prefill.lose(0)
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 9) and second.num_retractions == 1
    assert second.lease is None and second.state is RequestState.FINISHED
    assert decode.rooms.offloading.num_ended_early == 1


@pytest.mark.parametrize("log_pages", [None, 40])
def test_a_lost_stage_of_the_decode_server_costs_time_only(log_pages: int | None) -> None:
    world, prefill, decode = pair(log_pages=log_pages)
    here, there = both(world, [1, *PROMPT], 20), both(world, tokens=20)
    until_it_decodes(world, there)
    assert here.lease is not None and there.lease is not None
    decode.lose(1)
    assert there.lease is None and there.num_retractions == 1
    world.step()
    world.step()
    assert prefill.tier.lent.num_leases == 0, "they are over before the requests are"
    world.run()
    world.check()
    assert decode.core.scheduler.num_retractions == 2


def test_a_stream_that_ends_costs_requests_that_decode_no_answer() -> None:
    world, prefill, _ = pair()
    second = both(world)
    until_it_decodes(world, second)
    world.streams[0].is_cut = True
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 9) and second.num_retractions == 1
    assert prefill.tier.lent.num_leases == 0


def test_a_room_that_fails_when_its_request_has_just_lost_the_lease_costs_time_only() -> None:
    """The lease ends with a step's result, and the room's end comes before the next tick."""
    world, _, decode = pair()
    second = both(world)
    until_it_decodes(world, second)
    decode.core.is_held = True
    while second.steps_in_flight:
        world.step()
    (room,) = decode.rooms._rooms.values()
    decode.core.scheduler.offloaded.end(second)
    assert second.state is RequestState.WAITING and second.lease is None
    decode.rooms._fail(room, "a stage is lost", 503, world.now_s)
    decode.core.is_held = False
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 9) and second.num_retractions == 1


def waits_with_its_lease(world: RoomWorld, decode: DecodeServer) -> Request:
    """No step starts there."""
    decode.core.is_held = True
    second = both(world)
    for _ in range(20):
        world.step()
    assert second.lease is not None and second.state is RequestState.WAITING
    load = decode.core.scheduler.load()
    assert load.waiting_tokens == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE
    assert load.waiting_attended_tokens == 0
    return second


def test_a_lease_that_is_over_before_its_turn_is_read_instead() -> None:
    world, prefill, decode = pair()
    second = waits_with_its_lease(world, decode)
    prefill.core.scheduler.flush_cache()  # the stages forget offers and leases
    for _ in range(10):
        world.step()
    assert second.lease is None and second.num_retractions == 0
    decode.core.is_held = False
    world.run()
    world.check()
    assert decode.tier.arrivals.counts.loaded_pages == WHOLE_PAGES
    assert decode.rooms.offloading.num_ended_early == 1


def test_a_room_that_fails_before_its_turn_fails_its_request() -> None:
    world, prefill, decode = pair()
    second = waits_with_its_lease(world, decode)
    world.streams[0].is_cut = True
    decode.core.is_held = False
    world.run()
    world.check()
    assert second.finish is not None and second.finish.status_code == 503
    assert prefill.tier.lent.num_leases == 0


def while_its_stages_are_busy(world: RoomWorld, seconds: float) -> None:
    """The prefill server's stages take no order."""
    (decode,) = world.decodes()
    for _ in range(int(seconds / 0.05)):
        world.now_s += 0.05
        for server in world.servers:
            world.turn(server)
        world.run_stages(decode)


@pytest.mark.parametrize("phase", ["asked", "waiting", "in flight", "decoding"])
def test_a_client_that_leaves_ends_the_lease_in_each_phase(phase: str) -> None:
    world, _, decode = pair()
    if phase == "asked":
        second = both(world)
        while decode.tier.arrivals.awaits_prompt(second):
            world.step()
        while_its_stages_are_busy(world, 0.5)
        explanation = decode.core.scheduler.explain(second.request_id)
        assert second.lease is None and explanation is not None
        assert explanation.text == "p:1 is asked to keep its pages and to compute its attention"
    elif phase == "waiting":
        second = waits_with_its_lease(world, decode)
    else:
        second = both(world)
        until_it_decodes(world, second)
        if phase == "in flight":
            world.turn(decode)
            assert second.steps_in_flight
    world.abort(decode, second)
    decode.core.is_held = False
    world.run()
    world.check()
    assert second.finish is not None and second.finish.status_code == 499


def test_a_server_without_room_is_read_as_always() -> None:
    world, _, decode = pair(prefill_pages=20)
    second = both(world)
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 9)
    assert decode.tier.arrivals.counts.loaded_pages == WHOLE_PAGES
    offloading = decode.rooms.offloading
    assert offloading.num_offloaded == 0
    assert offloading.last_refusal == (
        "p:1: 0 pages are lent, with 12 more they would be more than 10"
    )


def test_a_server_that_does_not_answer_is_read_as_always() -> None:
    world, prefill, decode = pair()
    second = both(world)
    while decode.tier.arrivals.awaits_prompt(second):
        world.step()
    while_its_stages_are_busy(world, ANSWER_S + 0.5)
    assert "it has not answered for 5 s" in decode.rooms.offloading.last_refusal
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 9)
    assert prefill.tier.lent.num_leases == 0


def test_a_lease_that_no_server_names_any_more_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prefill, _ = pair(prefill_pages=500, decode_pages=300)
    second = both(world, tokens=700)
    until_it_decodes(world, second)
    for _ in range(int(2 * UNUSED_S)):
        world.step(0.5)
    assert second.lease is not None and second.finish is None, "it is named"
    monkeypatch.setattr(OffloadedRooms, "keep", lambda *args: None)
    for _ in range(int(4 * UNUSED_S)):
        world.step(0.5)
    assert prefill.tier.lent.num_leases == 0 and second.lease is None
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 700) and second.num_retractions == 1


def test_log_probabilities_of_the_prompt_keep_it_here() -> None:
    world, prefill, decode = pair()
    number = world.new_room()
    world.submit(prefill, room_request("p", PROMPT, 1, Room(number)))
    request = room_request("d", PROMPT, 2, Room(number, "p:1"))
    request.logprobs = LogprobSpec(9)
    world.submit(decode, request)
    decode.core.is_held = True  # it would have to draw rows
    for _ in range(20):
        world.step()
    assert decode.rooms.offloading.num_offloaded == 0
    assert decode.rooms.offloading.last_refusal == (
        "more than a page of the prompt is to be computed here"
    )


def test_what_is_too_short_or_not_lent_stays_here() -> None:
    world, _, decode = pair()
    both(world, PROMPT[:3])
    world.run()
    assert decode.rooms.offloading.last_refusal == "the prompt has no whole page"
    world.check()
    world, _, decode = pair()
    world.prefills()[0].tier.lent._digest = None
    both(world)
    world.run()
    world.check()
    assert "p:1 lends no pages" in decode.rooms.offloading.last_refusal


@pytest.mark.parametrize(("ratio", "offloaded"), [(0.0, 0), (0.5, 2), (float("inf"), 6)])
def test_a_ratio_by_hand_is_kept(ratio: float, offloaded: int) -> None:
    """Of six equal requests, one after the other: a third may be elsewhere."""
    world, _, decode = pair(ratio=ratio, prefill_pages=400, decode_pages=256)
    requests = []
    for number in range(6):
        requests.append(both(world, [number % 7, *PROMPT], 60))
        until_it_decodes(world, requests[-1])
    assert sum(one.lease is not None for one in requests) == offloaded
    world.run()
    world.check()
    assert decode.rooms.offloading.num_offloaded == offloaded


def test_leased_requests_are_no_burden_on_the_pool() -> None:
    world, _, decode = pair(decode_pages=32)
    second = both(world, tokens=60)
    until_it_decodes(world, second)
    load = decode.core.scheduler.load()
    assert load.free_pages == 31 and load.running_decodes == 1
    assert load.decode_attended_tokens == 0
    assert load.reserved_pages == load.pipeline_depth, "it will need no more"
    world.turn(decode)
    work = next(iter(decode.core.open_steps)).microbatch.work
    assert (work.tokens, work.decodes, work.decode_attended_tokens) == (1, 1, 0)
    world.run()
    world.check()


def test_a_shortage_takes_pages_from_requests_that_have_some() -> None:
    world, _, decode = pair(decode_pages=20, ratio=0.0)
    first, last = (both(world, [number, *PROMPT[:20]], 35) for number in (1, 2))
    until_it_decodes(world, last)
    # Behind them in the queue, and with one page.
    decode.rooms.offloading.rule.ratio = float("inf")
    leased = both(world, [3, *PROMPT[:20]], 35)
    world.run()
    world.check()
    assert decode.rooms.offloading.num_offloaded == 1
    assert (first.num_retractions, leased.num_retractions) == (0, 0) and last.num_retractions


def test_operators_see_what_is_offloaded() -> None:
    world, prefill, decode = pair(ratio=3.0)
    here = both(world, [1, *PROMPT], 60)
    until_it_decodes(world, here)
    second = both(world, tokens=60)
    until_it_decodes(world, second)
    assert here.lease is None
    explanation = decode.core.scheduler.explain(second.request_id)
    assert explanation is not None
    assert explanation.text.endswith("its attention is computed by p:1, which has its pages")
    state = decode_state(decode.rooms, decode.tier)
    assert state.bootstrap_requests == state.transfer_requests == 0
    assert state.offload == OffloadState(
        requests=1,
        tokens=second.num_tokens,
        bound=3.0,
        offloaded=1,
        last_refusal="no request decodes here whose attention could hide that of another one",
    )
    lent = prefill_state(prefill.rooms, prefill.tier).offload
    assert lent == OffloadState(lent_rooms=1, lent_pages=24, most_lent_pages=32)
    assert prefill_state(prefill.rooms, prefill.tier).transfer_requests == 0
    world.run()
    world.check()
    records = [one for one in decode.core.take_events() if isinstance(one, StepRecord)]
    rest = len(PROMPT) - WHOLE_PAGES * PAGE_SIZE
    assert sum(record.leased_rows for record in records) == rest + 60 - 1
