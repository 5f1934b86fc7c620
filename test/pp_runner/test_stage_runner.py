"""A stage runs the layers that the plan of a step's epoch gives it, or says why it cannot."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.late_tail import LateTail
from support.local_pipeline import QueueLink, open_stage
from support.tiny_models import tiny_model

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.stage_runner import StageRunner, plans_tail_late
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.step_order import ChunkOrder, MirroredChunk, RequestOpen, StepOrder

PLAN = StagePlan(4, (1, 3, 2))


@pytest.fixture
def runner() -> StageRunner:
    """Stage 1 of 3, with layers 1 to 3, from epoch 4 on."""
    return open_stage(tiny_model("llama"), PLAN, 1, QueueLink(deque(), deque()))


def step_of(epoch: int) -> StepOrder:
    return StepOrder(7, epoch, (), (RequestOpen(0, GREEDY, 1),), (ChunkOrder(0, 0, 1, True),))


def test_the_plan_of_the_assignment_is_known_from_the_start(runner: StageRunner) -> None:
    assert runner.held_layers.held == (1, 2, 3)
    with pytest.raises(ProtocolError, match=r"step 7 is of epoch 5, .* the plans of epochs 4$"):
        runner.prepare(step_of(5))
    runner.know_plan(StagePlan(5, (2, 1, 3)))
    with pytest.raises(ProtocolError, match=r"epoch 6, this stage knows the plans of epochs 4, 5$"):
        runner.prepare(step_of(6))


def test_a_step_whose_layers_are_not_all_held_names_the_missing_one(runner: StageRunner) -> None:
    runner.held_layers.drop(2)
    with pytest.raises(ProtocolError, match=r"step 7 runs layer 2, but .* holds layers 1, 3"):
        runner.prepare(step_of(4))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StagePlan(4, (1, 3, 2)), "a plan of epoch 4 arrived, this stage knows that of 4"),
        (StagePlan(3, (1, 3, 2)), "a plan of epoch 3 arrived, this stage knows that of 4"),
        (StagePlan(5, (1, 3, 1)), "has 5 layers in 3 stages, this pipeline has 6 in 3"),
        (StagePlan(5, (1, 5)), "has 6 layers in 2 stages, this pipeline has 6 in 3"),
        (StagePlan(5, (1, 4, 1)), "the plan of epoch 5 runs layer 4, but .* holds layers 1, 2, 3"),
    ],
)
def test_a_plan_that_the_stage_cannot_run_is_refused(
    runner: StageRunner, plan: StagePlan, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        runner.know_plan(plan)
    with pytest.raises(ProtocolError, match=r"knows the plans of epochs 4$"):
        runner.prepare(step_of(5))


def test_a_stage_without_layers_hands_on_a_copy_of_its_rows() -> None:
    """Upstream's buffer is written to again when the next rows are asked for."""
    upstream, downstream = deque(), deque()
    runner = open_stage(
        tiny_model("llama"), StagePlan(0, (3, 0, 3)), 1, QueueLink(upstream, downstream)
    )
    rows = torch.randn(1, 64)
    upstream.append((7, rows))
    step = StepOrder(
        7,
        0,
        (),
        (RequestOpen(0, GREEDY, 1),),
        (ChunkOrder(0, 0, 1, True, b"\1\0\0\0", b"\0\0\0\0"),),
    )
    runner.launch(runner.prepare(step))
    ((_, sent),) = downstream
    assert torch.equal(sent, rows)
    assert sent.data_ptr() != rows.data_ptr()


@pytest.mark.parametrize("plans_late", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_the_tail_of_a_step_is_planned_before_its_tokens_are_drawn(plans_late: bool) -> None:
    """On a GPU when the layers are launched: they need not wait for it."""
    model, plan = tiny_model("llama"), StagePlan(0, (6,))
    calls: list[str] = []

    class WatchedTail(LateTail):
        def plan(self, chunks: Sequence[MirroredChunk], inputs: StepInputs) -> None:
            calls.append("plan")
            super().plan(chunks, inputs)

    runner = open_stage(
        model, plan, 0, QueueLink(deque(), deque()), tail=WatchedTail(calls, [0] * 2)
    )
    runner._plans_tail_late = plans_late
    forward = runner.held_layers.forward

    def watched_forward(*given: Any) -> torch.Tensor:
        calls.append("layers")
        return forward(*given)

    runner.held_layers.forward = watched_forward  # type: ignore[method-assign]
    for step_id in range(2):
        opens = () if step_id else (RequestOpen(0, GREEDY, 1),)
        pages = b"" if step_id else bytes(4)
        chunk = ChunkOrder(0, step_id, 1, True, bytes(4), pages)
        prepared = runner.prepare(StepOrder(step_id, 0, (), opens, (chunk,)))
        assert calls == ([] if plans_late else ["plan"])
        assert runner.launch(prepared).report().token_ids == (step_id,)
        first = ["layers", "plan"] if plans_late else ["plan", "layers"]
        assert calls == [*first, f"draw {step_id}", f"result {step_id}"]
        calls.clear()


@pytest.mark.parametrize(
    ("device", "is_first", "is_late"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False), ("cpu", False, False)],
)
def test_only_a_gpu_that_waits_for_no_rows_plans_its_tail_late(
    device: str, is_first: bool, is_late: bool
) -> None:
    assert plans_tail_late(torch.device(device), is_first) == is_late
