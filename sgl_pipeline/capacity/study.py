"""The questions to each side and their answers: capacities, and policies beside each other."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sgl_pipeline.capacity.curve import capacity, capacity_ratio, trial_ratios
from sgl_pipeline.capacity.rate_trial import RateTrial, Round, Serve
from sgl_pipeline.capacity.result import PolicyRatio, SideResult, rate_rows
from sgl_pipeline.capacity.search import search_rates
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import LatencyTarget, goodput

# Times the first policy's capacity: where policies are compared unless rates are named.
_COMPARED = (0.8, 1.0, 1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The share of requests that must be within the target, and the rounds at each rate."""

    target: LatencyTarget
    needed_share: float
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One who serves the load. A search begins at `guess_per_s` and takes steps of `factor`."""

    name: str
    guess_per_s: float
    factor: float
    tolerance: float


@dataclass(slots=True)
class Study:
    """The findings so far; a line on standard error for each trial."""

    question: Question
    sides: list[SideResult] = field(default_factory=list)
    ratios: list[PolicyRatio] = field(default_factory=list)
    # Of predictions that a measurement went on without, and why.
    notes: list[str] = field(default_factory=list)

    def require_alone(self, alone: Round, side: str) -> None:
        """Raises ConfigurationError where not even requests that are served alone, those of
        `alone`, are within the targets."""
        target, needed = self.question.target, self.question.needed_share
        if goodput(alone.latencies, target) >= needed:
            return
        served = [one for one in alone.latencies if one is not None]
        ttfts_ms = [one.ttft_ms for one in served]
        tpots_ms = [one.tpot_ms for one in served if one.tpot_ms is not None]
        raise ConfigurationError(
            f"no rate holds these targets: {side}, a request that is alone gets its first token "
            f"after {_best(ttfts_ms, needed)} and each further one after {_best(tpots_ms, needed)}"
        )

    def require_fillable(self, burst: Round, side: str) -> None:
        """Raises ConfigurationError where a round's requests are all within the targets even if
        they come at once."""
        if goodput(burst.latencies, self.question.target) >= self.question.needed_share:
            raise ConfigurationError(
                f"{side}, all {len(burst.latencies)} requests may come at once and are within the "
                "targets: the load is too short to have a rate; use more --requests"
            )

    def find_capacity(self, side: Side, policy: str, serve: Serve) -> list[RateTrial]:
        """Searches the capacity, and notes it. Raises ConfigurationError as `search_rates`."""
        question = self.question
        trials = search_rates(
            serve,
            question.target,
            question.needed_share,
            num_rounds=question.num_rounds,
            guess_per_s=side.guess_per_s,
            factor=side.factor,
            tolerance=side.tolerance,
            on_trial=lambda trial: self._say(side.name, policy, trial),
        )
        found = capacity(trials, question.target, question.needed_share)
        rows = rate_rows(trials, question.target)
        self.sides.append(SideResult(side=side.name, policy=policy, rates=rows, capacity=found))
        return trials

    def capacity_of(self, side: str, policy: str) -> float | None:
        """The one that was found, in requests a second; None where none was."""
        for one in self.sides:
            if (one.side, one.policy) == (side, policy) and one.capacity is not None:
                return one.capacity.value
        return None

    def compare_capacities(self, side: str, trials: Mapping[str, Sequence[RateTrial]]) -> None:
        """Notes each policy's capacity as a multiple of the first one's."""
        (first, base), *others = trials.items()
        for policy, own in others:
            ratio = capacity_ratio(own, base, self.question.target, self.question.needed_share)
            self.ratios.append(
                PolicyRatio(
                    side=side,
                    policy=policy,
                    against=first,
                    rate_per_s=None,
                    ratios={"capacity": ratio},
                )
            )

    def compare_at(
        self,
        side: str,
        policies: Sequence[str],
        rates_per_s: Sequence[float],
        serve: Callable[[str, float, int], Round],
    ) -> None:
        """Serves the load under all policies at each rate, and notes the ratios to the first one.
        Policies take turns within a round, in an order that turns around from round to round."""
        target = self.question.target
        found: dict[str, list[RateTrial]] = {policy: [] for policy in policies}
        for rate_per_s in rates_per_s:
            rounds: dict[str, list[Round]] = {policy: [] for policy in policies}
            for number in range(self.question.num_rounds):
                for policy in policies if number % 2 == 0 else reversed(policies):
                    rounds[policy].append(serve(policy, rate_per_s, number))
            for policy in policies:
                found[policy].append(RateTrial(rate_per_s, tuple(rounds[policy])))
                self._say(side, policy, found[policy][-1])
        for policy in policies:
            rows = rate_rows(found[policy], target)
            self.sides.append(SideResult(side=side, policy=policy, rates=rows))
        first = policies[0]
        for policy in policies[1:]:
            for own, base in zip(found[policy], found[first], strict=True):
                self.ratios.append(
                    PolicyRatio(
                        side=side,
                        policy=policy,
                        against=first,
                        rate_per_s=own.rate_per_s,
                        ratios=trial_ratios(own, base, target),
                    )
                )

    def _say(self, side: str, policy: str, trial: RateTrial) -> None:
        share = trial.goodput(self.question.target)
        print(f"{side}, {policy}: {trial.rate_per_s:.3g} req/s: {share:.1%}", file=sys.stderr)


def compared_rates(capacity_per_s: float) -> list[float]:
    """The rates at which policies are compared, by the first one's capacity."""
    return [float(f"{share * capacity_per_s:.3g}") for share in _COMPARED]


def _best(values_ms: Sequence[float], share: float) -> str:
    if not values_ms:
        return "no time known"
    if math.isclose(share, 1.0):
        return f"{min(values_ms):.1f} to {max(values_ms):.1f} ms"
    most = float(np.percentile(values_ms, 100.0 * share))
    return f"{min(values_ms):.1f} ms at best, and {share:.0%} of them within {most:.1f} ms"
