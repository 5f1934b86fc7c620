"""The driver of stage processes, with a stand-in for the processes."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmark.gpu.pipelines import (
    DrivenStep,
    ScriptedPipeline,
    decode_times,
    killed_after,
    links_between,
    same_tokens_share,
)
from benchmark.gpu.script import PlanWriter, Script
from sgl_pipeline.errors import StageFailure
from sgl_pipeline.managers.stages.stage_launcher import StageLauncher
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.stage_orders import OrderReader, SealedOrder
from sgl_pipeline.wire.step_order import StepOrder

NO_TIME = StageTiming(0, 0, 0, 0, 0, 0, 0)


class Stages:
    """A launcher whose stages report the oldest step when they are asked, and not before."""

    def __init__(self, num_stages: int) -> None:
        self.stages = range(num_stages)
        self.channel = SimpleNamespace(socket=SimpleNamespace(poll=lambda milliseconds: True))
        self.orders = OrderReader()
        self.under_way: list[StepOrder] = []
        self.most_under_way = 0

    def broadcast(self, order: SealedOrder) -> None:
        plan = self.orders.open(order)
        assert isinstance(plan, StepOrder)
        self.under_way.append(plan)
        self.most_under_way = max(self.most_under_way, len(self.under_way))

    def receive(self) -> Iterator[tuple[int, StageReport]]:
        plan = self.under_way.pop(0)
        for stage in self.stages:
            is_last = stage == self.stages[-1]
            tokens = tuple(chunk.handle for chunk in plan.chunks) if is_last else None
            report = StageReport(
                stage=stage, step_id=plan.step_id, epoch=0, timing=NO_TIME, token_ids=tokens
            )
            yield stage, report

    def check(self, last_steps: dict[int, int]) -> None:
        pass


@pytest.mark.parametrize("in_flight", [2, 3, 4])
def test_so_many_steps_are_in_flight_as_were_asked_for(in_flight: int) -> None:
    stages = Stages(num_stages=2)
    pipeline = ScriptedPipeline(cast(StageLauncher, stages), start_s=0.0)
    writer = PlanWriter(Script(num_requests=12, prompt_tokens=4, num_rounds=2), 4, 100)
    prefills = pipeline.run(writer.prefills(), 1)
    assert (len(prefills), stages.most_under_way) == (6, 1)
    steps = pipeline.run(writer.decodes(12, in_flight), in_flight)
    assert stages.most_under_way == in_flight
    assert len(steps) == 2 * in_flight and not stages.under_way
    assert all(set(step.timings) == {0, 1} and step.back_s > 0 for step in steps)
    assert sorted(token for step in steps[:in_flight] for token in step.token_ids) == list(
        range(12, 24)
    )


def driven(
    back_s: float, first: tuple[float, float], last: tuple[float, float, float]
) -> DrivenStep:
    """A step on two stages: (inputs, activations) of the first, (inputs, activations, done) of the
    last."""
    timings = {
        0: StageTiming(0, 0, *first, 0, 0, 0),
        1: StageTiming(0, 0, *last[:2], 0, last[2], 0),
    }
    return DrivenStep(timings, back_s=back_s)


def test_times_of_decodes_by_hand() -> None:
    """Two groups, two rounds: the second round took 0.2 s."""
    steps = [
        driven(1.00, (0.0, 0.0), (0.0, 0.9, 0.99)),
        driven(1.10, (0.0, 0.0), (0.0, 1.0, 1.09)),
        driven(1.25, (1.00, 1.01), (1.05, 1.09, 1.24)),
        driven(1.30, (1.10, 1.12), (1.19, 1.20, 1.29)),
    ]
    times = decode_times(steps, num_groups=2)
    assert times.round_ms == pytest.approx(200)
    assert times.step_ms == pytest.approx(100)
    assert times.turnaround_ms == pytest.approx((20 + 30) / 2)
    assert times.wait_shares == pytest.approx((0.03 / 0.2, 0.05 / 0.2))


def test_tokens_are_compared_one_by_one() -> None:
    steps = [DrivenStep(token_ids=(1, 2)), DrivenStep(token_ids=(3, 4))]
    others = [DrivenStep(token_ids=(1, 2)), DrivenStep(token_ids=(3, 5))]
    assert same_tokens_share(steps, steps) == 1.0
    assert same_tokens_share(steps, others) == 0.75


def test_links_are_those_that_the_gpus_allow() -> None:
    assert links_between("cuda", 1, 1) == ("none",)
    assert links_between("cuda", 4, 1) == ("host",)
    assert links_between("cuda", 4, 4) == ("nccl", "host")
    assert links_between("cuda", 4, 2) == ("host",)
    assert links_between("cpu", 4, 0) == ("host",)


def test_a_silent_pipeline_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.gpu.pipelines._REPORT_TIMEOUT_S", 0.0)
    stages = Stages(num_stages=1)
    cast(Any, stages.channel.socket).poll = lambda milliseconds: False
    pipeline = ScriptedPipeline(cast(StageLauncher, stages), start_s=0.0)
    writer = PlanWriter(Script(num_requests=2, prompt_tokens=4, num_rounds=2), 4, 100)
    with pytest.raises(TimeoutError, match="no stage reported"):
        pipeline.run(writer.prefills(), 1)


def test_stages_that_hang_at_the_start_are_killed() -> None:
    is_dead = threading.Event()
    with pytest.raises(TimeoutError, match="not ready after"), killed_after(0.01, is_dead.set):
        assert is_dead.wait(30)
        raise StageFailure(0, None, "killed by signal 9")
    with pytest.raises(StageFailure), killed_after(60.0, is_dead.set):
        raise StageFailure(0, None, "by itself")
