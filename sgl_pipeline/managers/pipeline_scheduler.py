"""The loop of the scheduler process: SGLang's sockets on one side, the stages on the other.

Built by `scheduler_process.py`. It moves messages between the front, the `StepScheduler` and the
stages; what runs next is decided by `StepScheduler` alone, and nothing here waits for anything but
the one poll at the top of the loop.
"""

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from sgl_pipeline.errors import ProtocolError, RequestError
from sgl_pipeline.managers.control_requests import ControlDesk
from sgl_pipeline.managers.garbage import collect_at_leisure
from sgl_pipeline.managers.grammars.queue import GrammarQueue, NoGrammars
from sgl_pipeline.managers.grammars.spec import ConstrainedRequest
from sgl_pipeline.managers.load_report import LoadReport
from sgl_pipeline.managers.profile_desk import ProfileDesk
from sgl_pipeline.managers.sglang_io import AbortRequest, Received, SglangFront
from sgl_pipeline.managers.stage_launcher import StageLauncher
from sgl_pipeline.managers.step_journal import StepJournal
from sgl_pipeline.messages import FromWorker, ProfileReply, StageReport
from sgl_pipeline.requests import FinishReason, Request, TokenEvent
from sgl_pipeline.scheduling import WAITED_TOO_LONG, StepScheduler
from sgl_pipeline.step_plan import StepPlanEncoder
from sgl_pipeline.trace import RequestRecord

if TYPE_CHECKING:
    from sgl_pipeline.managers.metrics_report import MetricsReport

logger = logging.getLogger(__name__)

POLL_MS = 100  # bound on how late a dead stage is noticed
CHECK_INTERVAL_S = 0.1
COLLECTION_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class _Result:
    """What a step brought; `booking_ms` is what it took to book it, at `now_s`."""

    step_id: int
    events: list[TokenEvent]
    now_s: float
    booking_ms: float


