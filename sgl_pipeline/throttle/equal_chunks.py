"""Chunks of equal latency under a policy that budgets tokens (`--enable-dynamic-chunking`).

SGLang solves Runtime(L + dL) - Runtime(L) = Runtime(first chunk) for the length dL of a chunk
behind L tokens (0.5.23: `Scheduler`, dynamic chunking). Here the predictor of all other forecasts
gives the times, so nothing is smoothed.
"""

from dataclasses import replace

from sgl_pipeline.pipeline_load import PipelineLoad, TimeLimit, TokenBudget
from sgl_pipeline.throttle.load_work import decode_work, with_fresh


def equal_chunks(budget: TokenBudget, load: PipelineLoad, least_tokens: int) -> TokenBudget:
    """The same budget, but no step takes longer than with its tokens at the start of a prompt; as
    it is where it limits time already, and while the times of steps are unknown."""
    times = load.step_times
    if budget.time is not None or times is None or not budget.prefill_tokens:
        return budget
    step_ms = times.step_ms(with_fresh(decode_work(load), budget.prefill_tokens))
    return replace(budget, time=TimeLimit(step_ms, least_tokens, times))
