"""The times of a recorded run beside its compute: decisions, preparation, hops, results, messages.

Read from the moments of its steps, as means over those steps whose moments show them. Means and not
what they take on an idle machine, because where stages share cores with the front, the scheduler
and clients, all of these wait for a core now and then: some steps for a whole time slice of the
kernel's, the more the more tokens are passed on. No share of a core is assumed: a run whose stages
have cores of their own shows short waits.

Decisions and preparation go by the chunks of a step, of which those count that sample, and results
by its samples, to which drafts add their own.
"""

from collections.abc import Sequence

import numpy as np

from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.simulator.pipeline_costs import HostCosts, SimulatedLink

# A wait for a core is a time slice of some 3 ms, seldom several. What is longer than ten of them,
# and than ten times the middle wait, is of a stage that was replaced or stopped: no host's work.
_LONGEST_S, _LONGEST = 0.03, 10.0
# Of fewer waits, a few for a core would be the mean.
_FEWEST = 20
# A slope is used far beyond the steps that show it: of lone requests, which give 1 to 4 tokens, at
# steps of 64. So the rows must differ by more than those, whose standard deviation is about 1, for
# idle steps are unlike busy ones in other ways, too. And by enough, over enough steps, that the
# slope is three times what chance makes of waits like these.
_SPREAD_ROWS = 3.0
_STANDARD_ERRORS = 3.0
# A result's own work ends where the next step is decided; times of one clock are equal up to this.
_EQUAL_S = 1e-6


def fit_host(records: Sequence[StepRecord]) -> tuple[HostCosts, SimulatedLink]:
    """The host's costs and the link between stages, of at least two steps in order.

    What no step shows is taken from the nearest thing that the records have: preparation from the
    stages' own moments, results from the scheduler's, and messages from those on the way back.
    """
    moments = _Moments(records)
    schedule = _line(moments.chunks, moments.schedule_s)
    prepare = _line(*_preparations(moments))
    result = _line(*_results(records))
    back_s = _mean_s(moments.finished_s - moments.done_s[:, -1], otherwise_s=0.0)
    return (
        HostCosts(
            schedule_step_s=schedule[0],
            schedule_chunk_s=schedule[1],
            prepare_step_s=prepare[0],
            prepare_chunk_s=prepare[1],
            result_step_s=result[0],
            result_token_s=result[1],
            transit_s=_order_s(moments, prepare, otherwise_s=back_s) + back_s,
            preparation="early",
        ),
        SimulatedLink(latency_s=_hop_s(moments, otherwise_s=back_s)),
    )


