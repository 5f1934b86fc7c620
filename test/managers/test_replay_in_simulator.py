"""The runtime's loop and the simulator plan alike, step for step.

The real loop runs over stages that take their time, counted in turns of the loop. `VirtualPipeline`
then gets the same arrivals and the same times of each step on each stage, a turn being a second. It
must make the same microbatches: of the same requests, the same tokens, in the same order, at the
same time.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.managers.grammars.queue import NoGrammars
from sgl_pipeline.managers.pipeline_scheduler import PipelineScheduler
from sgl_pipeline.managers.reports.reports import Reports
from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.requests import GREEDY, FinishReason, Request, StopRules
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.pipeline_costs import HostCosts, SimulatedLink
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.stage_orders import OrderReader, SealedOrder
from sgl_pipeline.wire.step_order import StepOrder

NUM_STAGES = 3
NUM_REQUESTS = 60


class RecordingScheduler(StepScheduler):
    """Keeps what it decides: the turn, and each chunk's request, start and length."""

    def __init__(self, policy: str, turn: Callable[[float], int]) -> None:
        super().__init__(
            SchedulingArgs(page_size=4),
            make_policy(ThrottleArgs(policy=policy, max_prefill_tokens=64, min_prefill_tokens=8)),
            num_pages=48,
            num_stages=NUM_STAGES,
            context_length=160,
        )
        self._turn = turn
        self.decided: list[Microbatch] = []
        self.plans: list[tuple[int, list[tuple[str, int, int]]]] = []

    def next_microbatch(self, now_s: float) -> Microbatch | None:
        microbatch = super().next_microbatch(now_s)
        if microbatch is not None:
            chunks = [(one.request.request_id, one.start, one.length) for one in microbatch.chunks]
            self.decided.append(microbatch)
            self.plans.append((self._turn(now_s), chunks))
        return microbatch


class TurnFront:
    """Counts turns, hands out the requests whose turn it is, and ends the loop with the last."""

    def __init__(self, workload: Sequence[SimulatedRequest], socket: Any) -> None:
        self.socket = socket
        self.turn = -1
        self.live_requests: list[Request] = []
        self.asked: dict[str, SimulatedRequest] = {}
        self.end_loop: Callable[[], None] = lambda: None
        self._coming = deque(enumerate(workload))

    def receive(self) -> list[Request]:
        self.turn += 1
        arrived = []
        while self._coming and self._coming[0][1].arrival_s <= self.turn:
            number, asked = self._coming.popleft()
            self.asked[str(number)] = asked
            stops = StopRules(max_new_tokens=asked.output_tokens)
            arrived.append(Request(str(number), asked.prompt_ids(), GREEDY, stops))
        self.live_requests += arrived
        return arrived

    def answer_health_checks(self) -> None:
        """None are asked."""

    def send_events(self, events: Any) -> None:
        for event in events:
            if event.finish is not None:
                self.send_finish(event.request, event.finish)
        if not self._coming and not self.live_requests:
            self.end_loop()

    def send_finish(self, request: Request, finish: FinishReason) -> None:
        self.live_requests.remove(request)


class SlowStages:
    """Stages in a row, first in first out, each of which takes some turns for a step."""

    stages = range(NUM_STAGES)

    def __init__(self, front: TurnFront, steps: RecordingScheduler, socket: Any) -> None:
        self.channel = SimpleNamespace(socket=socket, readable=[socket])
        self.ends_descriptor = os.eventfd(0)  # never readable: no stage ends
        self.turns_of_steps: dict[int, tuple[float, ...]] = {}
        self._front = front
        self._steps = steps
        self._random = Random(3)
        self._orders = OrderReader()
        self._free_turn = [0.0] * NUM_STAGES
        self._in_flight: deque[tuple[float, Microbatch]] = deque()

    def clock_offsets_s(self) -> dict[int, float]:
        return {}

    def broadcast(self, order: SealedOrder) -> None:
        plan = self._orders.open(order)
        assert isinstance(plan, StepOrder)
        turns = tuple(float(self._random.choice((1, 1, 2, 5))) for _ in self.stages)
        self.turns_of_steps[plan.step_id] = turns
        input_turn = float(self._front.turn)
        for stage, needed in enumerate(turns):
            input_turn = max(input_turn, self._free_turn[stage]) + needed
            self._free_turn[stage] = input_turn
        self._in_flight.append((input_turn, self._steps.decided[-1]))

    def receive(self) -> list[tuple[int, StageReport]]:
        reports: list[StageReport] = []
        while self._in_flight and self._in_flight[0][0] <= self._front.turn:
            _, microbatch = self._in_flight.popleft()
            tokens = tuple(self._next_token(c.request) for c in microbatch.chunks if c.samples)
            reports += [
                StageReport(
                    stage=stage,
                    step_id=microbatch.step_id,
                    epoch=0,
                    timing=StageTiming(*[0.0] * 7),
                    token_ids=tokens if stage == NUM_STAGES - 1 else None,
                )
                for stage in self.stages
            ]
        return [(report.stage, report) for report in reports]

    def _next_token(self, request: Request) -> int:
        return self._front.asked[request.request_id].output.first + len(request.output_ids)

    def check(self, last_steps: Any) -> None:
        """No stage ever dies."""


