"""The core books what stages report, in any order between them, and refuses what none could say."""

import msgspec
import pytest
from msgspec.structs import replace
from support.moves import movable_core, stage_fails, stages_get_ready, stages_switch
from support.pipelines import make_request, new_scheduler
from support.served_steps import flat_costs
from support.step_records import ended_request, step_record, timing

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.pipeline_state import PipelineState
from sgl_pipeline.pipeline.step_history import RECENT_STEPS, StepHistory
from sgl_pipeline.pipeline.throttle_control import ThrottleControl
from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.throttle_change import Author
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.requests import FinishReason
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import MoveReady
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.stage_orders import OrderReader
from sgl_pipeline.wire.step_order import MirrorSnapshot, StepOrder

NAN = float("nan")


def new_core(num_stages: int = 2) -> PipelineCore:
    scheduler = new_scheduler(num_pages=64, num_stages=num_stages, context_length=128)
    return PipelineCore(scheduler, StagePlan(0, (1,) * num_stages), vocab_size=9)


def report(stage: int, step_id: int, token_ids: tuple[int, ...] | None = None) -> StageReport:
    return StageReport(
        stage=stage, step_id=step_id, epoch=0, timing=timing(stage), token_ids=token_ids
    )


def test_a_step_goes_out_as_an_order_and_comes_back_as_events_and_a_record() -> None:
    core = new_core()
    core.scheduler.add(make_request("a", [1, 2, 3], 1))
    step = core.next_step(10.0)
    assert step is not None and core.next_step(10.0) is None
    plan = OrderReader().open(step.order)
    assert isinstance(plan, StepOrder) and [chunk.length for chunk in plan.chunks] == [3]
    assert core.take_report(report(0, 0), 10.5) == []
    assert core.take_report(report(1, 0, (7,)), 11.0) == [step]
    ((event, reason),) = [(event.token_ids, event.finish) for event in step.events]
    assert (event, reason) == ((7,), FinishReason("length"))
    step.schedule_ms, step.result_ms = 0.25, 0.5
    (record,) = core.take_events()
    assert isinstance(record, StepRecord)
    assert (record.step_id, record.prefill_tokens, record.samples) == (0, 3, 1)
    assert (record.scheduled_s, record.finished_s) == (10.0, 11.0)
    assert (record.schedule_ms, record.result_ms) == (0.25, 0.5)
    assert record.stages == (timing(0), timing(1))
    assert [request.request_id for request in record.ended] == ["a"]
    assert core.take_events() == []


def test_the_last_stage_may_be_heard_before_the_first() -> None:
    core = new_core()
    core.scheduler.add(make_request("a", [1, 2, 3], 2))
    core.next_step(0.0)
    assert core.take_report(report(1, 0, (7,)), 1.0)
    # The tokens are there, so the next step goes out; the record waits for the first stage.
    assert core.next_step(1.0) is not None
    assert core.take_events() == []
    core.take_report(report(0, 0), 1.5)
    assert [event.label for event in core.take_events()] == ["step 0"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (report(0, 1), "stage 0 of 2 reported step 1 of epoch 0, 0 of epoch 0 was due"),
        (replace(report(0, 0), epoch=1), "step 0 of epoch 1, 0 of epoch 0 was due"),
        (report(1, 0, (9,)), "with token 9, the model has 9"),
        (replace(report(0, 0), timing=StageTiming(3.0, 2.0, *[4.0] * 5)), "out of order"),
        (replace(report(0, 0), timing=StageTiming(*[NAN] * 7)), "out of order"),
        (replace(report(0, 0), timing=StageTiming(*[1.0] * 6, float("inf"))), "out of order"),
        (report(0, 0, (7,)), "stage 0 of 2 reported step 0 with tokens"),
        (report(1, 0), "stage 1 of 2 reported step 0 without tokens"),
        (report(1, 0, (7, 8)), "step 0 drew 2 tokens, 1 are due"),
    ],
)
def test_what_no_stage_could_report_is_a_protocol_error(wrong: StageReport, message: str) -> None:
    core = new_core()
    core.scheduler.add(make_request("a", [1, 2, 3], 2))
    core.next_step(0.0)
    with pytest.raises(ProtocolError, match=message):
        core.take_report(wrong, 1.0)
    # Nothing of it was booked: the right one still is.
    core.take_report(report(0, 0), 1.0)
    assert core.take_report(report(1, 0, (7,)), 1.0)


