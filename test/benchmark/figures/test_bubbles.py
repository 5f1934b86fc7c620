"""Bubble shares by cause: each alone, and together the whole."""

from dataclasses import dataclass

import pytest

from benchmark.figures.bubbles import CAUSES, bubble_causes
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.step_shape import StepShape


@dataclass(frozen=True)
class Costs:
    """Prefill costs by its tokens, decodes by what they attend to."""

    tail: float = 0.0

    def layer_s(self, shape: StepShape) -> float:
        return shape.prefill_tokens + sum(shape.decode_contexts) / 10

    def embedding_s(self, shape: StepShape) -> float:
        return 0.0

    def tail_s(self, shape: StepShape) -> float:
        return self.tail * shape.num_samples


def prefill(tokens: int) -> StepShape:
    return StepShape(((tokens, 0),), (), 1)


def decode(context: int) -> StepShape:
    return StepShape((), (context,), 1)


EVEN = PipelineCosts(Costs(), (1, 1))


@pytest.mark.parametrize(
    ("shapes", "costs", "cause"),
    [
        ([decode(10)] * 400, PipelineCosts(Costs(tail=1.0), (1, 1)), "tail sampler"),
        ([decode(10), decode(90)] * 200, EVEN, "decode sizes differ"),
        ([prefill(1), prefill(9)] * 200, EVEN, "prefill sizes differ"),
        ([prefill(9), decode(10)] * 200, EVEN, "prefill against decode"),
        ([prefill(5)] * 400, PipelineCosts(Costs(), (1, 3)), "unequal stages and filling"),
    ],
)
def test_a_single_cause_gets_the_whole_share(
    shapes: list[StepShape], costs: PipelineCosts, cause: str
) -> None:
    parts = bubble_causes(shapes, costs)
    assert tuple(parts) == CAUSES
    assert parts[cause] > 0.2
    for other in set(CAUSES) - {cause}:
        assert parts[other] == pytest.approx(0.0, abs=0.01)


def test_two_stages_of_which_one_works_are_idle_for_half_of_the_time() -> None:
    # Steps of 9 and of 1 at depth 2: a pair takes 18, in which two stages work for 20 of 36.
    parts = bubble_causes([prefill(9), prefill(1)] * 500, EVEN)
    assert sum(parts.values()) == pytest.approx(1 - 20 / 36, abs=0.01)
