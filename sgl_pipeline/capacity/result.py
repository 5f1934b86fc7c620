"""The findings of the command, as a JSON file has them, and as tables for people."""

from collections.abc import Sequence

import msgspec

from sgl_pipeline.capacity.curve import Estimate
from sgl_pipeline.capacity.processor_use import ProcessorUse
from sgl_pipeline.capacity.rate_trial import RateTrial
from sgl_pipeline.goodput import LatencyTarget, goodput
from sgl_pipeline.simulator.summary import Distribution

_HEADER = (
    "   req/s  goodput  in TTFT  in TPOT  TTFT p50/p90/p99 ms      TPOT p50/p90/p99 ms     tok/s  "
    "failed"
)


class RateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rate, over the requests of all rounds; latencies are of those that were served.

    Goodput's parts are the shares of requests within either target, as if it were the only one.
    `processors` is what was taken in all rounds; None where it was not measured.
    """

    rate_per_s: float
    goodput: float
    ttft_share: float
    tpot_share: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    total_tokens_per_s: float
    num_requests: int
    num_failed: int
    processors: ProcessorUse | None = None

    @classmethod
    def of(cls, trial: RateTrial, target: LatencyTarget) -> "RateRow":
        latencies = trial.latencies
        served = [one for one in latencies if one is not None]
        uses = [one.processors for one in trial.rounds if one.processors is not None]
        return cls(
            rate_per_s=trial.rate_per_s,
            goodput=trial.goodput(target),
            ttft_share=goodput(latencies, LatencyTarget(ttft_ms=target.ttft_ms)),
            tpot_share=goodput(latencies, LatencyTarget(tpot_ms=target.tpot_ms)),
            ttft_ms=Distribution.of([one.ttft_ms for one in served]),
            tpot_ms=Distribution.of([one.tpot_ms for one in served if one.tpot_ms is not None]),
            total_tokens_per_s=Distribution.of(
                [each.total_tokens_per_s for each in trial.rounds]
            ).mean,
            num_requests=len(latencies),
            num_failed=len(latencies) - len(served),
            processors=ProcessorUse.total(uses) if uses else None,
        )

    def __str__(self) -> str:
        ttft, tpot = (
            "/".join(f"{getattr(one, name):.{digits}f}" for name in ("p50", "p90", "p99"))
            for one, digits in ((self.ttft_ms, 0), (self.tpot_ms, 1))
        )
        return (
            f"{self.rate_per_s:8.3g} {self.goodput:8.1%} {self.ttft_share:8.1%} "
            f"{self.tpot_share:8.1%}  {ttft:23}  {tpot:20} "
            f"{self.total_tokens_per_s:8.0f} {self.num_failed:7}"
        )


class SideResult(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one side: `predicted`, `predicted at the server's pace` or `measured`. The
    capacity is in requests a second; None where single rates were asked for."""

    side: str
    policy: str
    rates: list[RateRow]
    capacity: Estimate | None = None

    @property
    def name(self) -> str:
        return f"{self.side}, {self.policy}"

    def lines(self) -> list[str]:
        """The report, to print."""
        head = self.name if self.capacity is None else f"{self.name}: {self.capacity} requests/s"
        return ["", head, _HEADER, *map(str, self.rates)]


class PolicyRatio(msgspec.Struct, frozen=True, kw_only=True):
    """`policy` as a multiple of `against` at one rate; None: their capacities."""

    side: str
    policy: str
    against: str
    rate_per_s: float | None
    ratios: dict[str, Estimate]

    def __str__(self) -> str:
        rate = "" if self.rate_per_s is None else f" at {self.rate_per_s:.3g} req/s"
        figures = ", ".join(f"{name} {one}" for name, one in self.ratios.items())
        return f"{self.side}, {self.policy} / {self.against}{rate}: {figures}"


class CapacityResult(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found. `slowness` is how much longer a token of a request that is alone took on
    the server than predicted, `front_ms` what its first token took besides."""

    load: str
    pipeline: str
    ttft_ms: float | None
    tpot_ms: float | None
    needed_share: float
    num_rounds: int
    num_requests: int
    sides: list[SideResult]
    ratios: list[PolicyRatio]
    notes: list[str]
    slowness: float | None = None
    front_ms: float | None = None

    def lines(self) -> list[str]:
        """The report, to print below its heading."""
        lines = [line for side in self.sides for line in side.lines()]
        if self.slowness is not None:
            lines += [
                "",
                f"A request alone takes {self.slowness:.2f} times the predicted time per token on "
                f"this server, and its first token {self.front_ms:.1f} ms besides.",
            ]
        lines += self.notes
        if self.ratios:
            lines += ["", "Ratios, with 95 % intervals from pairs of rounds:"]
            lines += map(str, self.ratios)
        capacities = [side for side in self.sides if side.capacity is not None]
        if capacities:
            lines += ["", f"Highest rate with {self.needed_share:.0%} goodput, 95 % interval:"]
            lines += [
                f"  {side.name}: {side.capacity} requests a second (a round arrives over "
                f"{self.num_requests / side.capacity.value:.3g} s)"
                for side in capacities
                if side.capacity is not None
            ]
        return lines


def rate_rows(trials: Sequence[RateTrial], target: LatencyTarget) -> list[RateRow]:
    """A row for each rate, ascending."""
    return [RateRow.of(trial, target) for trial in trials]
