"""Which knobs would have served the last minutes better: `POST /pipeline/tune` asks.

One knob is varied at a time, from those in force on, and every trial serves the whole window; so
the result is the best of what was tried, and says how much that was. Never longer than it may take.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace

import msgspec

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pipeline.recent_load import RecentWork
from sgl_pipeline.records.throttle_change import Knob
from sgl_pipeline.simulator.past_load import PastLoad, throttle_of
from sgl_pipeline.simulator.simulation import ServedRequest, Simulation
from sgl_pipeline.simulator.summary import Distribution, LatencyTarget, summarize, tpot_ms, ttft_ms
from sgl_pipeline.simulator.tune import SEARCH_SPACE

# Values that are tried of each knob that the policy reads, in this order.
VALUES: Mapping[str, tuple[Knob, ...]] = {
    "max_prefill_tokens": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "prefill_spread_steps": (1, 2, 4, 8, 16, 32),
    "pause_free_share": (0.0, 0.05, 0.1, 0.2),
}
# Less than this is no reason to change anything: a share of all requests, and of the mean lateness.
LEAST_SHARE_GAIN = 0.01
LEAST_LATENESS_GAIN = 0.05
MAX_PASSES = 3
# Times the largest step that was measured: beyond the first a prediction is marked as a guess,
# beyond the second nothing is tried. What is proposed can be set, and tuned again.
EXTRAPOLATION = 2.0
MOST_EXTRAPOLATION = 4.0


class TuneTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to propose for: the work, the latencies wanted, the policies to try, and the time."""

    work: RecentWork
    ttft_ms: float
    tpot_ms: float
    policies: tuple[str, ...]
    timeout_s: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How a window is served. `target_share` of its requests meet both latencies; `lateness` is the
    mean over requests of the worse of the two over what is wanted."""

    target_share: float
    lateness: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    output_tokens_per_s: float


class KnobProposal(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a task. `knobs` are those to change, none where nothing that was tried is
    better. `is_complete`: everything was tried before the time was over. `is_extrapolated`: steps
    are larger than any that was measured. `step_time_errors[s]`: the mean error of stage `s`'s
    fitted step times, `slowdown` what these are multiplied by so that the window takes as long in
    all as it did."""

    knobs: dict[str, Knob]
    now: Prediction
    proposed: Prediction | None
    num_requests: int
    num_steps: int
    num_trials: int
    is_complete: bool
    is_extrapolated: bool
    step_time_errors: tuple[float, ...]
    slowdown: float
    seconds: float


class _TimeIsOverError(Exception):
    """The task has taken as long as it may."""


