"""A stage is lost, and computes its keys and values again from the rows that were kept: the tokens
are those without a loss, bit for bit, and the other stages compute nothing again.

The real scheduler, orders, stages and kernels in one process.
"""

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from support.local_pipeline import LocalPipeline
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.requests import GREEDY, Request, SamplingSpec, StopRules

pytestmark = pytest.mark.slow

PAGE_SIZE, NUM_PAGES = 4, 200
KERNELS = {"torch": ("torch", "torch"), "compiled": ("cpu", "cpu"), "fastest": ("auto", "auto")}


def make_requests(count: int = 6, *, sampling: SamplingSpec = GREEDY) -> list[Request]:
    """Prompts of 1 to 60 tokens; every other one begins like the first."""
    numbers = random.Random(7)
    shared = [numbers.randrange(VOCAB_SIZE) for _ in range(40)]
    requests = []
    for index in range(count):
        own = [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(1, 20))]
        prompt = shared + own if index % 2 else own
        requests.append(Request(f"request-{index}", prompt, sampling, StopRules(10)))
    return requests


def make_pipeline(
    kernels: str = "fastest", dtype: str = "bfloat16", log_pages: int | None = NUM_PAGES
) -> LocalPipeline:
    attention, layers = KERNELS[kernels]
    return LocalPipeline(
        tiny_model("qwen3"),
        (2, 1, 3),
        num_pages=NUM_PAGES,
        scheduling=SchedulingArgs(page_size=PAGE_SIZE),
        # Prompts of a few dozen tokens are cut into chunks.
        throttle=ThrottleArgs(max_prefill_tokens=24, min_prefill_tokens=4, prefill_spread_steps=3),
        dtype=dtype,
        attention_backend=attention,
        layer_kernels=layers,
        log_pages=log_pages,
    )


@cache
def without_loss(kernels: str = "fastest", dtype: str = "bfloat16") -> list[list[int]]:
    """The tokens of `make_requests`."""
    return make_pipeline(kernels, dtype).run(make_requests())


def count_rows(pipeline: LocalPipeline, stage: int, counts: list[int]) -> None:
    """Adds up the rows that the worker which now fills `stage` computes."""
    held = pipeline.runners[stage].held_layers
    forward = held.forward

    def counted(layers: range, inputs: StepInputs, *more: object) -> torch.Tensor:
        counts[stage] += inputs.num_tokens
        return forward(layers, inputs, *more)  # type: ignore[arg-type]

    held.forward = counted  # type: ignore[method-assign]


def losing(pipeline: LocalPipeline, losses: dict[int, tuple[int, ...]]) -> Callable[[int], None]:
    """Loses stages after the steps of these numbers."""

    def after_step(number: int) -> None:
        if number in losses:
            pipeline.lose(*losses[number])

    return after_step


# Which rows are computed again is nothing to a kernel, nor its bits to a stage: each in turn.
@pytest.mark.parametrize(
    ("kernels", "dtype", "stage"),
    [
        ("torch", "float32", 1),
        ("torch", "bfloat16", 2),
        pytest.param("compiled", "float32", 0, marks=pytest.mark.compiler),
        *(
            pytest.param("compiled", "bfloat16", stage, marks=pytest.mark.compiler)
            for stage in range(3)
        ),
    ],
)
def test_a_stage_lost_at_any_moment_changes_no_token(kernels: str, dtype: str, stage: int) -> None:
    for step in (2, 5, 9, 16):  # in the first prefill, between chunks, in decodes
        pipeline = make_pipeline(kernels, dtype)
        tokens = pipeline.run(make_requests(), losing(pipeline, {step: (stage,)}))
        assert tokens == without_loss(kernels, dtype)
        assert pipeline.scheduler.num_retractions == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_other_stages_compute_nothing_again(stage: int) -> None:
    pipeline = make_pipeline("torch", "float32")  # recorded layers are not called
    counts = [0] * 3
    for one in range(3):
        count_rows(pipeline, one, counts)

    def after_step(number: int) -> None:
        if number == 12:
            pipeline.lose(stage)
            count_rows(pipeline, stage, counts)

    pipeline.run(make_requests(), after_step)
    sent = sum(microbatch.num_tokens for microbatch in pipeline.microbatches)
    log = pipeline.scheduler.lost_pages.log
    assert log is not None and log.replayed_tokens[stage] > 50
    assert counts == [sent + tokens for tokens in log.replayed_tokens]
    assert sum(log.replayed_tokens) == log.replayed_tokens[stage]


def test_several_losses_and_neighbors_lost_at_once_change_no_token() -> None:
    sampling = SamplingSpec(temperature=0.8, seed=5)
    alone = make_pipeline().run(make_requests(sampling=sampling))
    for losses in (
        {6: (1,), 7: (1,), 8: (2,)},
        {9: (0, 1)},
        {9: (1, 2), 10: (0,)},
        {9: (0, 1, 2), 14: (1,)},
        {7: (2,), 8: (1,), 9: (0,), 10: (1,)},
    ):
        pipeline = make_pipeline()
        assert pipeline.run(make_requests(sampling=sampling), losing(pipeline, losses)) == alone


def test_cached_prefixes_survive_and_are_computed_again_when_they_are_asked_for() -> None:
    pipeline = make_pipeline()
    expected = pipeline.run(make_requests())
    pipeline.lose(1)
    log = pipeline.scheduler.lost_pages.log
    assert log is not None and log.owes and log.replayed_tokens == [0, 0, 0]
    again = make_requests()
    assert pipeline.run(again) == expected
    assert all(one.cached_tokens >= 40 for one in again[1::2])
    # Of a prefix that several asked for, each token once.
    assert 40 <= log.replayed_tokens[1] < 120


@pytest.mark.parametrize("log_pages", [None, 0, 3, 20])
def test_what_was_not_kept_is_prefilled_again(log_pages: int | None) -> None:
    pipeline = make_pipeline(log_pages=log_pages)
    assert pipeline.run(make_requests(), losing(pipeline, {12: (1,), 17: (2,)})) == without_loss()
    assert pipeline.scheduler.num_retractions > 0


def test_after_a_layer_move_rows_of_the_old_boundary_are_of_no_use() -> None:
    pipeline = make_pipeline()

    def after_step(number: int) -> None:
        if number == 8:
            pipeline.core.migration.move_to((1, 2, 3), 0.0)
        elif number == 16:
            assert pipeline.core.plan.layer_counts == (1, 2, 3)
            pipeline.lose(2)  # its boundary has not moved
            assert pipeline.scheduler.num_retractions == 0
        elif number == 18:
            pipeline.lose(1)
            assert pipeline.scheduler.num_retractions > 0

    assert pipeline.run(make_requests(), after_step) == without_loss()


def test_a_move_after_a_loss_hands_over_whole_pages() -> None:
    pipeline = make_pipeline()
    expected = pipeline.run(make_requests())
    pipeline.lose(1)
    pipeline.finish_move((2, 2, 2))
    log = pipeline.scheduler.lost_pages.log
    assert log is not None and not log.owes
    assert pipeline.run(make_requests()) == expected
