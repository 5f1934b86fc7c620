"""Counts the draft tokens that known outputs would have accepted; no model runs.

A token is a function of its request, so an output is the same with drafts, and a draft token counts
where it is the output's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from sgl_pipeline.requests import GREEDY, Request, StopRules
from sgl_pipeline.scheduling.ngram_drafts import NgramIndex, NgramRange
from sgl_pipeline.step_work import StepTimes, StepWork
from sgl_pipeline.throttle.draft_budget import Acceptance, draft_budget

_CAPACITY = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """The token ids of a prompt and of its greedy output."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step with `drafted` draft tokens, of which the first `accepted` were right."""

    drafted: int
    accepted: int


# Given the acceptance so far, the number of draft tokens of the next step.
Budget = Callable[[Acceptance], int]


def fixed_budget(num_drafts: int) -> Budget:
    """The same number in every step."""
    return lambda acceptance: num_drafts


def budget_of_one(times: StepTimes, most_each: int) -> Budget:
    """The budget of a request that decodes alone."""
    work = StepWork(1, 1, 1, 0, 1)
    return lambda acceptance: draft_budget(
        times, work, [[acceptance.chance] * most_each], is_alone=True
    )[0]


def drafted_steps(answer: Answer, lengths: NgramRange, budget: Budget) -> Iterator[DraftedStep]:
    """The steps of the answer's output after its first token, which the prompt's step draws."""
    stops = StopRules(max_new_tokens=len(answer.output_ids))
    request = Request("replay", [*answer.prompt_ids], GREEDY, stops)
    index = NgramIndex(request, lengths, _CAPACITY)
    acceptance = Acceptance()
    request.output_ids.append(answer.output_ids[0])
    while left := answer.output_ids[len(request.output_ids) :]:
        # The step's own token comes behind the drafts.
        draft = index.draft(min(budget(acceptance), len(left) - 1))
        accepted = num_equal(draft, left)
        request.output_ids += left[: accepted + 1]
        acceptance = acceptance.after(len(draft), accepted)
        yield DraftedStep(len(draft), accepted)


def num_equal(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(draft, tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def tokens_per_step(steps: Sequence[DraftedStep]) -> float:
    """Mean number of tokens that a step gives."""
    return 1.0 + sum(step.accepted for step in steps) / len(steps)


def speed_up(steps: Sequence[DraftedStep], relative_times: Mapping[int, float]) -> float:
    """The time of as many steps of one row as there are tokens, over that of `steps`.

    Args:
        relative_times: of steps with that many rows, 1.0 for one row.
    """
    num_tokens = sum(1 + step.accepted for step in steps)
    return num_tokens / sum(relative_times[1 + step.drafted] for step in steps)