class RecordedTiming:
    """Gives each step the times that it had in the recorded run; nothing else takes any."""

    num_stages = NUM_STAGES
    layer_counts = (1,) * NUM_STAGES
    host = HostCosts()

    def __init__(self, turns_of_steps: dict[int, tuple[float, ...]]) -> None:
        self._turns_of_steps = turns_of_steps

    def link_after(self, stage: int) -> SimulatedLink:
        return SimulatedLink()

    def stage_seconds(self, shape: StepShape, step_id: int) -> tuple[float, ...]:
        return self._turns_of_steps[step_id]


def bursty_workload() -> list[SimulatedRequest]:
    """More than the pool holds at times; every third prompt may go on from an earlier answer."""
    random, ids = Random(0), TokenIds()
    workload: list[SimulatedRequest] = []
    turn = 0
    for number in range(NUM_REQUESTS):
        turn += random.choice((0, 0, 1, 3, 20))
        history = ()
        if number >= 6 and number % 3 == 0:
            earlier = workload[number - random.randint(3, 6)]
            if earlier.input_tokens + earlier.output_tokens < 60:
                history = (*earlier.prompt, earlier.output)
        prompt = (*history, ids.fresh(random.randint(1, 50)))
        output = ids.fresh(random.randint(1, 24))
        workload.append(SimulatedRequest(arrival_s=float(turn), prompt=prompt, output=output))
    return workload


@pytest.fixture
def ready_socket():
    """A socket on which something always waits, so that a turn of the loop never does."""
    context = zmq.Context()
    reader, writer = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    reader.bind("inproc://always-ready")
    writer.connect("inproc://always-ready")
    writer.send(b"")
    yield reader
    context.destroy(linger=0)


def nothing(now_s: float) -> None:
    """What is not driven here."""


def run_the_loop(
    policy: str, workload: Sequence[SimulatedRequest], socket: Any
) -> tuple[RecordingScheduler, SlowStages]:
    front = TurnFront(workload, socket)
    steps = RecordingScheduler(policy, lambda now_s: front.turn)
    stages = SlowStages(front, steps, socket)
    loop = PipelineScheduler(
        front,
        PipelineCore(steps, StagePlan(0, (1,) * NUM_STAGES)),
        stages,
        # No stage is lost.
        SimpleNamespace(
            current=None,
            records=(),
            check=nothing,
            serve=nothing,
            settle=lambda now_s: None,
            is_within_bound=lambda now_s: True,
        ),
        NoGrammars("none here"),
        # Nobody asks, so it sleeps wherever the front would.
        SimpleNamespace(socket=socket, serve=lambda now_s: None, on=lambda event: None),
        Reports({}, "off", TraceFiles(), SimpleNamespace(publish=lambda state: None)),
        None,
        zmq.Poller(),
    )
    front.end_loop = loop.shut_down
    loop.run()
    return steps, stages


@pytest.mark.parametrize(
    "policy", ["throttle", "throttle-adaptive", "no-ut", "sarathi", "greedy-queue"]
)
def test_the_simulator_makes_every_microbatch_of_a_recorded_run(
    policy: str, ready_socket: Any
) -> None:
    workload = bursty_workload()
    real, stages = run_the_loop(policy, workload, ready_socket)
    simulated = RecordingScheduler(policy, round)
    simulation = VirtualPipeline(simulated, RecordedTiming(stages.turns_of_steps)).run(workload)
    assert simulated.plans == real.plans
    # The run had what could set them apart.
    assert len(real.plans) > 100
    assert real.num_retractions == simulation.num_retractions > 0
    assert sum(served.cached_tokens for served in simulation.requests) > 100
