"""Drafts of requests whose text is made up: right as often as they are said to be.

The scheduler's own `Drafts` asks for them, learns how often they are right and gives them their
rows; only the lookup in the text is replaced.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from sgl_pipeline.draft_runs import LONGEST_RUN, DraftRuns
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.requests import Request


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """The text of a request, as drafts see it. A token can be drafted rightly with `chances[i]` if
    the i tokens before it could be and the one before these could not; the last chance holds for
    longer runs too. Where a run has ended, a lookup finds a draft, right or wrong, with `found`.

    Text repeats itself in runs, so that a chance rises with the run behind it.
    """

    chances: tuple[float, ...]
    found: float = 1.0

    def __post_init__(self) -> None:
        for chance in (*self.chances, self.found):
            if not 0.0 <= chance <= 1.0:
                raise ConfigurationError(f"{chance:g} is not a chance: it must be between 0 and 1")

    def chance(self, run: int) -> float:
        """The chance that the token behind `run` right ones is right."""
        return self.chances[min(run, len(self.chances) - 1)]


NEVER_RIGHT = DraftAcceptance((0.0,), found=0.0)


def acceptance_of(
    texts: Iterable[DraftRuns], alike: DraftAcceptance | None = None
) -> DraftAcceptance:
    """The acceptance of drafts in all of `texts`.

    Args:
        alike: that of more texts like these, which counts as one token more behind each run.
    """
    checked, right = [0.0] * (LONGEST_RUN + 1), [0.0] * (LONGEST_RUN + 1)
    lookups = found = 0.0
    if alike is not None:
        checked, lookups, found = [1.0] * (LONGEST_RUN + 1), 1.0, alike.found
        right = [alike.chance(run) for run in range(LONGEST_RUN + 1)]
    for text in texts:
        lookups += text.lookups
        found += text.found
        checked = [a + b for a, b in zip(checked, text.checked, strict=True)]
        right = [a + b for a, b in zip(right, text.right, strict=True)]
    known = [pair for pair in zip(right, checked, strict=True) if pair[1]]
    return DraftAcceptance(
        tuple(r / n for r, n in known) or (0.0,), found / lookups if lookups else 0.0
    )


class VirtualDrafts:
    """The drafts of `request`, whose output are consecutive ids from `first_id` on.

    Its text depends on the id alone: equal runs have equal drafts.
    """

    def __init__(self, request: Request, first_id: int, acceptance: DraftAcceptance) -> None:
        self._request, self._first_id, self._acceptance = request, first_id, acceptance
        self._random = Random(first_id)
        self._run = 0
        # Of each output token: whether a draft of it is right; None: there is no draft of it.
        self._is_right: list[bool | None] = []

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        """As `scheduling.drafts.DraftSource`."""
        start = len(self._request.output_ids)
        self._draw(start + num_tokens)
        if self._is_right[start] is None:
            return ()
        num_right = 0
        while num_right < num_tokens and self._is_right[start + num_right]:
            num_right += 1
        first = self._first_id + start
        # An id that was drawn already is not drawn again: it is wrong.
        wrong = [first - 1] * (num_tokens - num_right)
        return (*range(first, first + num_right), *wrong)

    def next_token(self, after: Sequence[int]) -> int | None:
        """None: requests of the simulator have no grammar, which alone asks."""
        return None

    def _draw(self, end: int) -> None:
        """Knows of the output tokens up to `end` (exclusive)."""
        acceptance, draw = self._acceptance, self._random.random
        while len(self._is_right) < end:
            if not self._run and draw() >= acceptance.found:
                self._is_right.append(None)
                continue
            is_right = draw() < acceptance.chance(self._run)
            self._is_right.append(is_right)
            self._run = self._run + 1 if is_right else 0
