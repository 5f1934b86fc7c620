"""Random schedules find what is broken on purpose."""

from collections.abc import Sequence

import msgspec
import pytest
from fault_schedules.__main__ import main
from fault_schedules.fake_log import FakeLog
from fault_schedules.fake_moves import FakeSite
from fault_schedules.world import run_seed
from support.mutations import Mutation, require_found

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.microbatch import Chunk, Microbatch
from sgl_pipeline.migration.coordinator import MoveCoordinator
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.open_steps import OpenSteps
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.recovery import StageRecovery
from sgl_pipeline.pipeline.worker_roster import Addressed, WorkerRoster
from sgl_pipeline.pipeline.worker_supply import WorkerSupply
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.pp_runner.layer_moves.outgoing_layers import OutgoingLayers
from sgl_pipeline.pp_runner.layer_moves.page_handover import PageHandover
from sgl_pipeline.requests import FinishReason, Request, TokenEvent
from sgl_pipeline.scheduling import RecoveryLog, StepScheduler
from sgl_pipeline.scheduling.admission import Admission
from sgl_pipeline.scheduling.drawn_tokens import take_drawn
from sgl_pipeline.scheduling.lost_pages import LostPages
from sgl_pipeline.scheduling.page_pool import PagePool
from sgl_pipeline.scheduling.preemption import Preemption
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import DecodeShare
from sgl_pipeline.wire.stage_messages import FromWorker, StageReady, StageReport
from sgl_pipeline.wire.step_order import ChunkOrder, StepOrderEncoder

# Every mutation below is found much sooner.
MOST_SEEDS = 200


def matchable_before_the_step_is_back(patch: pytest.MonkeyPatch) -> None:
    next_microbatch = StepScheduler.next_microbatch

    def mutated(self: StepScheduler, now_s: float) -> Microbatch | None:
        microbatch = next_microbatch(self, now_s)
        for chunk in microbatch.chunks if microbatch is not None else ():
            if not chunk.is_decode:
                computed, chunk.request.num_computed = chunk.request.num_computed, chunk.end
                self._pages.commit(chunk.request)
                chunk.request.num_computed = computed
        return microbatch

    patch.setattr(StepScheduler, "next_microbatch", mutated)


def pages_back_while_a_step_writes_them(patch: pytest.MonkeyPatch) -> None:
    finish = StepScheduler._finish

    def mutated(self: StepScheduler, request: Request, reason: FinishReason) -> None:
        in_flight, request.steps_in_flight = request.steps_in_flight, 0
        finish(self, request, reason)
        # Booked again by the steps that are still to come back.
        request.steps_in_flight = 1_000 * in_flight

    patch.setattr(StepScheduler, "_finish", mutated)


def a_page_is_not_sent(patch: pytest.MonkeyPatch) -> None:
    encode_chunk = StepOrderEncoder._chunk

    def mutated(self: StepOrderEncoder, chunk: Chunk) -> ChunkOrder:
        sent = self._sent[chunk.request]
        if sent.num_pages and len(chunk.request.pages) > sent.num_pages + 1:
            sent.num_pages += 1
        return encode_chunk(self, chunk)

    patch.setattr(StepOrderEncoder, "_chunk", mutated)


def drawn_tokens_go_to_other_chunks(patch: pytest.MonkeyPatch) -> None:
    on_result = StepScheduler.on_result

    def mutated(
        self: StepScheduler, step_id: int, token_ids: Sequence[int], *more: object
    ) -> list[TokenEvent]:
        return on_result(self, step_id, token_ids[::-1], *more)  # type: ignore[arg-type]

    patch.setattr(StepScheduler, "on_result", mutated)


def wrong_drafts_are_taken(patch: pytest.MonkeyPatch) -> None:
    def mutated(
        chunk: Chunk, drawn_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        right = msgspec.structs.replace(chunk, draft_ids=tuple(drawn_ids[:-1]))
        return take_drawn(right, drawn_ids)

    patch.setattr("sgl_pipeline.scheduling.step_results.take_drawn", mutated)


def parked_requests_stay_parked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "_return_unparked", lambda self: None)


