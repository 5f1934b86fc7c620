"""Schedules with prefill and decode apart hold, have what could go wrong, and find what is broken
on purpose."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fault_schedules.disaggregated_world import run_disaggregated_seed
from fault_schedules.fake_offers import FakeOffers
from fault_schedules.rare_events import TESTED_SEEDS, too_rare_in
from support.mutations import Mutation, nothing_is_done, require_found

from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.half_rooms import HalfRooms
from sgl_pipeline.disaggregation.heartbeat import Heartbeat
from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.disaggregation.prefill_servers import PrefillServers
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.disaggregation.room_messages import End, Got
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.scheduling.arrivals_from_peers import ArrivalsFromPeers
from sgl_pipeline.scheduling.held_pages import HeldPages
from sgl_pipeline.scheduling.kv_tier import KvTier
from sgl_pipeline.scheduling.page_loads import PageLoad, PageLoads
from sgl_pipeline.wire.store_orders import OfferOrder, OfferPages, StoreOrder

# Every mutation below is found much sooner.
MOST_SEEDS = 250


@pytest.mark.slow
def test_schedules_hold_and_have_what_could_go_wrong() -> None:
    counts: Counter[str] = Counter()
    for seed in TESTED_SEEDS:
        try:
            counts += run_disaggregated_seed(seed).counts
        except Exception as error:
            again = f"make fault-schedules WORLD=disaggregated SEEDS=1 FIRST={seed}"
            raise AssertionError(f"seed {seed} failed, again: {again}") from error
    assert too_rare_in("disaggregated", counts, len(TESTED_SEEDS)) == []


def test_a_seed_replays_bit_for_bit() -> None:
    ran = [run_disaggregated_seed(seed) for seed in range(10)]
    assert [run_disaggregated_seed(seed) for seed in range(10)] == ran
    assert len({outcome.digest for outcome in ran}) == 10


def pages_are_given_out_before_their_withdrawal(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: HeldPages, room: int) -> None:
        if (held := self._forget(room)) is not None:
            self._storage.unlock(held.end)

    patch.setattr(HeldPages, "let_go", mutated)


def held_pages_are_not_locked(patch: pytest.MonkeyPatch) -> None:
    hold, forget = HeldPages.hold, HeldPages._forget

    def held(self: HeldPages, room: int, *more: Any) -> None:
        hold(self, room, *more)
        if room in self._held:
            self._storage.unlock(self._held[room].end)

    def forgot(self: HeldPages, room: int) -> Any:
        one = forget(self, room)
        if one is not None:
            self._storage.lock(one.end)
        return one

    patch.setattr(HeldPages, "hold", held)
    patch.setattr(HeldPages, "_forget", forgot)


def pages_of_a_lost_stage_stay_offered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvTier, "lose_stages", KvTier.interrupt)


def pages_are_offered_under_the_hashes_of_others(patch: pytest.MonkeyPatch) -> None:
    offer = HeldPages._offer

    def mutated(self: HeldPages, room: int, held: Any) -> OfferPages:
        held.pages.reverse()
        order = offer(self, room, held)
        held.pages.reverse()
        return order

    patch.setattr(HeldPages, "_offer", mutated)


def pages_of_peers_are_filled_in_another_order(patch: pytest.MonkeyPatch) -> None:
    start = PageLoads._start_from_peer

    def mutated(self: PageLoads, *args: Any, **more: Any) -> PageLoad | None:
        load = start(self, *args, **more)
        if load is not None:
            load.records = load.records[::-1]
        return load

    patch.setattr(PageLoads, "_start_from_peer", mutated)


def layers_move_while_pages_are_offered(patch: pytest.MonkeyPatch) -> None:
    next_orders = KvTier.next_orders

    def mutated(self: KvTier, *args: Any, may_transfer: bool) -> Iterator[StoreOrder | OfferOrder]:
        return next_orders(self, *args, may_transfer=True)

    patch.setattr(KvTier, "next_orders", mutated)


def stages_keep_their_offers_in_an_interrupt(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(FakeOffers, "forget")(patch)


def offers_are_not_made_again(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(HeldPages, "forget_offers")(patch)


def pages_are_ready_before_they_are_offered(patch: pytest.MonkeyPatch) -> None:
    opened = PrefillRooms.opened

    def mutated(self: PrefillRooms, request: Request, now_s: float) -> None:
        opened(self, request, now_s)
        assert request.room is not None
        room = self._rooms[request.room.number]
        room.is_offered = True
        self._be_ready(request.room.number, room, now_s)

    patch.setattr(PrefillRooms, "opened", mutated)


def requests_that_run_are_still_expected(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(ArrivalsFromPeers, "left")(patch)


def requests_under_load_are_not_expected(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(ArrivalsFromPeers, "_promise")(patch)


def a_load_that_was_cut_off_is_not_begun_again(patch: pytest.MonkeyPatch) -> None:
    queued = ArrivalsFromPeers.queued

    def mutated(self: ArrivalsFromPeers, request: Request) -> bool:
        if request not in self._held:
            return queued(self, request)
        self._waiting.hold(request)
        return True

    patch.setattr(ArrivalsFromPeers, "queued", mutated)


def a_load_that_fell_short_is_not_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(DecodeRooms, "_retry_later")(patch)


def a_load_that_hangs_keeps_its_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageLoads, "end_orphans", lambda self: iter(()))


def what_does_not_come_is_computed_unasked(patch: pytest.MonkeyPatch) -> None:
    begin = DecodeRooms.__init__

    def mutated(
        self: DecodeRooms,
        scheduler: StepScheduler,
        identity: ServerIdentity,
        limits: RoomLimits,
        *more: Any,
    ) -> None:
        begin(self, scheduler, identity, replace(limits, falls_back=True), *more)

    patch.setattr(DecodeRooms, "__init__", mutated)


def a_dead_decode_server_keeps_its_rooms(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(PrefillRooms, "_lose")(patch)


def a_dead_prefill_server_keeps_its_rooms(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(PrefillServers, "_lose")(patch)


def silence_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Heartbeat, "is_dead", lambda self, now_s: False)


def pages_that_were_read_are_kept(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(PrefillRooms, "_got")(patch)


def a_request_that_has_ended_keeps_its_room(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(PrefillRooms, "_take_ended")(patch)


def a_prefill_server_does_not_hear_of_ends(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(PrefillServers, "send_end")(patch)


def a_decode_server_does_not_hear_of_ends(patch: pytest.MonkeyPatch) -> None:
    note_failure = PrefillRooms._note_failure

    def mutated(self: PrefillRooms, number: int, session: int | None, *args: Any) -> None:
        note_failure(self, number, None, *args)

    patch.setattr(PrefillRooms, "_note_failure", mutated)


def ends_are_said_once(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: PrefillServers, address: str, end: End | Got, now_s: float) -> None:
        self.send(address, end)

    patch.setattr(PrefillServers, "send_end", mutated)


def failures_are_not_remembered(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(HalfRooms, "fail")(patch)


def rooms_are_remembered_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HalfRooms, "forget_old", lambda self, now_s: [])


def moved_layers_are_not_told(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(PrefillRooms, "use_stages")(patch)


def moved_layers_are_not_followed(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(DecodeRooms, "on_places")(patch)


def a_request_whose_room_fails_is_answered_twice(patch: pytest.MonkeyPatch) -> None:
    fail = PrefillRooms._fail

    def mutated(self: PrefillRooms, number: int, *args: Any, **more: Any) -> None:
        request = self._rooms[number].request
        fail(self, number, *args, **more)
        if request not in self.failed:
            self.failed.append(request)

    patch.setattr(PrefillRooms, "_fail", mutated)


MUTATIONS: tuple[Mutation, ...] = (
    pages_are_given_out_before_their_withdrawal,
    held_pages_are_not_locked,
    pages_of_a_lost_stage_stay_offered,
    pages_are_offered_under_the_hashes_of_others,
    pages_of_peers_are_filled_in_another_order,
    layers_move_while_pages_are_offered,
    stages_keep_their_offers_in_an_interrupt,
    offers_are_not_made_again,
    pages_are_ready_before_they_are_offered,
    requests_that_run_are_still_expected,
    requests_under_load_are_not_expected,
    a_load_that_was_cut_off_is_not_begun_again,
    a_load_that_fell_short_is_not_asked_for_again,
    a_load_that_hangs_keeps_its_pages,
    what_does_not_come_is_computed_unasked,
    a_dead_decode_server_keeps_its_rooms,
    a_dead_prefill_server_keeps_its_rooms,
    silence_is_not_noticed,
    pages_that_were_read_are_kept,
    a_request_that_has_ended_keeps_its_room,
    a_prefill_server_does_not_hear_of_ends,
    a_decode_server_does_not_hear_of_ends,
    ends_are_said_once,
    failures_are_not_remembered,
    rooms_are_remembered_for_ever,
    moved_layers_are_not_told,
    moved_layers_are_not_followed,
    a_request_whose_room_fails_is_answered_twice,
)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_what_is_broken_on_purpose_is_found(
    mutation: Mutation, request: pytest.FixtureRequest
) -> None:
    require_found(mutation, request, run_disaggregated_seed, range(MOST_SEEDS))
