"""The loop of the scheduler process: SGLang's sockets on one side, the stages on the other.

It moves messages between the front, the `PipelineCore` and the stages, adds the clock, and gives
the core's events to the reports; the rooms below the core decide what runs next. Nothing here waits
except the one poll at the top of the loop.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import zmq

from sgl_pipeline.errors import PipelineLost, ProtocolError
from sgl_pipeline.managers.disaggregation.room_ends import DecodeEnd, PrefillEnd
from sgl_pipeline.managers.front.arrivals import Arrivals
from sgl_pipeline.managers.front.control_requests import ControlReplies
from sgl_pipeline.managers.front.garbage import collect_at_leisure
from sgl_pipeline.managers.front.operator_replies import OperatorReplies
from sgl_pipeline.managers.front.sglang_io import ControlRequest, SglangFront
from sgl_pipeline.managers.front.tier_requests import TierRequests
from sgl_pipeline.managers.grammars.queue import GrammarQueue, NoGrammars
from sgl_pipeline.managers.reports.profiles import Profiles
from sgl_pipeline.managers.reports.reports import Reports
from sgl_pipeline.managers.stages.recovery_actions import RecoveryActions
from sgl_pipeline.managers.stages.stage_launcher import StageLauncher
from sgl_pipeline.managers.tiers.tier_driver import TierDriver
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.pipeline_state import PipelineState
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.requests import FinishReason
from sgl_pipeline.wire.lease_orders import PagesLent
from sgl_pipeline.wire.move_orders import MoveDone, MoveFailed, MoveReady, MoveReport
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    MeasuredCosts,
    PagesCopied,
    PagesTaken,
    ProfileReply,
    Regrouped,
    StageLoaded,
    StageReady,
    StageReport,
    WorkerHello,
    WorkerLeaves,
)
from sgl_pipeline.wire.store_orders import PagesLoaded, PagesSaved, StoreReport

logger = logging.getLogger(__name__)

POLL_MS = 100  # bound on how late a dead stage is noticed
CHECK_INTERVAL_S = 0.1
COLLECTION_INTERVAL_S = 60.0
LAST_ANSWERS_S = 1.0


class PipelineScheduler:
    """Connects a `PipelineCore` to the world.

    Args:
        operators: answers `/pipeline/...`.
        store: None where the server has no store and cannot get one.
        poller: watches everything that may send; the sockets of front, stages and operators are
            registered here.
        rooms: None where requests are not shared with other servers.
    """

    def __init__(
        self,
        front: SglangFront,
        core: PipelineCore,
        launcher: StageLauncher,
        recovery: RecoveryActions,
        grammars: GrammarQueue | NoGrammars,
        operators: OperatorReplies,
        reports: Reports,
        store: TierDriver | None,
        poller: zmq.Poller,
        rooms: PrefillEnd | DecodeEnd | None = None,
    ) -> None:
        self._front = front
        self._rooms = rooms
        self._core = core
        self._requests = core.scheduler
        self._launcher = launcher
        self._recovery = recovery
        self._grammars = grammars
        self._operators = operators
        self._reports = reports
        self._profiles = Profiles(front, launcher, reports.traces)
        recovery.on_lost = self._profiles.on_lost
        self._store = store
        tiers = TierRequests(front, store, core.scheduler.args.page_size)
        self._control = ControlReplies(front, self, self._profiles, tiers)
        self._arrivals = Arrivals(front, core.scheduler, grammars, rooms, reports, self._answer)
        self._poller = poller
        ours = (front.socket, *launcher.channel.readable, operators.socket)
        for readable in (*ours, launcher.ends_descriptor):
            poller.register(readable, zmq.POLLIN)
        # `StageLauncher.receive` keeps StillLoading and WorkerFailed for itself.
        self._from_worker: dict[type, Callable[[int, Any], None]] = {
            StageReport: self._on_step,
            ProfileReply: self._on_profile,
            MoveReady: self._on_move,
            MoveDone: self._on_move,
            MoveFailed: self._on_move,
            WorkerHello: self._on_worker,
            MeasuredCosts: self._on_worker,
            StageLoaded: self._on_worker,
            StageReady: self._on_worker,
            Regrouped: self._on_worker,
            WorkerLeaves: self._on_worker,
            PagesCopied: self._on_worker,
            PagesTaken: self._on_worker,
            PagesSaved: self._on_store,
            PagesLoaded: self._on_store,
            PagesLent: self._on_lent,
        }
        # When this turn of the loop began, by the monotonic clock.
        self._now_s = 0.0
        # Steps whose tokens are booked, and not yet passed on.
        self._booked: list[OpenStep] = []
        self._next_check_s = 0.0
        self._next_collection_s = 0.0
        self._is_shut_down = False

    def run(self) -> None:
        """Serves until it is shut down. However it ends, no live request is left unanswered.

        Raises StageFailure when a stage is lost or breaks the protocol and may not be replaced,
        PipelineLost when the stages that are left cannot serve.
        """
        finish = FinishReason("abort", message="the server is shutting down", status_code=503)
        try:
            while not self._is_shut_down:
                readable = dict(self._poller.poll(POLL_MS))
                self._now_s = time.monotonic()
                self._take_turn(has_end=self._launcher.ends_descriptor in readable)
        except PipelineLost as failure:
            finish = FinishReason("abort", message=str(failure), status_code=503)
            self._refuse_late_ones(failure)
            raise
        except Exception as failure:
            finish = FinishReason("abort", message=str(failure), status_code=500)
            raise
        finally:
            for request in self._front.live_requests:
                self._front.send_finish(request, finish)

    def _take_turn(self, *, has_end: bool) -> None:
        """Takes all messages, sends all steps that can run, passes on all results.

        Args:
            has_end: some worker's process has ended.
        """
        now_s = self._now_s
        self._arrivals.now_s = now_s
        self._arrivals.receive()
        for worker, report in self._launcher.receive():
            self._hear(worker, report)
        if has_end:
            self._recovery.check(now_s)
        self._recovery.serve(now_s)
        self._operators.serve(now_s)
        if self._store is not None:
            self._store.serve()
        self._arrivals.serve_rooms()
        self._fill_pipeline(now_s)
        if self._rooms is not None and self._rooms.has_news:
            # What the orders have brought about waits for no other message.
            self._arrivals.serve_rooms()
            self._fill_pipeline(now_s)
        # The stages have their work; everything below can wait.
        self._pass_on_results(now_s)
        for request in self._core.take_unfit():
            self._front.end(request)
        # After filling: a request that has just started has not timed out.
        self._arrivals.end_overdue()
        self._check_now_and_then(now_s)

    def _refuse_late_ones(self, failure: PipelineLost) -> None:
        """Answers requests that are on their way while the server ends; they could go elsewhere."""
        # No turn of the loop: this waits, so it looks at the clock itself.
        end_s = time.monotonic() + LAST_ANSWERS_S
        while (left_s := end_s - time.monotonic()) > 0.0:
            finish = FinishReason("abort", message=str(failure), status_code=503)
            for request in self._front.live_requests:
                self._front.send_finish(request, finish)
            self._front.socket.poll(max(1, int(left_s * 1e3)))
            self._front.receive()

    def _answer(self, message: ControlRequest) -> None:
        self._control.answer(message.message, self._now_s)

    def _fill_pipeline(self, now_s: float) -> None:
        """Sends what layer moves need, and steps while there is work and room in the pipeline."""
        for order in self._core.orders_before_step(now_s):
            self._launcher.broadcast(order)
        while True:
            # Not the turn's moment: requests have arrived since then, a stage's idle time counts
            # from here, and the host's own time is what passes until the step is sent.
            started_s = time.monotonic()
            step = self._core.next_step(started_s)
            if step is None:
                return
            self._launcher.broadcast(step.order)
            step.schedule_ms = (time.monotonic() - started_s) * 1e3

    def _hear(self, worker: int, message: FromWorker) -> None:
        """Applies a worker's message. An impossible one counts against that worker and changes no
        state."""
        try:
            if (handler := self._from_worker.get(type(message))) is None:
                raise ProtocolError(f"a worker that serves sent {type(message).__name__}")
            handler(worker, message)
        except ProtocolError as error:
            self._launcher.blame(worker, str(error))

    def _on_profile(self, worker: int, reply: ProfileReply) -> None:
        self._profiles.on_reply(reply)

    def _on_move(self, worker: int, report: MoveReport) -> None:
        self._core.migration.take(report, self._now_s)

    def _on_store(self, worker: int, report: StoreReport) -> None:
        self._core.take_store_report(report)
        if self._store is not None:
            self._store.heard(report, self._now_s)

    def _on_lent(self, worker: int, report: PagesLent) -> None:
        self._core.take_lease_report(report)

    def _on_worker(self, worker: int, message: FromWorker) -> None:
        """A message that is not about a step."""
        self._recovery.take(message, self._now_s, worker)

    def _on_step(self, worker: int, report: StageReport) -> None:
        """Books a stage's report; the last stage's brings the tokens of its step."""
        # Not the turn's moment: the stage may have ended the step since then, and no step is over
        # before its stages are. The host's own time counts from here as well.
        started_s = time.monotonic()
        if booked := self._core.take_report(report, started_s):
            booked[0].result_ms = (time.monotonic() - started_s) * 1e3
            self._booked += booked

    def _pass_on_results(self, now_s: float) -> None:
        """Gives the front the tokens of the newest reports, and the reports all that happened."""
        for step in self._booked:
            started_s = time.monotonic()  # what the host spends on the tokens
            self._front.send_events(step.events)
            step.result_ms += (time.monotonic() - started_s) * 1e3
            self._reports.booked(step)
        self._booked.clear()
        self._recovery.settle(now_s)
        # Health checks do not wait for a step while a recovery is within its bound.
        self._front.is_recovering = self._recovery.is_within_bound(now_s)
        events = self._core.take_events()
        self._reports.on(events)
        for event in events:
            self._operators.on(event)
            if isinstance(event, RecoveryRecord):
                self._front.set_pool_tokens(self._requests.limits.pool_tokens)

    def _check_now_and_then(self, now_s: float) -> None:
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_INTERVAL_S
            self._recovery.check(now_s)
            self._core.clock_offsets_s = self._launcher.clock_offsets_s()
            self._front.answer_health_checks()
            state = self._state(now_s)
            if self._store is not None:
                self._store.check()
                self._front.storage_backend = self._store.args.backend
            self._reports.publish(state)
            self._control.poll(now_s)
            if self._requests.is_idle and now_s >= self._next_collection_s:
                self._next_collection_s = now_s + COLLECTION_INTERVAL_S
                collect_at_leisure()

    # For `control_requests.ControlReplies`.

    def flush_cache(self) -> bool:
        if len(self._grammars) or not self._requests.flush_cache():
            return False
        self._grammars.clear_cache()
        return True

    def pause(self, *, retract: bool) -> None:
        self._requests.pausing.pause(retract=retract)

    def resume(self) -> None:
        self._requests.pausing.resume()

    def describe(self) -> dict[str, Any]:
        """Facts for `/server_info`: the pipeline as it was started, its state, its processes."""
        workers = {"stage_pids": self._launcher.stage_pids, "hosts": self._launcher.hosts()}
        return self._reports.describe(self._state(self._now_s)) | workers

    def _state(self, now_s: float) -> PipelineState:
        tier = None if self._store is None else self._store.state()
        rooms = None if self._rooms is None else self._rooms.state()
        return self._core.state(now_s, len(self._grammars), self._recovery.records, tier, rooms)

    def shut_down(self) -> None:
        self._is_shut_down = True