def test_a_report_that_skips_a_step_is_a_protocol_error() -> None:
    core = new_core()
    for name in "ab":
        core.scheduler.add(make_request(name, [ord(name)] * 3, 2))
        core.next_step(0.0)
    with pytest.raises(ProtocolError, match=r"step 1 .* 0 of epoch 0"):
        core.take_report(report(0, 1), 1.0)


def test_a_step_reported_twice_is_a_protocol_error() -> None:
    core = new_core()
    core.scheduler.add(make_request("a", [1, 2, 3], 2))
    core.next_step(0.0)
    core.take_report(report(0, 0), 1.0)
    with pytest.raises(ProtocolError, match="before or was never sent"):
        core.take_report(report(0, 0), 1.0)


def test_a_record_holds_what_the_step_carried_and_cost() -> None:
    record = step_record(4)
    assert (record.step_id, record.epoch) == (4, 0)
    assert (record.prefill_tokens, record.decodes, record.waiting_tokens) == (5, 1, 9)
    assert (record.schedule_ms, record.result_ms, record.free_page_share) == (0.25, 0.5, 0.75)
    assert record.stages == (timing(0), timing(1))
    assert (record.prefill_budget, record.decode_budget, record.bound_by) == (9, 1, "MinP")
    (ended,) = record.ended
    assert ended == ended_request()
    assert (ended.prompt_tokens, ended.cached_tokens, ended.output_tokens) == (3, 1, 2)
    assert (ended.queue_ms, ended.first_token_ms, ended.total_ms) == (1000.0, 1500.0, 3000.0)


def test_the_history_keeps_the_newest_steps_and_all_totals() -> None:
    history = StepHistory(2)
    for step_id in range(RECENT_STEPS + 3):
        history.add(step_record(step_id))
    assert [step.step_id for step in history.recent] == list(range(3, RECENT_STEPS + 3))
    num_steps = RECENT_STEPS + 3
    assert history.input_wait_ms == pytest.approx([0.5 * num_steps, 1.5 * num_steps])
    assert history.compute_ms == pytest.approx([2.0 * num_steps] * 2)


def test_the_state_counts_what_waits_runs_and_was_done() -> None:
    core = new_core()
    core.scheduler.add(make_request("a", [1, 2, 3], 2))
    idle = new_core().state(5.0)
    assert not idle.has_work and idle.recent_steps == () and idle.cache_hit_rate == 0.0
    before = core.state(5.0, compiling_requests=3)
    assert (before.now_s, before.waiting_requests, before.compiling_requests) == (5.0, 1, 3)
    assert before.has_work and before.load.waiting_tokens == before.queued_tokens == 3
    assert before.unused_pages == before.load.free_pages == 64
    core.next_step(5.0)
    core.take_report(report(0, 0), 6.0)
    core.take_report(report(1, 0, (7,)), 6.0)
    core.take_events()
    after = core.state(6.0)
    assert (after.waiting_requests, after.running_requests, after.decoding_tokens) == (0, 1, 4)
    assert (after.num_steps, after.prefill_tokens, after.decodes) == (1, 3, 0)
    assert (after.prompt_tokens, after.cached_tokens, after.unused_pages) == (3, 0, 63)
    assert [stage.last_step for stage in after.stages] == [0, 0]
    assert [stage.compute_ms for stage in after.stages] == pytest.approx([2.0, 2.0])
    assert [shares.busy for shares in after.bubble_shares()] == pytest.approx([2 / 2.5, 2 / 3.5])


def test_a_state_can_be_sent_to_another_process() -> None:
    """Also where the policy's load knows what steps take."""
    core = new_core()
    forecast = StepForecast(core.plan, StepPredictor(flat_costs(2, 1.0)))
    core = PipelineCore(core.scheduler, core.plan, step_forecast=forecast)
    core.scheduler.add(make_request("a", [1, 2, 3], 1))
    assert core.scheduler.load().step_times is not None
    state = core.state(1.0)
    sent = msgspec.msgpack.encode(state)
    assert msgspec.msgpack.decode(sent, type=PipelineState) == state