class _Search:
    """The trials of one task, and the best of them."""

    def __init__(self, task: TuneTask, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._task = task
        self._target = LatencyTarget(ttft_ms=task.ttft_ms, tpot_ms=task.tpot_ms)
        self.load = PastLoad.of(task.work)
        self._most_tokens = int(MOST_EXTRAPOLATION * self.load.largest_step)
        self.num_trials = 0
        self._largest_step = 0  # of the last trial
        self._limit_s = float("inf")
        # The knobs in force are tried however long that takes: without them there is no answer.
        self.now = self.best = self._try(task.work.knobs)
        self.best_knobs = dict(task.work.knobs)
        self.largest_step = self._largest_step  # of the best trial
        self._limit_s = self._began_s + task.timeout_s

    @property
    def seconds(self) -> float:
        return self._clock() - self._began_s

    def run(self) -> bool:
        """Whether everything was tried in time."""
        try:
            for policy in self._task.policies:
                self._search_policy(policy)
            self._drop_what_does_not_help()
        except _TimeIsOverError:
            return False
        return True

    def _drop_what_does_not_help(self) -> None:
        """Sets each knob of the best back for itself, and leaves it so where that costs nothing."""
        in_force = self._task.work.knobs
        if self.best_knobs["policy"] != in_force["policy"]:
            return
        for name in [one for one, value in self.best_knobs.items() if value != in_force[one]]:
            knobs = self.best_knobs | {name: in_force[name]}
            found = self._consider(knobs)
            if found is not None and not _is_better(self.best, found):
                self.best, self.best_knobs = found, knobs
                self.largest_step = self._largest_step

    def _search_policy(self, policy: str) -> None:
        """Varies one knob after the other, each time from the best so far, until none helps.

        From the knobs in force or from those of the policy's authors: where two knobs hold each
        other, turning one alone changes nothing.
        """
        in_force = self._task.work.knobs
        authors = ThrottleArgs(policy=policy)
        limit = max(authors.min_prefill_tokens, min(authors.prefill_limit, self._most_tokens))
        knobs = asdict(replace(authors, max_prefill_tokens=limit))
        knobs["accounting"] = in_force["accounting"]
        best = self._consider(knobs)
        if policy == in_force["policy"] and (best is None or not _is_better(best, self.now)):
            knobs, best = dict(in_force), self.now
        if best is None:
            return
        for _ in range(MAX_PASSES):
            before = knobs
            for name in (one for one in VALUES if one in SEARCH_SPACE[policy]):
                for trial in self._variants(knobs, name):
                    found = self._consider(trial)
                    if found is not None and _is_better(found, best):
                        knobs, best = trial, found
            if knobs == before:
                return

    def _variants(self, knobs: Mapping[str, Knob], name: str) -> Iterator[dict[str, Knob]]:
        low, high = self._task.work.ranges[name]
        assert isinstance(low, int | float) and isinstance(high, int | float)
        for value in VALUES[name]:
            assert isinstance(value, int | float)
            if name == "max_prefill_tokens" and value > self._most_tokens:
                return
            if value != knobs[name] and low <= value <= high:
                yield dict(knobs) | {name: value}

    def _consider(self, knobs: dict[str, Knob]) -> Prediction | None:
        """Tries `knobs`; None for those that do not go together."""
        try:
            limit = throttle_of(knobs).prefill_limit
        except ConfigurationError:
            return None
        most = self._task.work.ranges["max_prefill_tokens"][1]
        assert isinstance(most, int | float)
        if limit > most:
            return None
        found = self._try(knobs)
        if _is_better(found, self.best):
            self.best, self.best_knobs = found, knobs
            self.largest_step = self._largest_step
        return found

    def _try(self, knobs: Mapping[str, Knob]) -> Prediction:
        def check_time(_: int, now_s: float) -> None:
            if self._clock() > self._limit_s:
                raise _TimeIsOverError

        simulation = self.load.run(knobs, check_time)
        self.num_trials += 1
        # The first step only fills the cache.
        self._largest_step = max(step.shape.num_tokens for step in simulation.steps[1:])
        return predict(simulation, self._target)


def propose(task: TuneTask, clock: Callable[[], float] = time.monotonic) -> KnobProposal:
    """The best knobs that can be found in the task's time.

    Raises ConfigurationError where too few steps were measured.
    """
    search = _Search(task, clock)
    is_complete = search.run()
    knobs = {
        name: value for name, value in search.best_knobs.items() if value != task.work.knobs[name]
    }
    return KnobProposal(
        knobs=knobs,
        now=search.now,
        proposed=search.best if knobs else None,
        num_requests=len(search.load.requests) - 1,
        num_steps=len(task.work.steps),
        num_trials=search.num_trials,
        is_complete=is_complete,
        is_extrapolated=search.largest_step > EXTRAPOLATION * search.load.largest_step,
        step_time_errors=search.load.costs.errors,
        slowdown=search.load.slowdown,
        seconds=search.seconds,
    )


def predict(simulation: Simulation, target: LatencyTarget) -> Prediction:
    """What a simulation amounts to, beside what is wanted."""
    summary = summarize(simulation, target)
    late = [_lateness(served, target) for served in simulation.requests if served.token_times_s]
    assert summary.target_share is not None
    return Prediction(
        target_share=summary.target_share,
        lateness=sum(late) / len(late) if late else float("inf"),
        ttft_ms=summary.ttft_ms,
        tpot_ms=summary.tpot_ms,
        output_tokens_per_s=summary.output_tokens_per_s,
    )


def _lateness(served: ServedRequest, target: LatencyTarget) -> float:
    late = ttft_ms(served) / target.ttft_ms
    if len(served.token_times_s) > 1:
        late = max(late, tpot_ms(served) / target.tpot_ms)
    return late


def _is_better(one: Prediction, other: Prediction) -> bool:
    """More requests meet the target, or as many and all are less late."""
    gain = one.target_share - other.target_share
    if abs(gain) >= LEAST_SHARE_GAIN:
        return gain > 0.0
    return one.lateness < other.lateness * (1.0 - LEAST_LATENESS_GAIN)
