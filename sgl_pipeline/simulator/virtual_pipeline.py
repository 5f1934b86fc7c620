"""A pipeline in virtual time: the real `StepScheduler` over stages that only take time.

The loop is that of `managers/pipeline_scheduler.py`: take what has arrived, book what has finished,
then send steps while there is work and room. A step passes the stages in order and first in first
out, so its times follow from the stages' last ones without a calendar of events: the only events
are arrivals and results. Equal inputs give equal steps and equal times.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from sgl_pipeline.errors import RequestError
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.requests import GREEDY, Request, StopRules
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.pipeline_costs import PipelineTiming
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.workload import SimulatedRequest
from sgl_pipeline.stage_timing import StageTiming
from sgl_pipeline.trace import RequestRecord, StepRecord


@dataclass(slots=True)
class ServedRequest:
    """What a client saw of a request. Times are virtual seconds; `finished_s` is None until the
    last token, `error` says why there is none."""

    asked: SimulatedRequest
    arrival_s: float
    token_times_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    cached_tokens: int = 0
    num_retractions: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step as it was decided and as it ran: `starts_s[s]` and `ends_s[s]` on stage `s`."""

    shape: StepShape
    record: StepRecord
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """All that happened."""

    requests: tuple[ServedRequest, ...]
    steps: tuple[SimulatedStep, ...]
    num_retractions: int


# Makes the step's record when it has come back, and with which requests' last tokens.
_Finish = Callable[[float, tuple[RequestRecord, ...]], SimulatedStep]


@dataclass(slots=True)
class _StageClock:
    """When a stage was free last, and when its link to the next stage was."""

    free_s: float = 0.0
    link_free_s: float = 0.0