def a_retraction_forgets_the_output(patch: pytest.MonkeyPatch) -> None:
    retract = Preemption.retract

    def mutated(self: Preemption, request: Request) -> None:
        request.output_ids.clear()
        retract(self, request)

    patch.setattr(Preemption, "retract", mutated)


def a_hit_reaches_into_the_wanted_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Request, "first_logits_position", property(lambda request: request.prefill_end - 1)
    )


def a_page_is_handed_out_twice(patch: pytest.MonkeyPatch) -> None:
    allocate = PagePool.allocate

    def mutated(self: PagePool, count: int) -> list[int]:
        pages = allocate(self, count)
        return pages if count < 2 else [*pages[:-1], pages[0]]

    patch.setattr(PagePool, "allocate", mutated)


def masks_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    encode_chunk = StepOrderEncoder._chunk

    def mutated(self: StepOrderEncoder, chunk: Chunk) -> ChunkOrder:
        plan = encode_chunk(self, chunk)
        return ChunkOrder(plan.handle, plan.start, plan.length, plan.samples, *plan_bytes(plan))

    def plan_bytes(plan: ChunkOrder) -> tuple[bytes, bytes]:
        return plan.new_tokens, plan.new_pages

    patch.setattr(StepOrderEncoder, "_chunk", mutated)


def all_rows_have_the_mask_of_the_first(patch: pytest.MonkeyPatch) -> None:
    def mutated(masks: Sequence[bytes]) -> bytes:
        return masks[0] * len(masks)

    patch.setattr("sgl_pipeline.wire.step_order._joined", mutated)


def a_decode_is_in_two_steps_at_once(patch: pytest.MonkeyPatch) -> None:
    decodes = Admission._decodes

    def mutated(self: Admission, limit: int, share: DecodeShare | None) -> list[Chunk]:
        chunks = decodes(self, limit, share)
        for chunk in chunks:
            self._running.make_ready(chunk.request)
        return chunks

    patch.setattr(Admission, "_decodes", mutated)


def overdue_requests_keep_their_pages(patch: pytest.MonkeyPatch) -> None:
    release = RequestPages.release

    def mutated(self: RequestPages, request: Request) -> None:
        if request.finish is None or "timeout" not in request.finish.message:
            release(self, request)

    patch.setattr(RequestPages, "release", mutated)


def what_is_written_during_a_move_is_not_patched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutgoingLayers, "wrote", lambda self, pages, slots: None)


def cached_pages_do_not_move(patch: pytest.MonkeyPatch) -> None:
    """Only those of running requests do."""

    def mutated(self: RequestPages) -> list[int]:
        return sorted({page for request in self._holdings for page in request.pages})

    patch.setattr(RequestPages, "pages_in_use", mutated)


def unsent_pages_are_forgotten_at_the_switch(patch: pytest.MonkeyPatch) -> None:
    """Ready at once, with the first round still to be sent."""
    begin_rest = OutgoingLayers.begin_rest

    def mutated(self: OutgoingLayers[object]) -> None:
        self._queue = []
        begin_rest(self)

    patch.setattr(OutgoingLayers, "is_ready", property(lambda self: True))
    patch.setattr(OutgoingLayers, "begin_rest", mutated)


def steps_do_not_wait_for_the_last_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeSite, "wait_before", lambda self, layers, incoming: None)


def the_scheduler_misses_the_switch(patch: pytest.MonkeyPatch) -> None:
    next_microbatch = StepScheduler.next_microbatch

    def mutated(self: StepScheduler, now_s: float) -> Microbatch | None:
        self.epoch = 0
        return next_microbatch(self, now_s)

    patch.setattr(StepScheduler, "next_microbatch", mutated)


def one_stage_is_enough_to_switch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MoveCoordinator, "_all_answered", lambda self: bool(self._answered))


