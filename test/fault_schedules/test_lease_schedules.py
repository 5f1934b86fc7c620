"""Schedules with attention lent back find what is broken on purpose. That they have what could go
wrong is in `test_disaggregated_schedules.py`: most of its worlds have leases."""

from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
from fault_schedules.disaggregated_world import has_leases, run_disaggregated_seed
from fault_schedules.fake_leases import FakeAttention, FakeLeases
from support.mutations import Mutation, nothing_is_done, require_found

from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.lent_rooms import LentRooms
from sgl_pipeline.disaggregation.prefill_servers import PrefillServers
from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.requests import Lease, Request
from sgl_pipeline.scheduling.held_pages import HeldPages
from sgl_pipeline.scheduling.lent_pages import LentPages
from sgl_pipeline.scheduling.offloaded_requests import OffloadedRequests
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.wire.lease_orders import EndLease, LeaseOrder, OffloadedWork
from sgl_pipeline.wire.step_order import MirroredChunk

# Every mutation below is found much sooner.
MOST_SEEDS = 300


def seeds_with_leases(count: int) -> Iterator[int]:
    return islice(filter(has_leases, range(10 * count)), count)


def pages_are_given_out_before_the_lease_is_over(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: LentPages, room: int) -> None:
        if (lease := self._forget(room)) is not None:
            self._to_lend.pop(room, None)
            self._pages.take_back(lease.end, lease.own)

    patch.setattr(LentPages, "end", mutated)


def stages_are_not_told_of_the_end(patch: pytest.MonkeyPatch) -> None:
    next_orders = LentPages.next_orders

    def mutated(self: LentPages) -> Iterator[LeaseOrder]:
        return (order for order in next_orders(self) if not isinstance(order, EndLease))

    patch.setattr(LentPages, "next_orders", mutated)


def a_lent_prompt_may_be_evicted(patch: pytest.MonkeyPatch) -> None:
    def lend(self: RequestPages, match: RadixNode, num_pages: int) -> list[int]:
        return self.take_out(num_pages)

    patch.setattr(RequestPages, "lend", lend)
    patch.setattr(RequestPages, "take_back", lambda self, match, pages: self.put_back(pages))


def a_lease_outlives_what_makes_the_stages_forget_it(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(LentPages, "forget")(patch)


def stages_keep_leases_in_an_interrupt(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(FakeLeases, "forget")(patch)


def a_lease_outlives_its_room(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(LentRooms, "end")(patch)


def a_lent_prompt_counts_as_held_for_ever(patch: pytest.MonkeyPatch) -> None:
    count_lent = HeldPages.count_lent

    def mutated(self: HeldPages, room: int, *, is_lent: bool) -> None:
        if is_lent:
            count_lent(self, room, is_lent=True)

    patch.setattr(HeldPages, "count_lent", mutated)


def a_request_with_a_lease_reads_its_pages_as_well(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestPages, "pages_of", lambda self, request, tokens: self.pages_for(tokens))


def what_a_lost_lease_has_drawn_is_kept(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(OffloadedRequests, "lose")(patch)


def a_request_whose_lease_is_over_goes_on_with_it(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(OffloadedRequests, "retract_lost")(patch)


def the_decode_server_keeps_the_room_of_a_lost_lease(patch: pytest.MonkeyPatch) -> None:
    nothing_is_done(DecodeRooms, "_take_leases")(patch)


def tokens_do_not_wait_for_all_stages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpenStep, "__post_init__", lambda self: setattr(self, "leased_rows", 0))


def chunks_with_a_lease_come_anywhere(patch: pytest.MonkeyPatch) -> None:
    def mutated(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        return tuple(sorted(chunks, key=lambda chunk: chunk.request.lease is None))

    patch.setattr("sgl_pipeline.scheduling.step_scheduler.leases_last", mutated)


def a_stage_says_nothing_of_lost_leases(patch: pytest.MonkeyPatch) -> None:
    work = FakeAttention.work

    def mutated(
        self: FakeAttention, chunks: Sequence[MirroredChunk], *more: float
    ) -> tuple[OffloadedWork | None, tuple[int, ...]]:
        return work(self, chunks, *more)[0], ()  # type: ignore[arg-type]

    patch.setattr(FakeAttention, "work", mutated)


def the_next_lease_of_a_server_is_used(patch: pytest.MonkeyPatch) -> None:
    begin = OffloadedRequests.begin

    def mutated(self: OffloadedRequests, request: Request, lease: Lease, num_tokens: int) -> None:
        others = [one.lease for one in self if one.lease is not None]
        begin(self, request, others[0] if others else lease, num_tokens)

    patch.setattr(OffloadedRequests, "begin", mutated)


def fewer_pages_are_lent_than_are_used(patch: pytest.MonkeyPatch) -> None:
    lend = LentPages.lend
    patch.setattr(
        LentPages, "lend", lambda self, room, pages, tokens: lend(self, room, pages, tokens - 1)
    )


def a_rejected_server_says_nothing_more(patch: pytest.MonkeyPatch) -> None:
    give_up = PrefillServers._give_up

    def mutated(self: PrefillServers, address: str, *more: object) -> None:
        give_up(self, address, *more)  # type: ignore[arg-type]
        self._peers[address].ends.clear()

    patch.setattr(PrefillServers, "_give_up", mutated)


MUTATIONS: tuple[Mutation, ...] = (
    pages_are_given_out_before_the_lease_is_over,
    stages_are_not_told_of_the_end,
    a_lent_prompt_may_be_evicted,
    a_lease_outlives_what_makes_the_stages_forget_it,
    stages_keep_leases_in_an_interrupt,
    a_lease_outlives_its_room,
    a_lent_prompt_counts_as_held_for_ever,
    a_request_with_a_lease_reads_its_pages_as_well,
    what_a_lost_lease_has_drawn_is_kept,
    a_request_whose_lease_is_over_goes_on_with_it,
    the_decode_server_keeps_the_room_of_a_lost_lease,
    tokens_do_not_wait_for_all_stages,
    chunks_with_a_lease_come_anywhere,
    a_stage_says_nothing_of_lost_leases,
    the_next_lease_of_a_server_is_used,
    fewer_pages_are_lent_than_are_used,
    a_rejected_server_says_nothing_more,
)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_what_is_broken_on_purpose_is_found(
    mutation: Mutation, request: pytest.FixtureRequest
) -> None:
    require_found(mutation, request, run_disaggregated_seed, seeds_with_leases(MOST_SEEDS))
