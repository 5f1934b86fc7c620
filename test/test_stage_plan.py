"""Every layer belongs to exactly one stage."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.stage_plan import StagePlan


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12))
def test_the_stages_own_every_layer_once_and_in_order(counts: list[int]) -> None:
    plan = StagePlan(0, tuple(counts))
    assert (plan.num_stages, plan.num_layers) == (len(counts), sum(counts))
    owned = [layer for stage in range(plan.num_stages) for layer in plan.layers_of(stage)]
    assert owned == list(range(plan.num_layers))
    assert [len(plan.layers_of(stage)) for stage in range(plan.num_stages)] == counts
