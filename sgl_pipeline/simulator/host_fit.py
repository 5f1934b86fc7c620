"""The times of a recorded run beside its compute: orders, preparation, hops, results.

Read from the moments of its steps, as means over those steps whose moments show them, by the tokens
that the step gives (its samples). Means and not what they take on an idle machine, because where
stages share cores with the front, the scheduler and clients, all of these wait for a core now and
then: some steps for a whole time slice of the kernel's, the more the more tokens are passed on. No
share of a core is assumed: a run whose stages have cores of their own shows short waits.
"""

from collections.abc import Sequence

import numpy as np

from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.simulator.pipeline_costs import HostCosts, SimulatedLink

# Longer waits than this percentile count as that one: a stage that was replaced is no host's work.
_MOST = 99
# A result's own work ends where the next step is decided; times of one clock are equal up to this.
_EQUAL_S = 1e-6


def fit_host(records: Sequence[StepRecord]) -> tuple[HostCosts, SimulatedLink]:
    """The host's costs and the link between stages, of at least two steps in order."""
    moments = _Moments(records)
    samples = np.array([record.samples for record in records], dtype=float)[1:]
    prepare = _line(*_busy(moments, samples))
    order = _line(*_idle(moments, samples, prepare))
    result = _line(*_results(records))
    return (
        HostCosts(
            schedule_step_s=order[0],
            schedule_chunk_s=order[1],
            prepare_step_s=prepare[0],
            prepare_chunk_s=prepare[1],
            result_step_s=result[0],
            result_token_s=result[1],
            transit_s=_mean_s(moments.finished_s - moments.done_s[:, -1]),
            preparation="early",
        ),
        SimulatedLink(latency_s=_hop_s(moments)),
    )


class _Moments:
    """Of all steps but the first, in seconds: of the scheduler [steps], of stages [steps, stages].
    `free_s` is when the step before had its rows."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self.scheduled_s = np.array([one.scheduled_s for one in records])[1:]
        self.sent_s = self.scheduled_s + np.array([one.schedule_ms for one in records])[1:] * 1e-3
        self.finished_s = np.array([one.finished_s for one in records])[1:]
        stages = [one.stages for one in records]
        done_s = np.array([[timing.done_s for timing in step] for step in stages])
        self.free_s, self.done_s = done_s[:-1], done_s[1:]
        self.inputs_s = np.array([[timing.inputs_s for timing in step] for step in stages])[1:]
        self.start_s = np.array([[timing.activations_s for timing in step] for step in stages])[1:]


def _busy(moments: _Moments, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples, and seconds from the step before to the inputs, of stages that had the order while
    they computed: rows and results are handed on, the order is taken, inputs are built."""
    chosen = moments.free_s >= moments.sent_s[:, None]
    waits_s = moments.inputs_s - moments.free_s
    return np.broadcast_to(samples[:, None], chosen.shape)[chosen], waits_s[chosen]


def _idle(
    moments: _Moments, samples: np.ndarray, prepare: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Samples, and seconds from a step's decision to its order on the first stage, where that one
    waited for it; what building inputs takes is known."""
    chosen = moments.free_s[:, 0] <= moments.scheduled_s
    waits_s = moments.inputs_s[:, 0] - moments.scheduled_s - (prepare[0] + prepare[1] * samples)
    return samples[chosen], waits_s[chosen]


def _results(records: Sequence[StepRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Samples, and seconds from a result to the decision of the next step, where that one came
    before the result was passed on."""
    scheduled_s = np.array([record.scheduled_s for record in records])
    finished_s = np.array([record.finished_s for record in records])
    passed_s = np.array([record.result_ms for record in records]) * 1e-3
    samples = np.array([record.samples for record in records], dtype=float)
    nexts = np.searchsorted(scheduled_s, finished_s)
    waits_s = np.append(scheduled_s, np.inf)[nexts] - finished_s
    chosen = waits_s <= passed_s + _EQUAL_S
    return samples[chosen], waits_s[chosen]


def _hop_s(moments: _Moments) -> float:
    """Seconds from a stage's rows to the start of the next one, where that one waited for them."""
    before_s, start_s = moments.done_s[:, :-1], moments.start_s[:, 1:]
    chosen = before_s >= moments.inputs_s[:, 1:]
    return _mean_s((start_s - before_s)[chosen])


def _line(rows: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """The line of least squares over `rows` that has no negative part: base and slope, both zero
    where no step showed any."""
    if not len(rows):
        return 0.0, 0.0
    usual_s = _usual_s(seconds)
    mean_rows, mean_s = rows.mean(), usual_s.mean()
    spread = ((rows - mean_rows) ** 2).sum()
    slope = ((rows - mean_rows) * (usual_s - mean_s)).sum() / spread if spread > 0.0 else 0.0
    slope = min(max(0.0, slope), mean_s / mean_rows if mean_rows > 0.0 else 0.0)
    return float(mean_s - slope * mean_rows), float(slope)


def _mean_s(seconds: np.ndarray) -> float:
    return float(_usual_s(seconds).mean()) if len(seconds) else 0.0


def _usual_s(seconds: np.ndarray) -> np.ndarray:
    """Without what is no wait (moments of a GPU's step overlap those of the next one) and what is
    longer than `_MOST`."""
    return np.clip(seconds, 0.0, max(0.0, float(np.percentile(seconds, _MOST))))
