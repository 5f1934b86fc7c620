"""The share of decodes that one step carries."""

from sgl_pipeline.pipeline_load import PipelineLoad
from sgl_pipeline.throttle.decode_balance import balanced_decodes


def share(step_id: int, running: int, ready: int | None = None, depth: int = 4) -> int:
    return balanced_decodes(
        PipelineLoad(
            step_id=step_id,
            pipeline_depth=depth,
            waiting_tokens=0,
            prompts=0,
            running_decodes=running,
            ready_decodes=running if ready is None else ready,
            free_pages=1,
            reserved_pages=0,
            total_pages=1,
            steps_in_flight=0,
        )
    )


def test_26_decodes_at_depth_4_give_7_7_6_6() -> None:
    assert [share(step, 26) for step in range(8)] == [7, 7, 6, 6, 7, 7, 6, 6]


def test_any_consecutive_shares_add_up_to_all_decodes() -> None:
    for running in range(4, 60):
        for first in range(4):
            assert sum(share(step, running) for step in range(first, first + 4)) == running


def test_all_are_taken_when_fewer_are_ready() -> None:
    assert share(0, 26, ready=3) == 3
    assert share(0, 26, ready=0) == 0


def test_a_ready_decode_always_gets_a_place() -> None:
    for step in range(4):
        assert share(step, running=1) == 1
        assert share(step, running=2) == 1


def test_one_stage_takes_all() -> None:
    assert share(5, 13, depth=1) == 13