def an_abandoned_move_keeps_its_layers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerMover, "_let_go", lambda self, move: self._close_links(move))


def lost_pages_are_still_matched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestPages, "drop_cached", lambda self, lost: None)


def requests_keep_the_pages_that_were_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LostPages, "lose_all", lambda self, now_s: None)


def nothing_is_computed_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveryLog, "_settle", lambda self, request, end: [])


def pages_that_nobody_has_logged_are_owed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveryLog, "unreachable", lambda self: set())


def what_was_to_be_computed_again_and_was_not_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveryLog, "take_back", lambda self, replays: None)


def stages_keep_their_own_idea_of_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeLog, "restore", lambda self, contents: None)


def the_steps_of_a_lost_stage_stay_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepScheduler, "forget_in_flight", lambda self: None)


def reports_of_steps_that_were_taken_back_are_booked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepScheduler, "next_step_id", property(lambda self: 0))


def steps_begin_before_all_stages_have_regrouped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerRoster, "has_regrouped", property(lambda self: True))


def a_replacement_keeps_the_links_of_an_older_stream(patch: pytest.MonkeyPatch) -> None:
    """One that got ready after another stage was lost."""
    take = WorkerRoster.take

    def mutated(
        self: WorkerRoster, message: FromWorker, speaker: int | None = None
    ) -> list[Addressed]:
        answers = take(self, message, speaker)
        if isinstance(message, StageReady) and speaker is not None:
            worker = self._workers[speaker]
            worker.incarnation = worker.asked_incarnation = self.incarnation
        return answers

    patch.setattr(WorkerRoster, "take", mutated)


def a_stage_goes_on_with_a_move_that_lost_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerMover, "regroup", lambda self, plan: None)


def the_scheduler_goes_on_with_a_move_that_lost_a_stage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MoveCoordinator, "interrupt", lambda self, reason, now_s: None)


def a_switch_is_taken_back(patch: pytest.MonkeyPatch) -> None:
    regroup = WorkerRoster.regroup

    def mutated(self: WorkerRoster, plan: StagePlan, incarnation: int) -> None:
        assert self.plan is not None
        regroup(self, self.plan, incarnation)

    patch.setattr(WorkerRoster, "regroup", mutated)


def nobody_is_asked_for_a_replacement(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StageRecovery, "num_wanted_workers", lambda self, now_s: 0)


def pages_that_are_gone_are_given_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepScheduler, "use_pages", lambda self, *_: [])


def other_stages_inherit_the_book_of_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LostPages, "use_stages", lambda self, num_stages, now_s: self.lose_all(now_s))


def fewer_stages_run_steps_of_the_plan_before(patch: pytest.MonkeyPatch) -> None:
    use_stages = PipelineCore.use_stages

    def mutated(
        self: PipelineCore, plan: StagePlan, max_layers: tuple[int, ...], now_s: float
    ) -> None:
        epoch = self.scheduler.epoch
        use_stages(self, plan, max_layers, now_s)
        self.scheduler.epoch = epoch

    patch.setattr(PipelineCore, "use_stages", mutated)


def stages_change_before_they_have_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerRoster, "is_settled", property(lambda self: True))


def a_source_that_failed_is_never_asked_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerSupply, "rests", lambda self, now_s: self._rests_until_s is not None)


def a_worker_that_comes_later_is_not_used(patch: pytest.MonkeyPatch) -> None:
    reform = StageRecovery.reform

    def mutated(self: StageRecovery, now_s: float) -> list[Addressed]:
        return reform(self, now_s) if self.current is not None else []

    patch.setattr(StageRecovery, "reform", mutated)


def what_is_written_during_a_handover_is_not_patched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageHandover, "wrote", lambda self, pages, slots: None)


def steps_are_decided_while_the_last_pages_follow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PipelineCore,
        "is_held",
        property(lambda self: False, lambda self, held: None),
        raising=False,
    )


def pages_are_copied_to_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageHandover, "work", lambda self: False)


