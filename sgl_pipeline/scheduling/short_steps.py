"""The length of steps where tenants share the server: short enough for a tenant that may come.

A newcomer is served in the next step that is decided, behind the steps on their way, one for each
stage. So it waits for about one more step than there are stages, and the length of steps, not the
queue, is its wait. Prefill is bounded by a step's predicted time, the greatest of:

- a step of about the mean length of the last ones. Where prompts wait for places or pages, steps
  full of prefill take turns with steps of decodes; as long as the mean leaves room for more, the
  prefill fits into shorter ones, and stages wait less for each other. If prompts fill every step,
  the mean reaches the bound and raises it:
- but no higher than to where smaller steps with the same mixture would take `cost_share` more time
  for their work than those of the policy: weights are read, and kernels started, for each step.
- In any case somewhat more than the decodes of the step, so that prefill goes on.

A newcomer's prompt that nearly fits is not cut: it would end a step later, and passes the stages
sooner in a step that is longer by less than that step's share of them, one of the pipeline's depth.

While times are not known, the first steps of a server that several tenants share are bounded by
tokens, a number that grows from step to step. Times are known after a number of steps, sooner if
these are short, and a fit needs steps that differ. Where times are never known, the number exceeds
what a policy allows after a few hundred steps.
"""

from dataclasses import replace

from sgl_pipeline.pipeline_load import PipelineLoad, TimeLimit, TokenBudget
from sgl_pipeline.step_work import StepTimes, StepWork

# The part of the bound that steps fill in the mean where they are shorter than the cost allows.
FILLED_SHARE = 0.96
# The mean of steps forgets by this share a step: it is that of about the last 125. Steps that are
# all full grow by a third of a thousandth each.
FORGOTTEN_SHARE = 0.008
# A bound is never less than this many times the shortest step, which reads all weights, nor than
# the decodes of its step and this share of them.
LEAST_STEPS = 2.25
MIN_GROWTH = 0.25
# Prompt tokens that a step with prefill has in any case.
LEAST_PREFILL_TOKENS = 32
# Of the policy's step, that are tried.
_PARTS = 64
# While times are not known, step n of a server has at most FIRST_PREFILL_TOKENS times
# (1 + n / GROWTH_STEPS) ** 2 prompt tokens: 64 in the first step, 256 at the first fit.
FIRST_PREFILL_TOKENS = 64
GROWTH_STEPS = 64


class ShortSteps:
    """Learns the mean from the steps that are decided.

    Args:
        cost_share: the most time, as a share, that shorter steps may take more for their work.
    """

    def __init__(self, cost_share: float) -> None:
        self._cost_share = cost_share
        self._mean_ms: float | None = None

    def note(self, work: StepWork, times: StepTimes | None) -> None:
        """A step of `work` has been decided; the mean is forgotten while times are not known."""
        if times is None:
            self._mean_ms = None
            return
        step_ms = times.step_ms(work)
        if self._mean_ms is None:
            self._mean_ms = step_ms
        self._mean_ms += FORGOTTEN_SHARE * (step_ms - self._mean_ms)

    def bounded(self, budget: TokenBudget, load: PipelineLoad, *, is_shared: bool) -> TokenBudget:
        """`budget` with the bound; itself where that changes nothing.

        It is `bound_by` the bound where that is predicted to shorten the step.

        Args:
            is_shared: whether requests of several tenants have been here at the same time. If not,
                there is no bound while times are not known.
        """
        times = load.step_times
        if not self._cost_share or not budget.prefill_tokens:
            return budget
        if times is None:
            return _slow_start(budget, load) if is_shared else budget
        decodes = _decodes_of(budget, load)
        least_ms = _least_ms(decodes, times)
        limit = budget.time
        if limit is not None and limit.step_ms <= least_ms:
            return budget
        whole = _with_prefill(decodes, budget.prefill_tokens, load)
        step_ms = self._bound_ms(whole, least_ms, times)
        newcomer_ms = step_ms * (1.0 + 1.0 / load.pipeline_depth)
        if limit is None:
            least_tokens = min(LEAST_PREFILL_TOKENS, budget.prefill_tokens)
            limit = TimeLimit(step_ms, least_tokens, times, newcomer_ms=newcomer_ms)
        elif limit.step_ms <= step_ms:
            return budget
        else:
            newcomer_ms = min(newcomer_ms, limit.step_ms)
            limit = replace(limit, step_ms=step_ms, newcomer_ms=newcomer_ms)
        if times.step_ms(whole) <= step_ms:
            return replace(budget, time=limit)
        return replace(budget, bound_by="fair-step", time=limit)

    def _bound_ms(self, whole: StepWork, least_ms: float, times: StepTimes) -> float:
        """Milliseconds of the bound of a step that would be `whole` without it."""
        mean_ms = (self._mean_ms or 0.0) / FILLED_SHARE
        return max(least_ms, min(mean_ms, shortest_ms(whole, times, self._cost_share)))


def _slow_start(budget: TokenBudget, load: PipelineLoad) -> TokenBudget:
    """`budget` with at most `first_steps_tokens` of prefill."""
    tokens = first_steps_tokens(load.step_id)
    if budget.prefill_tokens <= tokens:
        return budget
    is_shorter = tokens < load.waiting_tokens
    bound_by = "fair-step" if is_shorter else budget.bound_by
    return replace(budget, prefill_tokens=tokens, bound_by=bound_by)


def first_steps_tokens(step_id: int) -> int:
    """The most prompt tokens of step `step_id`, counted from 0, while times are not known."""
    return int(FIRST_PREFILL_TOKENS * (1.0 + step_id / GROWTH_STEPS) ** 2)


def _least_ms(decodes: StepWork, times: StepTimes) -> float:
    """Milliseconds that the bound of a step with `decodes` is never below."""
    alone_ms = times.step_ms(decodes) if decodes.tokens else 0.0
    one_row_ms = times.step_ms(StepWork(1, 0, 0, 1, 1))
    return max(LEAST_STEPS * one_row_ms, (1.0 + MIN_GROWTH) * alone_ms)


def shortest_ms(whole: StepWork, times: StepTimes, cost_share: float) -> float:
    """Milliseconds of the smallest part of the step `whole` that takes at most `cost_share` more
    time for its work."""
    most_ms = (1.0 + cost_share) * times.step_ms(whole)
    too_small, enough = 0, _PARTS
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if times.step_ms(_part(whole, middle)) * _PARTS <= most_ms * middle:
            enough = middle
        else:
            too_small = middle
    return times.step_ms(_part(whole, enough))


def _part(whole: StepWork, part: int) -> StepWork:
    """`part` of `_PARTS` of all its work, rounded up."""
    return StepWork(*[-(-count * part // _PARTS) for count in whole])


def _decodes_of(budget: TokenBudget, load: PipelineLoad) -> StepWork:
    """The decodes that the budget allows, of mean length."""
    rows = budget.decodes
    if budget.time is not None and budget.time.decodes is not None:
        rows = min(rows, -(-load.running_decodes // load.pipeline_depth))
    attended = load.decode_attended_tokens * rows // max(1, load.running_decodes)
    return StepWork(rows, rows, attended, 0, rows)


def _with_prefill(decodes: StepWork, num_tokens: int, load: PipelineLoad) -> StepWork:
    """`decodes` and `num_tokens` of the waiting ones, of mean cost."""
    waiting = max(1, load.waiting_tokens)
    num_tokens = min(num_tokens, waiting)
    return decodes._replace(
        tokens=decodes.tokens + num_tokens,
        prefill_attended_tokens=load.waiting_attended_tokens * num_tokens // waiting,
    )
