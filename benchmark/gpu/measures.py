"""Finds a prediction's measured value: columns of a run's tables, and what follows of two.

Used by `predictions.py`. Each `Measure` raises NotRunError where the run has not got its rows.
"""

from collections.abc import Sequence

from benchmark.gpu.prediction_table import Measure


def of_card(column: str) -> Measure:
    """A column of the card's limits."""
    return lambda found: found.number("card", column)


def of_stage(
    column: str, step: str, model: str = "Qwen3-8B", stages: int = 1, stage: int = 0
) -> Measure:
    """A column of the table of lone stages, with graphs."""
    place: dict[str, str | int] = {"model": model, "stages": stages, "stage": stage}
    return lambda found: found.number("stages", column, graphs="auto", step=step, **place)


def of_pipeline(column: str, stages: int, requests: int, extra: int, link: str = "none") -> Measure:
    """A column of the table of 8B's stage processes."""
    place: dict[str, str | int] = {"model": "Qwen3-8B", "stages": stages, "link": link}
    return lambda found: found.number("pipelines", column, requests=requests, extra=extra, **place)


def of_attention(model: str, step: str, kernels: str) -> Measure:
    """Milliseconds of a layer's attention."""
    place: dict[str, str | int] = {"model": model, "step": step, "kernels": kernels}
    return lambda found: found.number("attention", "layer_ms", **place)


def over(one: Measure, other: Measure, factor: float = 1.0) -> Measure:
    """`factor` times the quotient of two."""
    return lambda found: factor * one(found) / other(found)


def less(one: Measure, other: Measure) -> Measure:
    """The difference of two."""
    return lambda found: one(found) - other(found)


def idle_percent(busy: Measure, whole: Measure) -> Measure:
    """The share of `whole` that `busy` leaves."""
    share = over(busy, whole, 100.0)
    return lambda found: 100.0 - share(found)


def slowest(measures: Sequence[Measure]) -> Measure:
    """The largest of several, all of which must have been measured."""
    return lambda found: max(measure(found) for measure in measures)
