"""Microbatches put together by hand, decided from a load and a budget with numbers to check."""

from sgl_pipeline.microbatch import Chunk, Microbatch
from sgl_pipeline.requests import Request
from sgl_pipeline.throttle import PipelineLoad, TokenBudget

LOAD = PipelineLoad(
    step_id=0,
    pipeline_depth=2,
    waiting_tokens=9,
    prompts=1,
    running_decodes=3,
    ready_decodes=1,
    free_pages=3,
    reserved_pages=2,
    total_pages=4,
    steps_in_flight=0,
)
BUDGET = TokenBudget(9, 1, "MinP")


def microbatch_of(
    step_id: int, chunks: tuple[Chunk, ...], released: tuple[Request, ...] = ()
) -> Microbatch:
    return Microbatch(step_id, 0, LOAD, BUDGET, chunks, released)
