"""The tokens that a budget gives a step whose requests are of mean length, for forecasts: they know
how many tokens wait and how many requests decode, and no single chunk.
"""

from sgl_pipeline.step_work import StepWork
from sgl_pipeline.throttle import PipelineLoad, TokenBudget, balanced_decodes


def most_decodes(budget: TokenBudget, load: PipelineLoad) -> int:
    """The most decodes of a step."""
    if budget.time is None or budget.time.decodes is None:
        return budget.decodes
    return min(budget.decodes, balanced_decodes(load))


def most_prefill_tokens(budget: TokenBudget, load: PipelineLoad, decodes: int) -> int:
    """The most prompt tokens beside `decodes`."""
    limit = budget.time
    if limit is None:
        return budget.prefill_tokens
    too_many = budget.prefill_tokens + 1
    fitting = min(limit.least_prefill_tokens, budget.prefill_tokens)
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if limit.times.step_ms(step_work(load, decodes, middle)) <= limit.step_ms:
            fitting = middle
        else:
            too_many = middle
    return fitting


def step_work(load: PipelineLoad, decodes: int, prefill_tokens: int) -> StepWork:
    """The work of `decodes` decodes and `prefill_tokens` waiting tokens."""
    by_decodes = load.decode_attended_tokens * decodes // max(1, load.running_decodes)
    by_prefill = load.waiting_attended_tokens * prefill_tokens // max(1, load.waiting_tokens)
    return StepWork(decodes + prefill_tokens, decodes, by_decodes, by_prefill, decodes)
