"""The search of both tuners: one knob after the other, each time from the best so far.

What a policy carries is not convex in its knobs, so the result is the best of what was tried.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.errors import ConfigurationError

Score = TypeVar("Score")


@dataclass(frozen=True, slots=True)
class Trial(Generic[Score]):
    """Parameters that were tried, and what came of them."""

    throttle: ThrottleArgs
    score: Score


def climb(
    best: Trial[Score],
    values: Mapping[str, Iterable[float]],
    measure: Callable[[ThrottleArgs, Score], Score | None],
    is_better: Callable[[Score, Score], bool],
) -> Iterator[Trial[Score]]:
    """Every trial as soon as it is done.

    Args:
        best: where the search starts.
        values: of each parameter those to try, in this order. Values that do not go with the others
            are left out.
        measure: gets the parameters and the best score so far; None leaves them out.
        is_better: whether the first score is better than the second.
    """
    for name, candidates in values.items():
        for value in candidates:
            try:
                throttle = replace(best.throttle, **{name: value})  # type: ignore[arg-type]
            except ConfigurationError:
                continue
            if throttle == best.throttle:
                continue
            score = measure(throttle, best.score)
            if score is None:
                continue
            trial = Trial(throttle, score)
            yield trial
            if is_better(score, best.score):
                best = trial