def test_a_state_keeps_what_a_move_was_and_knows_the_steps_of_its_plan() -> None:
    core = movable_core(2, 2)
    core.history.add(msgspec.structs.replace(step_record(0), epoch=0))
    core.migration.move_to((1, 3), 1.0)
    before = core.state(1.5)
    assert before.current_move is not None
    assert (before.current_move.outcome, before.plan.epoch) == (MoveOutcome.PREPARING, 0)
    assert [step.step_id for step in before.steps_of_plan] == [0]
    stages_get_ready(core, 2.0)
    stages_switch(core, 3.0)
    core.history.add(msgspec.structs.replace(step_record(1), epoch=1))
    after = core.state(3.5)
    assert (after.current_move, after.plan.layer_counts) == (None, (1, 3))
    assert [step.step_id for step in after.steps_of_plan] == [1]
    assert [move.outcome for move in after.moves] == [MoveOutcome.DONE]
    # The record went on, the older state did not.
    assert before.current_move.outcome is MoveOutcome.PREPARING


def test_the_begin_and_the_end_of_a_move_are_events_once() -> None:
    core = movable_core(2, 2)
    record = core.migration.move_to((1, 3), 1.0)
    assert core.take_events() == [record]
    stages_get_ready(core, 2.0)
    stages_switch(core, 3.0)
    assert core.take_events() == [record] and record.is_over
    undo = core.migration.undo(4.0)
    stage_fails(core, 5.0)
    begun, ended = core.take_events()
    assert ended is undo and isinstance(begun, MoveRecord)
    # As it began, whatever became of it since.
    assert (begun.move, begun.outcome) == (undo.move, MoveOutcome.PREPARING)
    assert (begun.is_over, ended.is_over) == (False, True)
    assert core.take_events() == []


def test_what_happened_is_one_list_in_its_order() -> None:
    core = new_core()
    throttle = ThrottleControl(core.scheduler, ThrottleArgs(policy="throttle"), "radix", 8192)
    core = PipelineCore(core.scheduler, core.plan, throttle=throttle)
    core.scheduler.add(make_request("a", [1, 2, 3], 1))
    throttle.change({"prefill_spread_steps": 2}, Author("none", ""), 1.0, revert_after_s=1.0)
    core.next_step(2.0)
    core.take_report(report(0, 0), 3.0)
    core.take_report(report(1, 0, (7,)), 3.0)
    labels = [event.label for event in core.take_events()]
    assert labels == ["throttle change 0", "throttle change 1", "step 0"]


def test_a_halted_core_decides_nothing_until_it_starts_over() -> None:
    core = new_core()
    core.scheduler.add(make_request("a", [1, 2, 3], 3))
    core.next_step(0.0)
    core.take_report(report(1, 0, (7,)), 1.0)
    core.next_step(1.0)
    core.halt([0], "stage 0 was killed", 2.0)
    assert core.next_step(2.0) is None and core.scheduler.num_waiting == 1
    order = core.start_over(3)
    assert (order.incarnation, order.number) == (3, 0)
    assert OrderReader().open(order) == MirrorSnapshot((), ())
    step = core.next_step(3.0)
    assert step is not None
    plan = OrderReader()
    plan.open(order)
    again = plan.open(step.order)
    # The prompt and the token that was drawn before.
    assert isinstance(again, StepOrder) and [chunk.length for chunk in again.chunks] == [4]


def test_a_report_of_a_step_that_was_taken_back_means_nothing() -> None:
    core = new_core()
    core.scheduler.add(make_request("a", [1, 2, 3], 3))
    core.next_step(0.0)
    core.halt([0], "stage 0 was killed", 1.0)
    assert core.take_report(report(1, 0, (7,)), 1.5) == []
    core.start_over(1)
    step = core.next_step(2.0)
    assert step is not None and step.microbatch.step_id == 1
    assert core.take_report(report(1, 0, (7,)), 2.5) == []
    assert core.take_report(report(0, 0), 2.5) == []
    assert core.take_report(report(1, 1, (8,)), 3.0) == [step]
    assert [event.token_ids for event in step.events] == [(8,)]
    with pytest.raises(ProtocolError, match="before or was never sent"):
        core.take_report(report(1, 2, (8,)), 3.0)