def a_killed_leaver_takes_no_pages_with_it(patch: pytest.MonkeyPatch) -> None:
    """Where its successor fills the stage at once."""
    halt = StageRecovery._halt

    def mutated(
        self: StageRecovery, reason: str, now_s: float, lost_stage: int | None = None
    ) -> None:
        is_filled = lost_stage is not None and self._roster.worker_of(lost_stage) is not None
        halt(self, reason, now_s, lost_stage=None if is_filled else lost_stage)

    patch.setattr(StageRecovery, "_halt", mutated)


def any_report_of_an_open_step_is_booked(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: OpenSteps, report: StageReport, num_stages: int) -> OpenStep:
        for step in self:
            if step.microbatch.step_id == report.step_id:
                return step
        raise ProtocolError("no such step")

    patch.setattr(OpenSteps, "_expected", mutated)


MUTATIONS: tuple[Mutation, ...] = (
    what_is_written_during_a_handover_is_not_patched,
    steps_are_decided_while_the_last_pages_follow,
    pages_are_copied_to_nobody,
    a_killed_leaver_takes_no_pages_with_it,
    other_stages_inherit_the_book_of_the_log,
    pages_that_are_gone_are_given_out,
    fewer_stages_run_steps_of_the_plan_before,
    stages_change_before_they_have_answered,
    a_source_that_failed_is_never_asked_again,
    a_worker_that_comes_later_is_not_used,
    any_report_of_an_open_step_is_booked,
    lost_pages_are_still_matched,
    requests_keep_the_pages_that_were_lost,
    nothing_is_computed_again,
    pages_that_nobody_has_logged_are_owed,
    what_was_to_be_computed_again_and_was_not_counts_as_done,
    stages_keep_their_own_idea_of_the_log,
    the_steps_of_a_lost_stage_stay_in_flight,
    reports_of_steps_that_were_taken_back_are_booked,
    steps_begin_before_all_stages_have_regrouped,
    a_replacement_keeps_the_links_of_an_older_stream,
    a_stage_goes_on_with_a_move_that_lost_another,
    the_scheduler_goes_on_with_a_move_that_lost_a_stage,
    a_switch_is_taken_back,
    nobody_is_asked_for_a_replacement,
    what_is_written_during_a_move_is_not_patched,
    cached_pages_do_not_move,
    unsent_pages_are_forgotten_at_the_switch,
    steps_do_not_wait_for_the_last_pages,
    the_scheduler_misses_the_switch,
    one_stage_is_enough_to_switch,
    an_abandoned_move_keeps_its_layers,
    matchable_before_the_step_is_back,
    pages_back_while_a_step_writes_them,
    a_page_is_not_sent,
    drawn_tokens_go_to_other_chunks,
    wrong_drafts_are_taken,
    parked_requests_stay_parked,
    a_retraction_forgets_the_output,
    a_hit_reaches_into_the_wanted_rows,
    a_page_is_handed_out_twice,
    masks_are_not_sent,
    all_rows_have_the_mask_of_the_first,
    a_decode_is_in_two_steps_at_once,
    overdue_requests_keep_their_pages,
)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_what_is_broken_on_purpose_is_found(
    mutation: Mutation, request: pytest.FixtureRequest
) -> None:
    require_found(mutation, request, run_seed, range(MOST_SEEDS))


def test_the_command_prints_a_seed_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--first", "3", "--seeds", "2", "--processes", "1"]) == 0
    assert "2 seeds in" in capsys.readouterr().out
    drawn_tokens_go_to_other_chunks(monkeypatch)
    assert main(["--seeds", "8", "--processes", "1"]) == 1
    printed = capsys.readouterr().out
    assert "seed " in printed and "Traceback" in printed and "seeds failed [" in printed


def test_the_command_fails_where_what_could_go_wrong_hardly_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fault_schedules.__main__.FEWEST_SEEDS", 2)
    assert main(["--seeds", "2", "--processes", "1"]) == 1
    assert "too rare: num_grown: 0, at least 0.04 wanted" in capsys.readouterr().out
