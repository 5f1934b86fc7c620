"""A stage knows whether its plan has layers whose pages are still on their way."""

from support.local_pipeline import LocalPipeline
from support.tiny_models import tiny_model

from sgl_pipeline.wire.move_orders import SwitchPlan


def test_only_the_target_of_a_move_awaits_pages_and_only_after_the_switch() -> None:
    pipeline = LocalPipeline(tiny_model("llama"), (2, 4))
    seen = []

    def watch(stage: int) -> None:
        mover = pipeline.movers[stage]
        switch = mover.switch

        def watched(order: SwitchPlan) -> None:
            before = mover.awaits_pages
            switch(order)
            seen.append((stage, before, mover.awaits_pages))

        mover.switch = watched  # type: ignore[method-assign]

    for stage in range(2):
        watch(stage)
    pipeline.finish_move((4, 2))
    assert seen == [(0, False, True), (1, False, False)]
    assert not any(mover.awaits_pages for mover in pipeline.movers)