def test_a_stage_lost_before_the_switch_ends_the_move_and_the_old_plan_stands() -> None:
    core = movable_core(2, 2)
    record = core.migration.move_to((1, 3), 1.0)
    core.orders_before_step(1.0)
    core.halt([0], "stage 0 was killed", 2.0)
    assert (record.outcome, record.reason) == (MoveOutcome.ABANDONED, "stage 0 was killed")
    assert core.take_events()[-1] is record
    # What a stage said before it heard of that is late.
    core.migration.take(MoveReady(stage=1, move=record.move, load_ms=1.0), 2.5)
    assert core.orders_before_step(2.5) == []
    core.start_over(1)
    assert core.plan == StagePlan(0, (2, 2)) and core.orders_before_step(3.0) == []
    core.migration.move_to((3, 1), 4.0)
    stages_get_ready(core, 4.0)
    stages_switch(core, 5.0)
    assert core.plan == StagePlan(1, (3, 1))


def test_a_stage_lost_after_the_switch_does_not_take_it_back() -> None:
    core = movable_core(2, 2)
    record = core.migration.move_to((1, 3), 1.0)
    stages_get_ready(core, 2.0)
    core.orders_before_step(2.0)
    core.halt([0], "stage 0 was killed", 3.0)
    assert record.outcome is MoveOutcome.DONE and core.plan == StagePlan(1, (1, 3))
    core.start_over(1)
    core.scheduler.add(make_request("a", [1, 2, 3], 3))
    step = core.next_step(4.0)
    assert step is not None and step.microbatch.epoch == 1


def test_a_stage_lost_between_the_switch_and_its_end_leaves_nothing_to_go_on_with() -> None:
    core = movable_core(2, 2, log=RecoveryLog(2, 4, 16))
    core.scheduler.add(make_request("a", [1, 2, 3], 30))
    core.next_step(0.0)
    core.take_report(report(0, 0), 1.0)
    core.take_report(report(1, 0, (7,)), 1.0)
    core.migration.move_to((1, 3), 1.0)
    stages_get_ready(core, 2.0)
    core.orders_before_step(2.0)
    core.halt([0], "stage 0 was killed", 3.0)
    # Stage 1 may lack pages of the layer that has come to it.
    assert core.scheduler.num_running == 0 and core.scheduler.num_waiting == 1


def test_the_stages_are_told_what_their_logs_hold() -> None:
    core = movable_core(2, 2, log=RecoveryLog(2, 4, 16))
    core.scheduler.add(make_request("a", [1, 2, 3, 4, 5], 30))
    core.next_step(0.0)
    core.take_report(report(0, 0), 1.0)
    core.take_report(report(1, 0, (7,)), 1.0)
    core.halt([0], "stage 0 was killed", 3.0)
    order = core.start_over(1)
    reader = OrderReader()
    snapshot = reader.open(order)
    assert isinstance(snapshot, MirrorSnapshot) and snapshot.log is not None
    assert len(snapshot.log.pages) == 2 * 4
    step = core.next_step(4.0)
    assert step is not None and core.state(4.0).replayed_tokens == (5, 0)
    plan = reader.open(step.order)
    assert isinstance(plan, StepOrder)
    (replay,) = plan.replays
    assert (replay.start, replay.length, replay.stages) == (0, 5, (0,))


def test_no_order_of_a_move_goes_out_while_a_stage_is_missing() -> None:
    core = movable_core(2, 2)
    core.halt([0], "stage 0 was killed", 1.0)
    core.migration.move_to((1, 3), 2.0)
    assert core.orders_before_step(2.0) == []
    core.start_over(1)
    assert len(core.orders_before_step(3.0)) == 1


def test_moments_of_a_stage_on_another_host_are_shifted_to_the_drivers_clock() -> None:
    core = new_core()
    core.scheduler.add(make_request("a", [1, 2, 3], 1))
    core.next_step(10.0)
    core.clock_offsets_s = {1: -1000.0}
    ahead = timing(1).shifted(1000.0)
    assert ahead.sent_s == timing(1).sent_s + 1000.0
    core.take_report(report(0, 0), 10.5)
    core.take_report(msgspec.structs.replace(report(1, 0, (7,)), timing=ahead), 11.0)
    (record,) = core.take_events()
    assert isinstance(record, StepRecord)
    for found, wanted in zip(record.stages, (timing(0), timing(1)), strict=True):
        assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(wanted))
