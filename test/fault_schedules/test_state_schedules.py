"""Random schedules of models with states find what is broken on purpose: no slot has two owners,
all come back, and a state is never behind or ahead of its request."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from fault_schedules import fake_model
from fault_schedules.fake_worker import FakeWorker
from fault_schedules.world import run_seed, slots_of
from support.mutations import Mutation, nothing_is_done, require_found

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.pp_runner.layer_moves.outgoing_layers import OutgoingLayers
from sgl_pipeline.requests import FinishReason, Request
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.scheduling.lost_pages import LostPages
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.state_slots import StateSlots
from sgl_pipeline.scheduling.state_snapshots import StateSnapshots
from sgl_pipeline.wire.step_order import ChunkOrder, RequestOpen, StepOrderEncoder

MOST_SEEDS = 1500


def a_slot_is_free_while_a_step_uses_it(patch: pytest.MonkeyPatch) -> None:
    finish = StepScheduler._finish

    def mutated(self: StepScheduler, request: Request, reason: FinishReason) -> None:
        finish(self, request, reason)
        self.state_slots.take_back(request)

    patch.setattr(StepScheduler, "_finish", mutated)


def a_slot_has_two_owners(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: StateSlots, request: Request) -> None:
        if self.num_slots:
            request.state_slot = next(reversed(self._free))

    patch.setattr(StateSlots, "give", mutated)


def stages_are_told_one_slot_for_all(patch: pytest.MonkeyPatch) -> None:
    """No count of the scheduler's is wrong, and no stage compares the slots of a step, so that the
    tokens alone show it."""
    open_request = StepOrderEncoder._open

    def mutated(self: StepOrderEncoder, request: Request) -> RequestOpen:
        opened = open_request(self, request)
        if opened.state_slot is None:
            return opened
        return msgspec.structs.replace(opened, state_slot=0)

    patch.setattr(StepOrderEncoder, "_open", mutated)
    patch.setattr(fake_model, "check_slots", lambda chunks: None)


def admission_does_not_ask_for_a_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "are_taken", property(lambda self: False))


def retracted_requests_keep_their_slot(patch: pytest.MonkeyPatch) -> None:
    take_back = StateSlots.take_back

    def mutated(self: StateSlots, request: Request) -> None:
        if request.finish is not None:
            take_back(self, request)

    patch.setattr(StateSlots, "take_back", mutated)


def a_slot_is_sent_a_request_late(patch: pytest.MonkeyPatch) -> None:
    open_request = StepOrderEncoder._open
    newest = [0]

    def mutated(self: StepOrderEncoder, request: Request) -> RequestOpen:
        slot = request.state_slot
        if slot is not None:
            request.state_slot, newest[0] = newest[0], slot
        opened = open_request(self, request)
        request.state_slot = slot
        return opened

    patch.setattr(StepOrderEncoder, "_open", mutated)


def a_request_goes_on_in_the_slot_that_it_has_left(patch: pytest.MonkeyPatch) -> None:
    chunk_of = StepOrderEncoder._chunk

    def mutated(self: StepOrderEncoder, chunk: Chunk) -> ChunkOrder:
        return msgspec.structs.replace(chunk_of(self, chunk), state_slot=None)

    patch.setattr(StepOrderEncoder, "_chunk", mutated)


def what_a_decode_leaves_is_free_at_once(patch: pytest.MonkeyPatch) -> None:
    """Its owner writes there, and whoever takes the slot."""
    leave_behind = StateSnapshots.leave_behind

    def mutated(self: StateSnapshots, request: Request, cached: RadixNode) -> int | None:
        source = leave_behind(self, request, cached)
        if source is not None:
            self._giving._left.pop(source)
            self._running[request].held.pop()
            self._slots.put_back(source)
        return source

    patch.setattr(StateSnapshots, "leave_behind", mutated)


def states_written_since_they_were_copied_do_not_follow(patch: pytest.MonkeyPatch) -> None:
    wrote = OutgoingLayers.wrote

    def mutated(self: OutgoingLayers[Any], pages: Iterable[int], slots: Iterable[int]) -> None:
        wrote(self, pages, ())

    patch.setattr(OutgoingLayers, "wrote", mutated)


def states_are_sent_however_full_the_link_is(patch: pytest.MonkeyPatch) -> None:
    send_rest = OutgoingLayers.send_rest

    def mutated(self: OutgoingLayers[Any]) -> bool:
        self._with_states = ()
        return send_rest(self)

    patch.setattr(OutgoingLayers, "send_rest", mutated)


def a_stage_that_waits_for_rows_takes_no_parcels(patch: pytest.MonkeyPatch) -> None:
    """Then the stage that sends them waits for ever, which would have sent the rows next."""
    work_at_move = FakeWorker._work_at_move

    def mutated(self: FakeWorker) -> None:
        if not (self._parts and self._needs_rows()):
            work_at_move(self)

    patch.setattr(FakeWorker, "_work_at_move", mutated)


MUTATIONS: dict[str, Mutation] = {
    one.__name__: one
    for one in (
        a_slot_is_free_while_a_step_uses_it,
        a_slot_has_two_owners,
        stages_are_told_one_slot_for_all,
        admission_does_not_ask_for_a_slot,
        retracted_requests_keep_their_slot,
        a_slot_is_sent_a_request_late,
        a_request_goes_on_in_the_slot_that_it_has_left,
        what_a_decode_leaves_is_free_at_once,
        states_written_since_they_were_copied_do_not_follow,
        states_are_sent_however_full_the_link_is,
        a_stage_that_waits_for_rows_takes_no_parcels,
    )
} | {
    "requests_go_on_with_the_states_of_a_lost_stage": nothing_is_done(LostPages, "lose_stages"),
    "no_state_is_named_when_layers_move": lambda patch: patch.setattr(
        StateSlots, "in_use", lambda self: []
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_broken_on_purpose_is_found(name: str, request: pytest.FixtureRequest) -> None:
    require_found(MUTATIONS[name], request, run_seed, filter(slots_of, range(MOST_SEEDS)))
