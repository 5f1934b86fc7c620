"""Proposes knobs that would have served the last minutes better, for `POST /pipeline/tune`.

Every trial serves the whole window. The search ends when its time is over; the answer says how much
was tried.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import msgspec

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import LatencyTarget, RequestLatency
from sgl_pipeline.pipeline.recent_load import RecentWork
from sgl_pipeline.records.throttle_change import Knob
from sgl_pipeline.simulator.climb import Trial, climb
from sgl_pipeline.simulator.past_load import PastLoad
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import Distribution, latency, summarize
from sgl_pipeline.throttle import POLICY_TABLE

# Values that are tried of each knob that the policy reads, in this order: of a running server more
# and smaller ones than `PolicyEntry.searched` has, and then only those in the knobs' ranges.
VALUES: Mapping[str, tuple[float, ...]] = {
    "max_prefill_tokens": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "prefill_spread_steps": (1, 2, 4, 8, 16, 32),
    "ttft_weight": (0.25, 1.0, 4.0, 16.0),
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
    """A task of the search: the work, the latencies wanted, the policies to try, and the time."""

    work: RecentWork
    ttft_ms: float
    tpot_ms: float
    policies: tuple[str, ...]
    timeout_s: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The service of a window. `target_share` of its requests meet both latencies; `lateness` is
    the mean over requests of the worse of the two, as a multiple of the target."""

    target_share: float
    lateness: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    output_tokens_per_s: float


class KnobProposal(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a task. `knobs` are those to change, none where no trial was better.
    `is_complete`: everything was tried before the time was over. `is_extrapolated`: steps are
    larger than any that was measured. `step_time_errors[s]` is the mean error of stage `s`'s fitted
    step times, `slowdown` their common factor with which the window takes as long in all as it
    did."""

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
        in_force = self.load.in_force
        self.now = self.best = Trial(in_force, self._try(in_force))
        self.largest_step = self._largest_step  # of the best trial
        self._limit_s = self._began_s + task.timeout_s

    @property
    def seconds(self) -> float:
        return self._clock() - self._began_s

    @property
    def knobs(self) -> dict[str, Knob]:
        """The knobs to change, with their values in the best trial."""
        in_force = self._task.work.knobs
        best = asdict(self.best.throttle)
        return {name: value for name, value in best.items() if value != in_force[name]}

    def run(self) -> bool:
        """Runs the search; returns whether it tried everything in time."""
        try:
            for policy in self._task.policies:
                self._search_policy(policy)
            self._drop_what_does_not_help()
        except _TimeIsOverError:
            return False
        return True

    def _drop_what_does_not_help(self) -> None:
        """Sets each knob of the best back for itself, and leaves it so where that costs nothing."""
        if self.best.throttle.policy != self.now.throttle.policy:
            return
        for name in self.knobs:
            try:
                throttle = replace(self.best.throttle, **{name: self._task.work.knobs[name]})  # type: ignore[arg-type]
            except ConfigurationError:
                continue
            found = self._consider(throttle)
            if found is not None and not _is_better(self.best.score, found):
                self.best, self.largest_step = Trial(throttle, found), self._largest_step

    def _search_policy(self, policy: str) -> None:
        """Climbs until no knob helps.

        From the knobs in force or from those of the policy's authors: where two knobs hold each
        other, turning one alone changes nothing.
        """
        authors = ThrottleArgs(policy=policy)
        limit = max(authors.min_prefill_tokens, min(authors.prefill_limit, self._most_tokens))
        start = replace(authors, max_prefill_tokens=limit)
        found = self._consider(start)
        best = None if found is None else Trial(start, found)
        is_in_force = policy == self.now.throttle.policy
        if is_in_force and (best is None or not _is_better(best.score, self.now.score)):
            best = self.now
        if best is None:
            return
        for _ in range(MAX_PASSES):
            before = best
            for trial in climb(before, self._values(before.throttle), self._measure, _is_better):
                if _is_better(trial.score, best.score):
                    best = trial
            if best is before:
                return

    def _values(self, throttle: ThrottleArgs) -> Mapping[str, Sequence[float]]:
        """The values to try of each knob: those in its range, without the present one."""
        values = {}
        for name in (one for one in VALUES if one in POLICY_TABLE[throttle.policy].searched):
            low, high = self._task.work.ranges[name]
            assert isinstance(low, int | float) and isinstance(high, int | float)
            if name == "max_prefill_tokens":
                high = min(high, self._most_tokens)
            now = getattr(throttle, name)
            values[name] = [one for one in VALUES[name] if one != now and low <= one <= high]
        return values

    def _measure(self, throttle: ThrottleArgs, _: Prediction) -> Prediction | None:
        return self._consider(throttle)

    def _consider(self, throttle: ThrottleArgs) -> Prediction | None:
        """Tries `throttle`; None where its steps are larger than the stages have memory for."""
        most = self._task.work.ranges["max_prefill_tokens"][1]
        assert isinstance(most, int | float)
        if throttle.prefill_limit > most:
            return None
        found = self._try(throttle)
        if _is_better(found, self.best.score):
            self.best, self.largest_step = Trial(throttle, found), self._largest_step
        return found

    def _try(self, throttle: ThrottleArgs) -> Prediction:
        def check_time(_: int, now_s: float) -> None:
            if self._clock() > self._limit_s:
                raise _TimeIsOverError

        simulation = self.load.run(throttle, check_time)
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
    knobs = search.knobs
    return KnobProposal(
        knobs=knobs,
        now=search.now.score,
        proposed=search.best.score if knobs else None,
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
    """Sums a simulation up against the wanted latencies."""
    summary = summarize(simulation, target)
    latencies = [latency(served) for served in simulation.requests]
    late = [_lateness(one, target) for one in latencies if one is not None]
    assert summary.target_share is not None
    return Prediction(
        target_share=summary.target_share,
        lateness=sum(late) / len(late) if late else float("inf"),
        ttft_ms=summary.ttft_ms,
        tpot_ms=summary.tpot_ms,
        output_tokens_per_s=summary.output_tokens_per_s,
    )


def _lateness(latency: RequestLatency, target: LatencyTarget) -> float:
    late = latency.ttft_ms / target.ttft_ms
    return late if latency.tpot_ms is None else max(late, latency.tpot_ms / target.tpot_ms)


def _is_better(one: Prediction, other: Prediction) -> bool:
    """More requests meet the target, or as many and all are less late."""
    gain = one.target_share - other.target_share
    if abs(gain) >= LEAST_SHARE_GAIN:
        return gain > 0.0
    return one.lateness < other.lateness * (1.0 - LEAST_LATENESS_GAIN)