class VirtualPipeline:
    """Runs one workload to its end.

    Args:
        scheduler: a new one; the caller chose its policy, pages and stages.
        costs: how long everything takes; has as many stages as the scheduler plans for.
    """

    def __init__(self, scheduler: StepScheduler, costs: PipelineTiming) -> None:
        self._scheduler = scheduler
        self._costs = costs
        self._clocks = [_StageClock() for _ in range(costs.num_stages)]
        self._arrivals: list[tuple[float, int, SimulatedRequest]] = []
        self._order = count()
        self._live: dict[Request, ServedRequest] = {}
        self._served: list[ServedRequest] = []
        self._in_flight: deque[tuple[float, Microbatch, _Finish]] = deque()
        self._steps: list[SimulatedStep] = []
        # The scheduler process is busy until then: whatever happens before, it sees at that time.
        self._scheduler_free_s = 0.0

    def run(
        self,
        workload: Iterable[SimulatedRequest],
        on_progress: Callable[[int, float], None] = lambda finished, now_s: None,
    ) -> Simulation:
        """Serves all requests; `on_progress` gets the number that have ended and the time."""
        for asked in workload:
            self._expect(asked.arrival_s, asked)
        while self._arrivals or self._in_flight:
            now_s = max(self._next_event_s(), self._scheduler_free_s)
            self._take_arrivals(now_s)
            now_s = self._take_results(now_s)
            self._fill(now_s)
            on_progress(len(self._served) - len(self._live), now_s)
        assert self._scheduler.is_idle, "requests are left, but nothing can run"
        return Simulation(tuple(self._served), tuple(self._steps), self._scheduler.num_retractions)

    def _next_event_s(self) -> float:
        arrival_s = self._arrivals[0][0] if self._arrivals else float("inf")
        result_s = self._in_flight[0][0] if self._in_flight else float("inf")
        return min(arrival_s, result_s)

    def _expect(self, arrival_s: float, asked: SimulatedRequest) -> None:
        heapq.heappush(self._arrivals, (arrival_s, next(self._order), asked))

    def _take_arrivals(self, now_s: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now_s:
            arrival_s, number, asked = heapq.heappop(self._arrivals)
            served = ServedRequest(asked, arrival_s)
            self._served.append(served)
            request = Request(
                request_id=str(number),
                prompt_ids=asked.prompt_ids(),
                sampling=GREEDY,
                stops=StopRules(max_new_tokens=asked.output_tokens),
                arrival_s=arrival_s,
            )
            try:
                self._scheduler.add(request)
            except RequestError as error:
                served.error = str(error)
            else:
                self._live[request] = served

    def _take_results(self, now_s: float) -> float:
        """Books what has come back by `now_s`; returns when the scheduler is done with that."""
        while self._in_flight and self._in_flight[0][0] <= now_s:
            _, microbatch, finish = self._in_flight.popleft()
            tokens = [
                self._next_token(chunk.request) for chunk in microbatch.chunks if chunk.samples
            ]
            events = self._scheduler.on_result(microbatch.step_id, tokens, now_s)
            ended = tuple(
                RequestRecord.of(event.request, now_s) for event in events if event.finish
            )
            self._steps.append(finish(now_s, ended))
            now_s += self._costs.host.result_s(len(tokens))
            for event in events:
                self._note_tokens(event.request, len(event.token_ids), now_s)
        self._scheduler_free_s = now_s
        return now_s

    def _next_token(self, request: Request) -> int:
        return self._live[request].asked.output.first + len(request.output_ids)

    def _note_tokens(self, request: Request, num_new: int, now_s: float) -> None:
        served = self._live[request]
        served.token_times_s += [now_s] * num_new
        if request.finish is None:
            return
        del self._live[request]
        served.finished_s = now_s
        served.cached_tokens = request.cached_tokens
        served.num_retractions = request.num_retractions
        if served.asked.follow_up is not None:
            self._expect(now_s + served.asked.think_s, served.asked.follow_up)

    def _fill(self, now_s: float) -> None:
        while (microbatch := self._scheduler.next_microbatch(now_s)) is not None:
            schedule_s = self._costs.host.schedule_s(len(microbatch.chunks))
            now_s += schedule_s
            self._send(microbatch, now_s, schedule_s)
        self._scheduler_free_s = now_s

    def _send(self, microbatch: Microbatch, sent_s: float, schedule_s: float) -> None:
        """Runs a step that leaves the scheduler at `sent_s` through all stages."""
        costs, shape = self._costs, StepShape.of(microbatch)
        compute_s = costs.stage_seconds(shape, microbatch.step_id)
        starts, ends, timings = [], [], []
        input_s = sent_s
        for stage, clock in enumerate(self._clocks):
            prepare_s = costs.host.prepare_s(len(microbatch.chunks))
            start_s = costs.host.start_s(clock.free_s, sent_s, input_s, prepare_s)
            end_s = start_s + compute_s[stage]
            timings.append(
                StageTiming(
                    free_s=clock.free_s,
                    plan_s=max(clock.free_s, sent_s),
                    inputs_s=costs.host.inputs_s(clock.free_s, sent_s, prepare_s),
                    activations_s=start_s,
                    layers_s=end_s,
                    done_s=end_s,
                    sent_s=end_s,
                )
            )
            starts.append(start_s)
            ends.append(end_s)
            clock.free_s = end_s
            if stage + 1 < costs.num_stages:
                transfer_s = costs.link.transfer_s(shape.num_tokens)
                clock.link_free_s = max(end_s, clock.link_free_s) + transfer_s
                input_s = clock.link_free_s + costs.link.latency_s

        def finish(finished_s: float, ended: tuple[RequestRecord, ...]) -> SimulatedStep:
            record = StepRecord(
                step_id=microbatch.step_id,
                epoch=microbatch.epoch,
                prefill_tokens=microbatch.num_prefill_tokens,
                decodes=microbatch.num_decodes,
                samples=microbatch.num_samples,
                attended_tokens=microbatch.attended_tokens,
                waiting_tokens=microbatch.load.waiting_tokens,
                running_decodes=microbatch.load.running_decodes,
                free_page_share=microbatch.load.free_share,
                prefill_budget=microbatch.budget.prefill_tokens,
                decode_budget=microbatch.budget.decodes,
                bound_by=microbatch.budget.bound_by,
                scheduled_s=sent_s - schedule_s,
                finished_s=finished_s,
                schedule_ms=schedule_s * 1e3,
                result_ms=costs.host.result_s(shape.num_samples) * 1e3,
                stages=tuple(timings),
                ended=ended,
            )
            return SimulatedStep(shape, record, tuple(starts), tuple(ends))

        self._in_flight.append((ends[-1] + costs.host.transit_s, microbatch, finish))
