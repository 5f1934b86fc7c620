"""Shares out draft tokens among a step's decodes, by the time that they take and by the chance that
they are right.

A draft token is a row more in its step. Rows are nearly free while a step takes the time of reading
the weights, and cost as much as any other row where many requests decode: then there are no drafts.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.step_work import StepTimes, StepWork

# A step may take this much longer for its drafts where other requests wait for it.
MOST_EXTRA_TIME = 0.1
# Rows of a step that a decision looks at.
MOST_ROWS = 16
# Drafts must gain this many times what they cost: a forecast errs, and looking them up takes time.
LEAST_GAIN = 2.0
# Rows of a step while its time cannot be predicted. On CPUs four take at most 6 % more than one.
ROWS_UNTIMED = 4

# Of what was seen before a step with drafts, and one without. A trial costs a step of many requests
# more than its forecast says where one row more begins a tile of rows: trials must be rare.
_KEPT, _KEPT_IDLE = 0.9, 0.99
_PRIOR_WEIGHT = 2.0


class Acceptance(NamedTuple):
    """The draft tokens of a request that were `checked`, and those that were `right`: sums in which
    a step counts a tenth less with every later one that had drafts, and a hundredth less with one
    that had none. `prior_chance` is the chance before any."""

    checked: float = 0.0
    right: float = 0.0
    prior_chance: float = 0.5

    @property
    def chance(self) -> float:
        """Expected chance that the next draft token is right, if those before it are."""
        return (self.right + self.prior_chance * _PRIOR_WEIGHT) / (self.checked + _PRIOR_WEIGHT)

    def after(self, drafted: int, right: int) -> "Acceptance":
        """After a step with `drafted` draft tokens, of which the first `right` were right. What
        follows a wrong one was not checked. A request without drafts is slowly forgotten, so that
        it gets another trial."""
        kept = _KEPT if drafted else _KEPT_IDLE
        checked = min(drafted, right + 1)
        return self._replace(checked=kept * self.checked + checked, right=kept * self.right + right)


def may_draft(load: PipelineLoad, budget: TokenBudget) -> bool:
    """True if nothing has a better use for the time of more rows: no prompt waits, or for its pages
    from a store, and memory is not short."""
    return not load.waiting_tokens and not load.loading_tokens and budget.bound_by != "pause"


def least_chance(times: StepTimes | None, work: StepWork, *, is_alone: bool) -> float:
    """The chance from which on one draft token is worth its row in the step `work`, which has only
    decodes; infinite where none is. `is_alone` as for `draft_budget`."""
    if times is None:
        return 0.0 if work.decodes < ROWS_UNTIMED else math.inf
    step_ms = times.step_ms(work)
    extra_ms = times.step_ms(_with_drafts(work, 1)) - step_ms
    if extra_ms > MOST_EXTRA_TIME * step_ms and not is_alone:
        return math.inf
    return LEAST_GAIN * work.decodes * extra_ms / step_ms


def draft_budget(
    times: StepTimes | None,
    work: StepWork,
    chances: Sequence[Sequence[float]],
    *,
    is_alone: bool,
) -> tuple[int, ...]:
    """The number of draft tokens of each decode of the step `work`, which has only decodes.

    Rows go where they are most likely to be right, and there are as many as give the most tokens in
    a time, if those gain enough.

    Args:
        chances: for each decode, those of its draft tokens: that each is right, if those before it
            are.
        is_alone: no other request runs, so that a longer step delays no other.
    """
    places = list(islice(_likeliest_first(chances), MOST_ROWS))
    if times is None:
        num_rows = min(len(places), max(0, ROWS_UNTIMED - work.decodes))
    else:
        num_rows = _best_num_rows(times, work, [chance for chance, _ in places], is_alone)
    counts = [0] * len(chances)
    for _, index in places[:num_rows]:
        counts[index] += 1
    return tuple(counts)


def _likeliest_first(chances: Sequence[Sequence[float]]) -> Iterator[tuple[float, int]]:
    """The chance that a draft token is right, those before it included, and its decode."""
    heap = [(-of_draft[0], index, 1) for index, of_draft in enumerate(chances) if of_draft]
    heapq.heapify(heap)
    while heap:
        chance, index, place = heap[0]
        yield -chance, index
        if place < len(chances[index]):
            heapq.heapreplace(heap, (chance * chances[index][place], index, place + 1))
        else:
            heapq.heappop(heap)


def _best_num_rows(
    times: StepTimes, work: StepWork, chances: Sequence[float], is_alone: bool
) -> int:
    """The number of the draft tokens with `chances` that gives the most tokens in a time."""
    first_ms, expected_tokens = times.step_ms(work), float(work.decodes)
    most_ms = math.inf if is_alone else (1.0 + MOST_EXTRA_TIME) * first_ms
    best_num_rows, best_rate = 0, expected_tokens / first_ms
    for num_rows, chance in enumerate(chances, start=1):
        step_ms = times.step_ms(_with_drafts(work, num_rows))
        if step_ms > most_ms:
            break
        expected_tokens += chance
        gain = expected_tokens / work.decodes - 1.0
        pays = gain >= LEAST_GAIN * (step_ms / first_ms - 1.0)
        if pays and expected_tokens / step_ms > best_rate:
            best_num_rows, best_rate = num_rows, expected_tokens / step_ms
    return best_num_rows


def _with_drafts(work: StepWork, num_rows: int) -> StepWork:
    """The step with that many draft tokens, of decodes of mean length. They read the keys of their
    decode together with it, as the rows of a prompt do."""
    attended = num_rows * work.decode_attended_tokens // work.decodes
    return work._replace(
        tokens=work.tokens + num_rows,
        prefill_attended_tokens=work.prefill_attended_tokens + attended,
        samples=work.samples + num_rows,
    )
