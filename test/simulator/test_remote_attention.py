"""Attention offload in virtual time against layers made by hand."""

from dataclasses import dataclass

import pytest
from support.pipelines import new_scheduler

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import Request
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.remote_attention import ExchangeCosts, LocalAttention, RemoteAttention
from sgl_pipeline.simulator.simulation import ServedRequest
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import Segment, SimulatedRequest
from sgl_pipeline.throttle.attention_offload import AttentionWork

PROMPT_TOKENS = 9


@dataclass(frozen=True)
class ContextSeconds:
    """A layer takes ten seconds whatever it carries, and one for each token that is attended to."""

    def layer_s(self, shape: StepShape) -> float:
        return 10.0 + self.attention_s(shape)

    def attention_s(self, shape: StepShape) -> float:
        return float(sum(shape.decode_contexts) + shape.prefill_tokens)

    def embedding_s(self, shape: StepShape) -> float:
        return 0.0

    def tail_s(self, shape: StepShape) -> float:
        return 0.0


PARTS = ContextSeconds()
COSTS = ExchangeCosts(latency_s=2.0, bytes_per_s=8.0, row_bytes=4, speed=0.5)


def shape(here: tuple[int, ...], elsewhere: tuple[int, ...]) -> StepShape:
    contexts = here + elsewhere
    return StepShape((), contexts, len(contexts), len(elsewhere))


@pytest.mark.parametrize(
    ("here", "elsewhere", "wait_s"),
    [
        ((30,), (), 0.0),
        # 2 + 2 + one row's half second, and ten tokens at half the speed.
        ((30,), (10,), 0.0),
        ((24,), (10,), 0.5),
        ((), (10,), 24.5),
        ((10,), (10, 20), 2 * 2.0 + 2 * 0.5 + 60.0 - 10.0),
    ],
)
def test_a_layer_waits_for_what_local_attention_does_not_cover(
    here: tuple[int, ...], elsewhere: tuple[int, ...], wait_s: float
) -> None:
    step, local = shape(here, elsewhere), LocalAttention(PARTS)
    remote = RemoteAttention(PARTS, COSTS, (3, 1))
    assert local.layer_s(step) == 10.0 + sum(here)
    assert remote.layer_wait_s(step) == wait_s
    assert [remote.wait_s(stage, step) for stage in (0, 1)] == [3 * wait_s, wait_s]


def test_more_latency_never_helps() -> None:
    step = shape((30,), (10,))
    waits = []
    for latency_s in (0.0, 1.0, 3.0, 10.0):
        costs = ExchangeCosts(latency_s=latency_s, bytes_per_s=8.0, row_bytes=4, speed=0.5)
        waits.append(RemoteAttention(PARTS, costs, (1,)).layer_wait_s(step))
    assert waits == sorted(waits)


def test_requests_are_hidden_by_the_local_ones_of_their_step() -> None:
    # Two stages, two steps: each has two local rows of fifty tokens.
    remote, local = RemoteAttention(PARTS, COSTS, (3, 1)), AttentionWork(4, 200)
    assert remote.hides(AttentionWork(2, 40), local)  # 2 + 2 + 0.5 and 20 / 0.5 against 100
    assert not remote.hides(AttentionWork(2, 96), local)  # 4.5 and 96
    assert not remote.hides(AttentionWork(1, 1), AttentionWork())


def decode(num_requests: int, offloaded: int, *, fills_waits: bool, extra: int) -> VirtualPipeline:
    """A pipeline of two stages that serves that many requests, the first `offloaded` of them with
    their attention elsewhere."""
    layers = (1, 1)
    remote = RemoteAttention(PARTS, COSTS, layers, fills_waits)
    pipeline = VirtualPipeline(
        new_scheduler(
            SchedulingArgs(page_size=4, extra_steps_in_flight=extra),
            ThrottleArgs(policy="throttle"),
            num_pages=1000,
            num_stages=2,
        ),
        PipelineCosts(LocalAttention(PARTS), layers),
        remote=remote,
    )

    def begun(request: Request, served: ServedRequest) -> None:
        if served.asked.output.first < 1000 * (offloaded + 1):
            remote.requests.add(request)

    pipeline.clients.on_begin = begun
    for number in range(1, num_requests + 1):
        first = 1000 * number
        asked = SimulatedRequest(
            arrival_s=0.0,
            prompt=(Segment(first, PROMPT_TOKENS),),
            output=Segment(first + 500, 40),
        )
        pipeline.clients.expect(asked, 0.0)
    pipeline.run([])
    return pipeline


def last_s(pipeline: VirtualPipeline) -> float:
    return max(one.token_times_s[-1] for one in pipeline.clients.served)


def test_a_lone_request_pays_the_wait_in_every_layer() -> None:
    here, elsewhere = (
        decode(1, offloaded, fills_waits=False, extra=0).clients.served[0].token_times_s
        for offloaded in (0, 1)
    )
    # The prompt is computed locally. Then two layers with a context of ten: 10 + 10 seconds each
    # here; 10 + 4 + 0.5 + 20 elsewhere.
    assert here[1] - here[0] == 2 * 20.0
    assert elsewhere[1] - elsewhere[0] == 2 * 34.5


def test_other_steps_fill_the_waits_of_a_stage() -> None:
    waiting = decode(8, 4, fills_waits=False, extra=2)
    filled = decode(8, 4, fills_waits=True, extra=2)
    assert last_s(filled) < last_s(waiting)
    alone = decode(1, 1, fills_waits=True, extra=2)
    assert last_s(alone) == last_s(decode(1, 1, fills_waits=False, extra=2))