class _Moments:
    """Moments of all steps but the first, in seconds: of the scheduler [steps], of stages [steps,
    stages].
    `free_s` is when the step before had its rows, `order_sent_s` when the order was sent or, if
    that was before, when the first stage had taken it: a stage that wakes up may take the core of
    the scheduler, which is not done with the others' orders."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        chunks = [one.samples - one.draft_tokens for one in records]
        self.chunks = np.array(chunks, dtype=float)[1:]
        self.scheduled_s = np.array([one.scheduled_s for one in records])[1:]
        self.finished_s = np.array([one.finished_s for one in records])[1:]
        stages = [one.stages for one in records]
        done_s = np.array([[timing.done_s for timing in step] for step in stages])
        self.free_s, self.done_s = done_s[:-1], done_s[1:]
        self.plan_s = np.array([[timing.plan_s for timing in step] for step in stages])[1:]
        sent_s = [one.scheduled_s + one.schedule_ms * 1e-3 for one in records]
        self.order_sent_s = np.minimum(sent_s[1:], self.plan_s[:, 0])
        self.schedule_s = self.order_sent_s - self.scheduled_s
        self.inputs_s = np.array([[timing.inputs_s for timing in step] for step in stages])[1:]
        self.start_s = np.array([[timing.activations_s for timing in step] for step in stages])[1:]
        self.rows_sent_s = np.array([[timing.sent_s for timing in step] for step in stages])[1:]


def _preparations(moments: _Moments) -> tuple[np.ndarray, np.ndarray]:
    """Chunks, and seconds from the step before to the inputs, of stages that had the order while
    they computed: rows and results are handed on, the order is taken, inputs are built.

    Where hardly any had, as under light loads: seconds for which stages handed on and built.
    """
    chunks = np.broadcast_to(moments.chunks[:, None], moments.free_s.shape)
    chosen = moments.free_s >= moments.order_sent_s[:, None]
    if chosen.sum() >= _FEWEST:
        return chunks[chosen], (moments.inputs_s - moments.free_s)[chosen]
    built_s = moments.inputs_s - moments.plan_s
    return chunks.ravel(), (moments.rows_sent_s - moments.done_s + built_s).ravel()


def _order_s(moments: _Moments, prepare: tuple[float, float], otherwise_s: float) -> float:
    """Seconds of an order's way to the first stage, which wakes up for it, where that one waited;
    what building inputs takes is known."""
    chosen = moments.free_s[:, 0] <= moments.scheduled_s
    if not chosen.any():
        return otherwise_s
    waits_s = (moments.inputs_s[:, 0] - moments.order_sent_s)[chosen]
    prepare_s = prepare[0] + prepare[1] * moments.chunks[chosen].mean()
    return max(0.0, float(waits_s[_are_usual(waits_s)].mean() - prepare_s))


def _results(records: Sequence[StepRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Samples, and seconds from a result to the decision of the next step, where that one came
    before the result was passed on; where hardly any did: what results took in all."""
    scheduled_s = np.array([record.scheduled_s for record in records])
    finished_s = np.array([record.finished_s for record in records])
    passed_s = np.array([record.result_ms for record in records]) * 1e-3
    samples = np.array([record.samples for record in records], dtype=float)
    nexts = np.searchsorted(scheduled_s, finished_s)
    waits_s = np.append(scheduled_s, np.inf)[nexts] - finished_s
    chosen = waits_s <= passed_s + _EQUAL_S
    if chosen.sum() >= _FEWEST:
        return samples[chosen], waits_s[chosen]
    return samples, passed_s


def _hop_s(moments: _Moments, otherwise_s: float) -> float:
    """Seconds from a stage's rows to the start of the next one, where that one waited for them."""
    before_s, start_s = moments.done_s[:, :-1], moments.start_s[:, 1:]
    chosen = before_s >= moments.inputs_s[:, 1:]
    return _mean_s((start_s - before_s)[chosen], otherwise_s)


def _line(rows: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """The line of least squares over `rows` that has no negative part: base and slope. Flat where
    the rows are too few, or too much the same, to show a slope."""
    usual = _are_usual(seconds)
    rows, usual_s = rows[usual], np.maximum(seconds[usual], 0.0)
    mean_rows, mean_s = rows.mean(), usual_s.mean()
    if len(rows) < _FEWEST or rows.std() < _SPREAD_ROWS:
        return float(mean_s), 0.0
    offsets = rows - mean_rows
    slope = (offsets * usual_s).mean() / rows.var()
    rest_s = usual_s - mean_s - slope * offsets
    error = rest_s.std() / (rows.std() * len(rows) ** 0.5)
    if slope <= _STANDARD_ERRORS * error:
        return float(mean_s), 0.0
    slope = min(slope, mean_s / mean_rows)
    return float(mean_s - slope * mean_rows), float(slope)


def _mean_s(seconds: np.ndarray, otherwise_s: float) -> float:
    """The mean of waits, none of which is negative: moments of a GPU's step overlap those of the
    next one. `otherwise_s` of none."""
    if not len(seconds):
        return otherwise_s
    return float(np.maximum(seconds[_are_usual(seconds)], 0.0).mean())


def _are_usual(seconds: np.ndarray) -> np.ndarray:
    return seconds <= max(_LONGEST_S, _LONGEST * float(np.median(seconds)))
