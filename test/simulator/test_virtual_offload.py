"""The lent pages of a decode server: set aside until offloaded requests fill them."""

import pytest
from support.pipelines import FakePipeline, make_request
from support.virtual_runs import TokenSeconds

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import Request
from sgl_pipeline.simulator.remote_attention import ExchangeCosts, RemoteAttention
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_offload import LendingScheduler, OffloadSetting, VirtualOffload
from sgl_pipeline.throttle import make_policy

PAGE_TOKENS = 4
POOL_PAGES = 8


class AttentionAlone(TokenSeconds):
    """Attention is all that a layer does."""

    def attention_s(self, shape: StepShape) -> float:
        return self.layer_s(shape)


def lending(lent_pages: int) -> tuple[VirtualOffload, LendingScheduler]:
    """Offload whose every request but the first is offloaded."""
    scheduler = LendingScheduler(
        SchedulingArgs(page_size=PAGE_TOKENS),
        make_policy(ThrottleArgs(policy="throttle")),
        num_pages=POOL_PAGES,
        num_stages=1,
        context_length=1000,
    )
    costs = ExchangeCosts(latency_s=0.0, bytes_per_s=1.0, row_bytes=1, speed=1.0)
    remote = RemoteAttention(AttentionAlone(), costs, (1,))
    rule = OffloadSetting(bound=10.0, only_hidden=False)
    return VirtualOffload(scheduler, remote, rule, lent_pages), scheduler


def prompt(number: int, num_tokens: int = 8) -> Request:
    first = 100 * number
    return make_request(str(number), range(first, first + num_tokens))


def free_pages(scheduler: LendingScheduler) -> int:
    scheduler.check_invariants()
    return scheduler.load().free_pages


def test_lent_pages_are_set_aside_but_for_those_that_offloaded_requests_fill() -> None:
    offload, scheduler = lending(3)
    local, first, second = (prompt(number) for number in range(3))
    offload.set_aside()
    assert free_pages(scheduler) == 5
    for request, is_offloaded, free in ((local, False, 5), (first, True, 7), (second, True, 8)):
        assert offload.decide(request) == is_offloaded
        offload.set_aside()
        assert free_pages(scheduler) == free
    assert offload.num_offloaded == 2
    for request, free in ((second, 7), (local, 7), (first, 5)):
        offload.ended(request)
        offload.set_aside()
        assert free_pages(scheduler) == free


def test_pages_are_set_aside_as_far_as_they_can_be_had() -> None:
    offload, scheduler = lending(20)
    offload.set_aside()
    assert free_pages(scheduler) == 0


@pytest.mark.parametrize("aside", [0, 2, 4])
def test_what_is_aside_is_not_given_out(aside: int) -> None:
    offload, scheduler = lending(aside)
    offload.set_aside()
    pipeline = FakePipeline(scheduler, PAGE_TOKENS)
    for number in range(3):
        scheduler.add(prompt(number))
    for _ in range(40):
        pipeline.fill()
        assert POOL_PAGES - aside >= sum(len(one.pages) for one in scheduler.requests())
        if not pipeline.steps_in_flight:
            break
        pipeline.complete()
    assert scheduler.is_idle
