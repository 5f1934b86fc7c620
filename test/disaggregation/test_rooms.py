"""A request's prompt is computed on one server and its tokens drawn on another."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.paired_servers import IDENTITY, DecodeServer, PrefillServer, RoomWorld, room_request
from support.stored_pipeline import (
    NUM_LAYERS,
    PAGE_SIZE,
    PLACE,
    RULES,
    MemoryStore,
    right_output,
)

from sgl_pipeline.disaggregation import half_rooms
from sgl_pipeline.disaggregation.decode_rooms import MISSING_S, DecodeRooms
from sgl_pipeline.disaggregation.prefill_rooms import UNWANTED_S
from sgl_pipeline.disaggregation.prefill_servers import (
    MOST_PEERS,
    UNREACHABLE_S,
    PrefillServers,
)
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.disaggregation.room_messages import (
    End,
    Got,
    PeerRejected,
    PeerWelcome,
    Ready,
    Want,
)
from sgl_pipeline.disaggregation.rooms_state import decode_state, prefill_state
from sgl_pipeline.errors import RequestError
from sgl_pipeline.requests import LogprobSpec, Request, Room
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import LoadPages, PeerPlace, PeerStage

PROMPT = [token % 7 for token in range(3, 40)]
WHOLE_PAGES = len(PROMPT) // PAGE_SIZE
LIMITS = RoomLimits(bootstrap_timeout_s=20.0, waiting_timeout_s=20.0, reserved_tokens=4)
FALLS_BACK = RoomLimits(reserved_tokens=4, falls_back=True)
Pair = tuple[RoomWorld, PrefillServer, DecodeServer]


def pair(
    limits: RoomLimits = LIMITS,
    prefill_layers: tuple[int, ...] = (3, 3),
    decode_layers: tuple[int, ...] = (2, 4),
    prefill_pages: int = 32,
    decode_pages: int = 32,
    store: MemoryStore | None = None,
) -> Pair:
    world = RoomWorld(limits)
    prefill = world.add(PrefillServer, "p:1", prefill_layers, prefill_pages)
    decode = world.add(DecodeServer, "d", decode_layers, decode_pages, store=store)
    return world, prefill, decode


def prefill_half(world: RoomWorld, number: int, prompt: list[int] = PROMPT) -> Request:
    request = room_request(f"p{number}", prompt, 1, Room(number))
    world.submit(world.prefills()[0], request)
    return request


def decode_half(
    world: RoomWorld, number: int, prompt: list[int] = PROMPT, max_new_tokens: int = 5
) -> Request:
    request = room_request(f"d{number}", prompt, max_new_tokens, Room(number, "p:1"))
    world.submit(world.decodes()[0], request)
    return request


def both(world: RoomWorld, prompt: list[int] = PROMPT) -> tuple[Request, Request]:
    number = world.new_room()
    return prefill_half(world, number, prompt), decode_half(world, number, prompt)


def step(world: RoomWorld, turns: int = 20, *, transfers: bool = True) -> None:
    for _ in range(turns):
        world.now_s += 0.05
        for server in world.servers:
            world.turn(server)
            world.run_stages(server, transfers=transfers or isinstance(server, PrefillServer))


def wait(world: RoomWorld, seconds: float) -> None:
    step(world, int(seconds / 0.05) + 2)


def error_of(request: Request) -> tuple[str, int | None]:
    assert request.finish is not None and request.finish.kind == "abort"
    return request.finish.message, request.finish.status_code


@pytest.mark.parametrize(
    "layers", [((6,), (6,)), ((3, 3), (6,)), ((6,), (2, 4)), ((1, 5), (2, 1, 3))]
)
def test_any_depth_reads_the_pages_of_any_other(
    layers: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    world, prefill, decode = pair(prefill_layers=layers[0], decode_layers=layers[1])
    first, second = both(world)
    world.run()
    world.check()
    assert first.finish is not None and first.finish.kind == "length"
    assert second.output_ids == right_output(PROMPT, 5)
    assert decode.core.history.prefill_tokens == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE
    assert decode.tier.arrivals.counts.loaded_pages == WHOLE_PAGES
    assert decode.rooms.counts.num_transferred == prefill.rooms.counts.num_transferred == 1


def test_a_prompt_without_a_whole_page_is_computed_where_it_is() -> None:
    world, _, decode = pair()
    both(world, PROMPT[:3])
    world.run()
    world.check()
    assert decode.rooms.counts.num_transferred == 1
    assert decode.tier.arrivals.counts.loaded_pages == 0


def test_what_the_decode_server_has_is_not_read_again() -> None:
    world, _, decode = pair()
    both(world)
    world.run()
    both(world, [*PROMPT, *PROMPT])
    world.run()
    world.check()
    assert decode.tier.arrivals.counts.loaded_pages == 2 * len(PROMPT) // PAGE_SIZE


def test_the_cached_tokens_reported_are_those_of_the_prefill_server() -> None:
    world, prefill, decode = pair()
    _, second = both(world)
    world.run()
    assert second.cached_tokens == 0
    prefill.core.scheduler.flush_cache()
    _, third = both(world)
    world.run()
    assert third.cached_tokens == 0
    # Computed once there, and read by a server that has nothing any more.
    decode.core.scheduler.flush_cache()
    _, fourth = both(world)
    world.run()
    assert fourth.cached_tokens == WHOLE_PAGES * PAGE_SIZE and fourth.loaded_tokens == 0
    assert decode.core.scheduler.num_cached_tokens == 3 * WHOLE_PAGES * PAGE_SIZE


def test_pages_that_crossed_are_saved_by_whoever_has_a_store() -> None:
    store = MemoryStore()
    world, _, decode = pair(store=store)
    both(world)
    world.run()
    step(world)
    assert decode.tier.counts.saved_tokens >= WHOLE_PAGES * PAGE_SIZE
    assert decode.tier.counts.loaded_tokens == 0


def test_log_probabilities_of_the_prompt_leave_nothing_to_read() -> None:
    world, _, decode = pair()
    number = world.new_room()
    prefill_half(world, number)
    request = room_request("d", PROMPT, 2, Room(number, "p:1"))
    request.logprobs = LogprobSpec(0)
    decode.rooms.check(request)
    decode.core.scheduler.add(request)
    decode.rooms.opened(request, world.now_s)
    decode.core.is_held = True  # it would have to draw rows
    step(world, 4)
    assert decode.rooms.counts.num_transferred == 1 and decode.tier.arrivals.num_held == 0


# What operators see


def test_each_phase_of_a_room_is_explained() -> None:
    world, prefill, decode = pair()
    second = decode_half(world, 1)

    def explained(server: PrefillServer | DecodeServer, request: Request) -> tuple[str, str]:
        explanation = server.core.scheduler.explain(request.request_id)
        assert explanation is not None
        return explanation.rule, explanation.text

    third = decode_half(world, 9, [5])
    step(world, 4)
    queue = decode.core.scheduler.explain_queue(2)
    assert [one.text for _, one in queue] == ["another server computes its prompt"] * 2
    world.abort(decode, third)
    step(world, 1)
    assert explained(decode, second) == ("loading", "another server computes its prompt")
    assert decode_state(decode.rooms, decode.tier).bootstrap_requests == 1
    prefill_half(world, 1)
    step(world, 20, transfers=False)
    rule, text = explained(decode, second)
    assert rule == "loading"
    assert text == f"0 of the {WHOLE_PAGES} pages of its prompt are here, more are loaded from p:1"
    state = decode_state(decode.rooms, decode.tier)
    assert (state.bootstrap_requests, state.transfer_requests) == (0, 1)
    assert state.promised_pages == WHOLE_PAGES
    prefill_half(world, 2)
    step(world, 4, transfers=False)
    held = prefill_state(prefill.rooms, prefill.tier)
    assert held.held_pages == WHOLE_PAGES and held.transfer_requests == 2
    assert (held.wanted_requests, held.bootstrap_requests) == (1, 1)
    decode_half(world, 2)
    # Counted as used on both sides.
    load = decode.core.scheduler.load()
    assert load.free_pages == 32 - WHOLE_PAGES
    assert prefill.core.scheduler.load().free_pages <= 32 - WHOLE_PAGES
    world.run()
    world.check()


def test_the_phases_of_a_room_are_timed() -> None:
    limits = RoomLimits(reserved_tokens=40)
    world, _, decode = pair(limits, decode_pages=24)
    first, second = world.new_room(), world.new_room()
    prefill_half(world, first)
    running = decode_half(world, first, max_new_tokens=40)
    while not running.output_ids:
        step(world, 1)
    counts = decode.rooms.counts
    assert counts.num_transferred == 1 and counts.alloc_s < 0.1
    before_s, opened_s = counts.bootstrap_s, world.now_s
    decode_half(world, second, [1, *PROMPT])
    step(world, 20)
    prefill_half(world, second, [1, *PROMPT])
    while (state := decode_state(decode.rooms, decode.tier)).transfer_requests == 0:
        step(world, 1)
    ready_s = world.now_s
    assert state.promised_pages == 0
    assert state.pending_pages == WHOLE_PAGES, "there is no room for them beside what runs"
    while not decode.tier.loads.promised_pages:
        step(world, 1, transfers=False)
    assert decode_state(decode.rooms, decode.tier).pending_pages == 0
    load_s = world.now_s
    assert load_s - ready_s > 0.3
    step(world, 20, transfers=False)
    world.run()
    world.check()
    assert counts.bootstrap_s - before_s == pytest.approx(ready_s - opened_s, abs=0.11)
    assert counts.alloc_s == pytest.approx(load_s - ready_s, abs=0.11)
    assert counts.transfer_s >= counts.alloc_s + 20 * 0.05


def test_the_decode_reserve_counts_requests_under_load() -> None:
    world, _, decode = pair()
    before = decode.core.scheduler.load().reserved_pages
    number = world.new_room()
    prefill_half(world, number)
    decode_half(world, number, max_new_tokens=60)
    step(world, 2)
    assert decode.core.scheduler.load().reserved_pages == before, "nothing is promised yet"
    step(world, 18, transfers=False)
    assert decode.core.scheduler.load().reserved_pages > before


def test_a_prefill_server_admits_none_while_others_read_too_slowly() -> None:
    limits = RoomLimits(held_share=0.2, reserved_tokens=4)
    world, prefill, _ = pair(limits)
    both(world)
    step(world, 20, transfers=False)
    behind = prefill_half(world, world.new_room(), [1, *PROMPT])
    step(world, 5, transfers=False)
    explanation = prefill.core.scheduler.explain(behind.request_id)
    assert explanation is not None and explanation.rule == "held-pages"
    assert f"{WHOLE_PAGES} pages are held for transfer" in explanation.text
    # However long it takes: a decode server has asked for them.
    step(world, int(UNWANTED_S / 0.05) + 10, transfers=False)
    assert behind.finish is None and prefill.tier.held.num_pages == WHOLE_PAGES
    step(world)
    assert behind.finish is not None


def test_rooms_that_no_decode_server_asks_for_make_room_for_others() -> None:
    limits = RoomLimits(held_share=0.4, reserved_tokens=4)
    world, prefill, _ = pair(limits)
    prompts = [[first, *PROMPT] for first in (1, 2, 3)]
    early = [prefill_half(world, number, prompt) for number, prompt in enumerate(prompts[:2], 1)]
    wait(world, 2 * UNWANTED_S)
    held = prefill.tier.held
    assert held.num_pages == 2 * WHOLE_PAGES, "no request needs the room"
    behind = prefill_half(world, 3, prompts[2])
    step(world, 10)
    assert behind.finish is not None and behind.finish.kind == "length"
    assert held.num_pages == 2 * WHOLE_PAGES, "one was let go"
    # The earliest, whose client has its answer; the other half is asked again, and finds the pages.
    assert early[0].finish is not None and early[0].finish.kind == "length"
    late = decode_half(world, 1, prompts[0])
    step(world, 8)
    message, status = error_of(late)
    assert status == 503 and "no decode server had asked for the room for 5 s" in message
    again = prefill_half(world, 4, prompts[0])
    step(world, int(UNWANTED_S / 0.05) + 10)
    assert again.cached_tokens == WHOLE_PAGES * PAGE_SIZE
    decode_half(world, 3, prompts[2])
    decode_half(world, 4, prompts[0])
    world.run()
    world.check()


def test_rooms_make_room_for_a_prompt_that_does_not_fit_beside_them() -> None:
    world, prefill, _ = pair(RoomLimits(reserved_tokens=4), prefill_pages=24)
    for number in (1, 2):
        prefill_half(world, number, [number, *PROMPT[: 4 * PAGE_SIZE]])
    step(world)
    held = prefill.tier.held
    assert held.num_pages == 8 and not held.is_full
    big = prefill_half(world, 3, [3, *PROMPT, *PROMPT][: 19 * PAGE_SIZE])
    step(world)
    assert big.finish is None, "they are kept for a while"
    wait(world, UNWANTED_S)
    assert big.finish is not None and big.finish.kind == "length"
    assert prefill.rooms.counts.num_bootstrap_failed == 1, "one of them is kept"


def test_a_paused_server_keeps_its_rooms() -> None:
    world, prefill, _ = pair(RoomLimits(reserved_tokens=4))
    prefill_half(world, 1)
    step(world)
    prefill.core.scheduler.pausing.pause(retract=False)
    prefill_half(world, 2, [2, *PROMPT])
    wait(world, 2 * UNWANTED_S)
    assert prefill.tier.held.num_rooms == 1 and prefill.rooms.counts.num_bootstrap_failed == 0


def test_a_load_leaves_the_pages_that_running_requests_will_need() -> None:
    limits = RoomLimits(reserved_tokens=40)
    world, _, decode = pair(limits, decode_pages=24)
    first, second = world.new_room(), world.new_room()
    prefill_half(world, first)
    running = decode_half(world, first, max_new_tokens=40)
    while not running.output_ids:
        step(world, 1)
    prefill_half(world, second, [1, *PROMPT])
    waiting = decode_half(world, second, [1, *PROMPT])
    step(world, 3)
    progress = decode.tier.arrivals.progress(waiting)
    assert progress is not None and progress.endswith("when there is room for them")
    world.run()
    world.check()
    assert decode.core.scheduler.num_retractions == 0


def test_a_retracted_request_comes_before_new_loads() -> None:
    world, _, decode = pair(RoomLimits(reserved_tokens=1), decode_pages=24)
    for number in (1, 2):
        prefill_half(world, number, [number, *PROMPT])
        decode_half(world, number, [number, *PROMPT], max_new_tokens=30)
    world.run()
    assert decode.core.scheduler.num_retractions > 0
    world.check()


# Ends


def test_a_client_that_leaves_one_server_leaves_the_other() -> None:
    world, prefill, decode = pair()
    first, second = both(world)
    prefill.core.is_held = True  # so that the prompt is not computed
    step(world, 4)
    world.abort(decode, second)
    step(world, 4)
    assert error_of(first) == ("the client is gone", 499)
    third, fourth = both(world)
    step(world, 4)
    world.abort(prefill, third)
    step(world, 4)
    assert error_of(fourth) == ("the client is gone", 499)
    prefill.core.is_held = False
    world.run()
    world.check()


def test_a_half_that_is_refused_ends_the_other_one_with_the_same_words() -> None:
    world, _, _ = pair(prefill_pages=8)
    number = world.new_room()
    second = decode_half(world, number)
    step(world, 4)
    first = prefill_half(world, number)
    step(world, 8)
    assert error_of(second) == error_of(first) and error_of(second)[1] == 400
    # The other way round, and late.
    world, _, _ = pair(decode_pages=8)
    second = decode_half(world, 7)
    step(world, 8)
    first = prefill_half(world, 7)
    assert error_of(first) == error_of(second) and error_of(first)[1] == 400
    world.check()


def test_a_server_that_is_rejected_ends_both_halves_of_its_rooms() -> None:
    world, prefill, decode = pair()
    other = replace(IDENTITY, kv_dtype="float16")
    decode.rooms = DecodeRooms(decode.core.scheduler, other, LIMITS)
    early = prefill_half(world, 1)
    step(world)
    assert prefill.tier.held.num_pages == WHOLE_PAGES
    unread, refused = decode_half(world, 1), decode_half(world, 2)
    step(world, 4)
    assert prefill.tier.held.num_pages == 0
    late = prefill_half(world, 2)
    message, status = error_of(late)
    assert status == 500 and "float16" in message and "--kv-cache-dtype" in message
    assert error_of(unread) == error_of(refused) == (message, status)
    assert early.finish is not None and early.finish.kind == "length"
    # So do those of the next session, which is dialed at once.
    step(world)
    computing, again = both(world)
    step(world, 4)
    assert error_of(computing) == error_of(again) == (message, status)
    world.check()


def test_a_rejected_server_that_computes_here_leaves_nothing_held() -> None:
    world, prefill, decode = pair(FALLS_BACK)
    other = replace(IDENTITY, kv_dtype="float16")
    decode.rooms = DecodeRooms(decode.core.scheduler, other, FALLS_BACK)
    prefill_half(world, 1)
    step(world)
    second = decode_half(world, 1)
    world.run()
    assert second.output_ids == right_output(PROMPT, 5)
    assert prefill.tier.held.num_pages == 0
    world.check()


def test_a_rejected_session_may_end_rooms_and_ask_for_none() -> None:
    world, prefill, _ = pair()
    rooms = prefill.rooms
    prefill_half(world, 1)
    step(world)
    rooms.connected(9, world.now_s)
    rooms.take(9, End(1, "too early", 500), world.now_s)
    assert rooms.num_rooms == 1, "a room was ended by nobody"
    rooms.take(9, replace(IDENTITY, digest="another").hello(), world.now_s)
    rooms.outbox.clear()
    rooms.take(9, Want(1), world.now_s)
    assert [type(answer) for _, answer in rooms.outbox] == [PeerRejected]
    assert rooms.num_unwanted == 1
    rooms.take(9, End(1, "another model", 500), world.now_s)
    assert rooms.num_rooms == prefill.tier.held.num_pages == 0


def test_a_room_belongs_to_one_request() -> None:
    world, prefill, decode = pair()
    both(world)
    for server, peer in ((prefill, ""), (decode, "p:1")):
        again = room_request("again", PROMPT, 1, Room(1, peer))
        with pytest.raises(RequestError, match="bootstrap_room 1 belongs to another request"):
            server.rooms.check(again)
        assert again.room is not None
        server.rooms.refused(again.room, "in use", 400, world.now_s)
    world.run()
    world.check()
    assert decode.rooms.counts.num_transferred == 1


def test_a_request_whose_half_never_comes_ends_by_name() -> None:
    world, prefill, _ = pair()
    second = decode_half(world, 1)
    wait(world, LIMITS.bootstrap_timeout_s)
    message, status = error_of(second)
    assert status == 503 and "20 s" in message
    prefill_half(world, 2)
    step(world)
    assert prefill.tier.held.num_pages == WHOLE_PAGES
    wait(world, LIMITS.bootstrap_timeout_s)
    assert prefill.tier.held.num_pages == 0
    # Whoever comes later hears it at once.
    late = decode_half(world, 2)
    step(world, 8)
    assert error_of(late)[0] == "no decode server has asked for the room for 20 s"
    world.check()


def test_pages_that_nobody_asks_for_do_not_keep_others_from_being_computed_for_long() -> None:
    """As when a decode server has died before its halves came."""
    world, prefill, _ = pair(RoomLimits(held_share=0.2, reserved_tokens=4))
    prefill_half(world, world.new_room(), [6, *PROMPT])
    step(world)
    assert prefill.tier.held.is_full
    first, second = both(world, [1, *PROMPT])
    wait(world, UNWANTED_S - 2.0)
    assert first.finish is None and prefill.tier.held.is_full
    world.run()
    assert first.output_ids and len(second.output_ids) == 5
    # A hold that is in nobody's way stays.
    prefill_half(world, world.new_room(), [5] * PAGE_SIZE + [4])
    wait(world, 2 * UNWANTED_S)
    assert prefill.tier.held.num_rooms == 1 and not prefill.tier.held.is_full


def test_pages_that_are_not_read_in_time_are_let_go() -> None:
    world, prefill, decode = pair()
    _, second = both(world)
    step(world, 20, transfers=False)
    step(world, int(LIMITS.waiting_timeout_s / 0.05) + 10, transfers=False)
    message, status = error_of(second)
    assert status == 503 and "20 s" in message
    assert prefill.tier.held.num_pages == 0
    # A load that nobody waits for any more is ended, though it hangs.
    step(world, 2, transfers=False)
    assert decode.tier.loads.loading_pages == 0
    world.run()
    world.check()


def test_a_load_that_nobody_waits_for_is_ended_alone() -> None:
    world, _, decode = pair()
    (_, leaves), (_, stays) = both(world), both(world, [5] * (2 * PAGE_SIZE) + [4])
    step(world, 20, transfers=False)
    assert decode.tier.loads.num_under_way == 2
    world.abort(decode, leaves)
    step(world, 2, transfers=False)
    (load,) = decode.tier.loads._loads.values()
    assert load.request is stays
    world.run()
    assert stays.output_ids
    world.check()


def test_pages_that_a_server_does_not_give_after_all_fail_the_request() -> None:
    world, prefill, decode = pair(RoomLimits(reserved_tokens=4))
    _, second = both(world)
    while second.finish is None:
        world.now_s += 0.05
        for server in world.servers:
            world.turn(server)
            world.run_stages(server, transfers=False)
        for stage in decode.stages:
            while stage.transfers:
                decode.end_transfer(stage.stage, can_write=False)
    assert abs(world.now_s - MISSING_S) < 2.0
    message, status = error_of(second)
    assert status == 503 and "not offered" in message
    world.run()
    # `check` takes such an end for a fault of ours.
    assert prefill.tier.held.num_pages == 0


def test_a_stage_that_is_lost_with_held_pages_fails_their_requests() -> None:
    world, prefill, _ = pair()
    first, second = both(world)
    step(world, 20, transfers=False)
    prefill.lose(0)
    step(world)
    assert error_of(second) == (
        "a stage of the prefill server was lost with the prompt's pages",
        503,
    )
    assert first.finish is not None and first.finish.kind == "length"
    world.check()


def test_pages_that_were_handed_over_are_lost_with_another_number_of_stages() -> None:
    world, prefill, _ = pair()
    prefill_half(world, world.new_room())
    step(world)
    core = prefill.core
    core.hand_over(0, "it leaves", world.now_s)
    assert prefill.tier.held.num_pages == WHOLE_PAGES
    core.use_stages(StagePlan(1, (NUM_LAYERS,)), (NUM_LAYERS,), world.now_s)
    assert prefill.tier.held.num_pages == 0 and prefill.tier.held.lost


def test_a_load_that_was_cut_off_is_not_in_its_own_way() -> None:
    world, _, decode = pair(decode_pages=11)  # as many as the request needs
    _, second = both(world)
    step(world, transfers=False)
    assert decode.tier.loads.promised_pages == WHOLE_PAGES
    decode.tier.interrupt()
    world.run()
    world.check()
    assert second.finish is not None and second.finish.kind == "length"


def test_pages_that_came_of_a_load_that_fell_short_are_not_in_its_way() -> None:
    world, prefill, decode = pair(decode_pages=11)
    number = world.new_room()
    prefill_half(world, number)
    step(world)
    offer = prefill.stages[0].offers[number]  # type: ignore[attr-defined]
    late = {page_hash: offer.pop(page_hash) for page_hash in [*offer][5:]}
    decode_half(world, number)
    step(world)
    assert decode.tier.arrivals.counts.loaded_pages == 5
    offer |= late
    world.run()
    world.check()
    assert decode.tier.arrivals.counts.loaded_pages == WHOLE_PAGES


def test_a_store_that_hangs_keeps_no_prompt_from_coming() -> None:
    world, _, decode = pair(decode_pages=12, store=MemoryStore())
    decode.tier.use(PLACE, replace(RULES, save_share=0.9))
    _, second = both(world)
    _step_without_saves(world, 40)
    assert second.finish is not None and decode.tier.saves.saving_pages == WHOLE_PAGES
    _, fourth = both(world, PROMPT[::-1])
    _step_without_saves(world, 300)
    assert fourth.finish is not None and fourth.finish.kind == "length"


def _step_without_saves(world: RoomWorld, turns: int) -> None:
    for _ in range(turns):
        step(world, 1, transfers=False)
        for stage in (stage for one in world.decodes() for stage in one.stages):
            for order in [one for one in stage.transfers if isinstance(one, LoadPages)]:
                world.decodes()[0].end_transfer(stage.stage, stage.transfers.index(order))


def test_pages_that_were_just_lost_are_not_ready_for_a_room_that_is_wanted_now() -> None:
    world, prefill, _ = pair()
    both(world)
    world.run()
    number = world.new_room()
    prefill_half(world, number, PROMPT[::-1])
    step(world)
    prefill.lose(0)
    (stream,) = world.streams
    prefill.rooms.take(stream.number, Want(number), world.now_s)
    reason = "a stage of the prefill server was lost with the prompt's pages"
    assert prefill.rooms.outbox == [(stream.number, End(number, reason, 503))]


def test_layers_that_move_are_read_where_they_are() -> None:
    world, prefill, decode = pair()
    _, second = both(world)
    step(world, 20, transfers=False)
    prefill.core.is_held = True
    step(world, 3, transfers=False)
    prefill.move_layers((1, 5))
    prefill.core.is_held = False
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 5)
    assert decode.rooms.counts.num_transferred == 1


def test_a_server_out_of_reach_fails_its_requests_soon() -> None:
    world, _, _ = pair()
    world.unreachable.add("p:1")
    second = decode_half(world, 1)
    wait(world, UNREACHABLE_S + 2.0)
    assert error_of(second) == ("the prefill server failed: refused", 503)
    world.check()


def test_a_silent_server_fails_its_requests_soon() -> None:
    world, _, decode = pair()
    _, second = both(world)
    world.prefills()[0].core.is_held = True
    step(world, 4)
    for _ in range(int(LIMITS.silence_s / 0.05) + 25):
        world.now_s += 0.05
        world.turn(decode)
    assert error_of(second) == ("the prefill server failed: p:1 is silent", 503)


def test_a_decode_server_computes_the_prompt_if_it_may() -> None:
    world, prefill, decode = pair(FALLS_BACK)
    world.unreachable.add("p:1")
    second = decode_half(world, 1)
    wait(world, UNREACHABLE_S + 2.0)
    assert second.output_ids == right_output(PROMPT, 5)
    assert decode.rooms.counts.num_computed_here == 1
    # An error that is the request's own is one.
    world.unreachable.clear()
    world.submit(prefill, room_request("p2", [], 1, Room(2)))
    refused = decode_half(world, 2)
    wait(world, 3.0)
    assert error_of(refused)[1] == 400
    # Its other half is not held.
    first = prefill_half(world, 1)
    step(world)
    assert first.finish is not None and first.finish.kind == "length"
    assert prefill.tier.held.num_pages == 0
    world.check()


def test_messages_of_a_session_that_is_over_have_no_effect() -> None:
    world, prefill, decode = pair()
    first, second = both(world)
    prefill.core.is_held = True
    step(world, 4)
    old = world.streams[0]
    old.is_cut = True
    step(world, 4)
    assert error_of(second)[1] == error_of(first)[1] == 503
    prefill.core.is_held = False
    both(world)
    step(world, 8)
    decode.rooms.take(old.number, Ready(room=2, num_pages=1, cached_tokens=0), world.now_s)
    decode.rooms.take(old.number, End(2, "late", 500), world.now_s)
    for late in (Want(2), Got(2), End(2, "late", 500)):
        prefill.rooms.take(old.number, late, world.now_s)
    world.run()
    world.check()
    assert decode.rooms.counts.num_transferred == 1


def test_the_number_of_prefill_servers_is_bounded() -> None:
    world, _, decode = pair()
    for number in range(MOST_PEERS):
        world.submit(decode, room_request(f"r{number}", PROMPT, 1, Room(number, f"x{number}:1")))
    one_more = room_request("one", PROMPT, 1, Room(MOST_PEERS, "y:1"))
    world.submit(decode, one_more)
    message, status = error_of(one_more)
    assert status == 503 and str(MOST_PEERS) in message
    wait(world, UNREACHABLE_S + 2.0)
    wait(world, LIMITS.bootstrap_timeout_s)
    again = room_request("again", PROMPT, 1, Room(100, "y:1"))
    decode.rooms.check(again)


def test_the_number_of_rooms_that_wait_for_their_requests_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(half_rooms, "MOST_REMEMBERED", 2)
    world, prefill, _ = pair()
    waiting = [decode_half(world, number) for number in (1, 2, 3)]
    step(world, 4)
    assert waiting[0].finish is None and waiting[1].finish is None
    message, status = error_of(waiting[2])
    assert status == 503 and "try again later" in message
    # So is that of failures: the oldest are forgotten.
    for number in (11, 12, 13):
        prefill.rooms.refused(Room(number), "refused", 400, world.now_s)
    step(world, 4)
    prefill.rooms.check(room_request("a", PROMPT, 1, Room(11)))
    for number in (12, 13):
        with pytest.raises(RequestError, match="refused"):
            prefill.rooms.check(room_request("a", PROMPT, 1, Room(number)))


def test_a_server_whose_stages_lack_layers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _, _ = pair()
    bad = (PeerStage("/0", (0, 3)), PeerStage("/1", (4, 6)))
    monkeypatch.setattr(PrefillServer, "places", bad)
    second = decode_half(world, 1)
    step(world, 4)
    message, status = error_of(second)
    assert status == 500 and "(0, 3), (4, 6)" in message and "of 6" in message


def test_stages_are_found_behind_the_port_that_was_dialed_or_at_a_port_of_their_own() -> None:
    places: list[tuple[PeerPlace, ...]] = []
    servers = PrefillServers(
        IDENTITY,
        LIMITS,
        SimpleNamespace(
            on_met=lambda address: None, on_places=places.append, on_lost=lambda *end: None
        ),
    )
    servers.know("host:1", 0.0)
    assert servers.to_dial(0.0, lambda: {"host:1"}) == ["host:1"]
    servers.connected("host:1", 0, 0.0)
    stages = (PeerStage("/offers-0", (0, 3)), PeerStage("other:2/offers-1", (3, 6)))
    servers.take(0, PeerWelcome(name="P", epoch=0, stages=stages), 0.0)
    assert [one.address for one in places[-1][0].stages] == ["host:1/offers-0", "other:2/offers-1"]
    assert places[-1][0].name == "host:1"
