"""A stage knows whether its plan has layers whose pages are still on their way."""

from support.local_pipeline import LocalPipeline
from support.tiny_models import tiny_model


def test_only_the_target_of_a_move_awaits_pages_and_only_after_the_switch() -> None:
    pipeline = LocalPipeline(tiny_model("llama"), (2, 4))
    seen = []

    def watch(stage: int) -> None:
        mover = pipeline.movers[stage]
        send_rest = mover.send_rest

        def watched() -> bool:
            has_rest, before = mover.has_rest, mover.awaits_pages
            has_sent = send_rest()
            if has_rest:
                seen.append((stage, before, mover.awaits_pages))
            return has_sent

        mover.send_rest = watched  # type: ignore[method-assign]

    for stage in range(2):
        watch(stage)
    pipeline.finish_move((4, 2))
    assert seen == [(0, False, True), (1, False, False)]
    assert not any(mover.awaits_pages for mover in pipeline.movers)
