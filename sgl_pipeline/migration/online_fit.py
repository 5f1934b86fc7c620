"""Fits the costs of a model's parts to the steps that a server runs, if no file has them.

Holds a bounded number of steps; fits when twice as many have been seen as at the last time, so that
a server's life has a dozen fits of a few milliseconds each.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.migration.step_fit import StageSample, fit_stages
from sgl_pipeline.step_work import StepWork

# Until the first fit tenants wait for whole steps of the policy. More steps make fits better, up to
# the number that is kept.
FIRST_FIT_STEPS = 64
# Number of newest steps; noise, not their number, limits the quality of a fit.
_MOST_KEPT_STEPS = 256
# A step that took 1.5 times as long as similar ones was disturbed.
_OUTLIER_SHARE = 0.5


class OnlineFit:
    """All layers count as equal, except for their windows: times of whole stages do not separate
    them.

    Args:
        layer_windows: of each layer of the model, None for one that sees all tokens.
    """

    def __init__(self, layer_windows: Sequence[int | None]) -> None:
        self._layer_windows = tuple(layer_windows)
        self._steps: deque[tuple[StepWork, tuple[int, ...], tuple[float, ...]]] = deque(
            maxlen=_MOST_KEPT_STEPS
        )
        self._num_seen = 0
        self._next_fit = FIRST_FIT_STEPS

    @property
    def is_young(self) -> bool:
        """True while fewer steps have been seen than are kept."""
        return self._num_seen < _MOST_KEPT_STEPS

    def note(
        self, work: StepWork, layer_counts: Sequence[int], stages_ms: Sequence[float]
    ) -> StepCosts | None:
        """One step, stage by stage. Returns new costs when it is time for them."""
        self._steps.append((work, tuple(layer_counts), tuple(stages_ms)))
        self._num_seen += 1
        if self._num_seen < self._next_fit:
            return None
        self._next_fit *= 2
        samples = [sample for step in self._steps for sample in self._stage_samples(*step)]
        return fit_stages(samples, self._layer_windows, _OUTLIER_SHARE)

    def _stage_samples(
        self, work: StepWork, layer_counts: Sequence[int], stages_ms: Sequence[float]
    ) -> Iterator[StageSample]:
        """The first stage, the last one, and those between as one: a fit takes no longer for
        many."""
        last, windows = len(layer_counts) - 1, self._layer_windows
        first_end, last_start = layer_counts[0], len(windows) - layer_counts[-1]
        yield StageSample(work, Counter(windows[:first_end]), True, last == 0, stages_ms[0])
        if last > 1:
            between = Counter(windows[first_end:last_start])
            yield StageSample(work, between, False, False, sum(stages_ms[1:last]))
        if last > 0:
            yield StageSample(work, Counter(windows[last_start:]), False, True, stages_ms[last])