class PipelineScheduler:
    """Owns a `StepScheduler` and everything that connects it to the world.

    Args:
        metrics: None without `--enable-metrics`.
        poller: watches whatever may send: the sockets of front and stages are registered here.
        facts: what `/server_info` tells of the pipeline; JSON types only.
    """

    def __init__(
        self,
        front: SglangFront,
        steps: StepScheduler,
        launcher: StageLauncher,
        grammars: GrammarQueue | NoGrammars,
        journal: StepJournal,
        loads: LoadReport,
        metrics: "MetricsReport | None",
        poller: zmq.Poller,
        facts: dict[str, Any],
    ) -> None:
        self._front = front
        self._steps = steps
        self._launcher = launcher
        self._grammars = grammars
        self._journal = journal
        self._loads = loads
        self._metrics = metrics
        self._facts = facts
        self._profiles = ProfileDesk(front, launcher.channel, launcher.workers, journal)
        self._desk = ControlDesk(front, self, self._profiles)
        self._encoder = StepPlanEncoder()
        self._poller = poller
        self._poller.register(front.socket, zmq.POLLIN)
        self._poller.register(launcher.channel.socket, zmq.POLLIN)
        # Booked, and not yet passed on.
        self._results: list[_Result] = []
        self._reports: list[StageReport] = []
        self._next_check_s = 0.0
        self._next_collection_s = 0.0
        self._is_shut_down = False

    def run(self) -> None:
        """Serves until told to shut down. However it ends, no live request is left unanswered.

        Raises StageFailure when a stage has died, ProtocolError when one said what it may not.
        """
        finish = FinishReason("abort", message="the server is shutting down", status_code=503)
        try:
            while not self._is_shut_down:
                self._poller.poll(POLL_MS)
                for message in self._front.receive():
                    self._take(message)
                for request, error in self._grammars.poll():
                    if error is None:
                        self._take(request)
                    else:
                        self._front.refuse(request, error)
                for report in self._launcher.receive():
                    self._on_report(report)
                self._fill_pipeline()
                # All that follows can wait, a stage with nothing to do could not.
                self._pass_on_results()
                # What can run at once has not waited.
                self._end_overdue(time.monotonic())
                self._check_now_and_then()
        except Exception as failure:
            finish = FinishReason("abort", message=str(failure), status_code=500)
            raise
        finally:
            for request in self._front.live_requests:
                self._front.send_finish(request, finish)

    def _take(self, message: Received) -> None:
        """Handles what the front sent. What goes wrong here ends that request, never the loop."""
        try:
            if isinstance(message, Request):
                self._add(message)
            elif isinstance(message, ConstrainedRequest):
                self._hold(message)
            elif isinstance(message, AbortRequest):
                for request in message.requests:
                    self._abort(request, message.finish)
            else:
                self._desk.answer(message.message)
        except Exception:
            logger.exception("a message of the front could not be handled: %r", message)
            if isinstance(message, ConstrainedRequest):
                message = message.request
            if isinstance(message, Request):
                self._front.refuse(message, RequestError("internal error; see the log", 500))

    def _add(self, request: Request) -> None:
        try:
            displaced = self._steps.add(request)
        except RequestError as error:
            self._front.refuse(request, error)
        else:
            if displaced is not None:
                self._front.end(displaced)

    def _hold(self, constrained: ConstrainedRequest) -> None:
        """Adds a request once its grammar is there."""
        request = constrained.request
        try:
            if not self._grammars.is_known(constrained.grammar):
                self._steps.check_arrival(request, len(self._grammars))
            is_ready = self._grammars.add(constrained)
        except RequestError as error:
            self._front.refuse(request, error)
        else:
            if is_ready:
                self._add(request)

    def _end_overdue(self, now_s: float) -> None:
        for request in self._steps.end_overdue(now_s):
            self._front.end(request)
        for request in self._grammars.take_overdue(now_s):
            self._front.send_finish(request, WAITED_TOO_LONG)

    def _abort(self, request: Request, finish: FinishReason) -> None:
        self._grammars.discard(request)
        self._steps.abort(request.request_id, finish)
        self._front.send_finish(request, finish)

    def _fill_pipeline(self) -> None:
        """Sends steps while there is work and room in the pipeline."""
        while True:
            started = time.perf_counter()
            now_s = time.monotonic()
            microbatch = self._steps.next_microbatch(now_s)
            if microbatch is None:
                return
            plan = self._encoder.encode(microbatch)
            self._launcher.channel.broadcast(self._launcher.workers, plan)
            schedule_ms = (time.perf_counter() - started) * 1e3
            self._journal.scheduled(microbatch, now_s, schedule_ms)

    def _on_report(self, report: FromWorker) -> None:
        """Books a stage's report; the last stage's carries the tokens and completes the step."""
        if isinstance(report, ProfileReply):
            self._profiles.on_reply(report)
            return
        if not isinstance(report, StageReport):
            raise ProtocolError(f"a running stage sent {type(report).__name__}")
        if report.token_ids is not None:
            started = time.perf_counter()
            now_s = time.monotonic()
            events = self._steps.on_result(report.step_id, report.token_ids, now_s, report.logprobs)
            booking_ms = (time.perf_counter() - started) * 1e3
            self._results.append(_Result(report.step_id, events, now_s, booking_ms))
        self._reports.append(report)

    def _pass_on_results(self) -> None:
        """Tells the front and the journal what the newest reports brought."""
        for result in self._results:
            started = time.perf_counter()
            self._front.send_events(result.events)
            sending_ms = (time.perf_counter() - started) * 1e3
            ended = tuple(
                RequestRecord.of(event.request, result.now_s)
                for event in result.events
                if event.finish is not None
            )
            self._journal.finished(
                result.step_id, ended, result.now_s, result.booking_ms + sending_ms
            )
            if self._metrics is not None:
                self._metrics.ended(ended)
        for report in self._reports:
            self._journal.reported(report)
        self._results.clear()
        self._reports.clear()

    def _check_now_and_then(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_INTERVAL_S
            self._launcher.check(self._journal.last_steps)
            load = self._loads.publish(self._steps, len(self._grammars), self._journal, now_s)
            if self._metrics is not None:
                self._metrics.publish(load, self._steps, self._journal, now_s)
            self._desk.poll(now_s)
            if self._steps.is_idle and now_s >= self._next_collection_s:
                self._next_collection_s = now_s + COLLECTION_INTERVAL_S
                collect_at_leisure()

    # What `control_requests.ControlDesk` may ask

    def flush_cache(self) -> bool:
        if len(self._grammars) or not self._steps.flush_cache():
            return False
        self._grammars.clear_cache()
        return True

    def pause(self, *, retract: bool) -> None:
        self._steps.pause(retract=retract)

    def resume(self) -> None:
        self._steps.resume()

    def describe(self) -> dict[str, Any]:
        """Facts for `/server_info`: the pipeline as it was started, and how it is doing."""
        load = self._steps.load()
        return self._facts | {
            "is_paused": self._steps.is_paused,
            "free_pages": load.free_pages,
            "waiting_tokens": load.waiting_tokens,
            "num_waiting_requests": self._steps.num_waiting,
            "num_running_requests": self._steps.num_running,
            "num_compiling_requests": len(self._grammars),
            "num_retractions": self._steps.num_retractions,
            "num_steps": load.step_id,
            "prefill_tokens": self._journal.prefill_tokens,
            "decodes": self._journal.decodes,
            "recent_steps": self._journal.describe_recent(),
        }

    def shut_down(self) -> None:
        self._is_shut_down = True
