"""Tables of `policies.py`: for each load the best policy by each measure, how far the default is
from it, and which policies beat the default.

    python -m benchmark.serving.policies_report benchmark/results/2026-11-27_0913_policies.json

As a command it prints the tables of the rounds in all these records together.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from benchmark.forecasts.grid_report import SLACK, TOLERANCE
from benchmark.support.command import Command, Options, Report
from benchmark.support.dated_result import markdown_table, read_record
from benchmark.support.serving_report import METRICS, Run, comparison_table
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import LatencyTarget, goodput

DEFAULT_POLICY = ThrottleArgs().policy
# Of METRICS, those that a policy is judged by, and whether more of it is better.
JUDGED = {"total_throughput": True, "mean_ttft_ms": False, "mean_tpot_ms": False}


class Measure(NamedTuple):
    """Compares policies in one respect: `values[policy][i]` in their i-th rounds. Of a share (in
    per cent, and more is better) distances are differences."""

    name: str
    values: dict[str, list[float]]
    more_is_better: bool
    is_share: bool = False

    def gains(self, policy: str, over: str) -> list[float]:
        """By how much `policy` is better than `over` in each round: in per cent of `over`, or in
        points."""
        sign = 1 if self.more_is_better else -1
        return [
            sign * (own - other) / (1 if self.is_share else other / 100) + 0.0  # never -0.0
            for own, other in zip(self.values[policy], self.values[over], strict=True)
        ]

    def best(self, default: str) -> str:
        """The policy with the best median; of equal ones `default`."""
        sign = 1 if self.more_is_better else -1
        return max(self.values, key=lambda one: (sign * median(self.values[one]), one == default))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, saves=False)
    command.add("records", nargs="+", type=Path, help="of `policies`; their rounds count anew")
    return command.run(_report, argv)


def _report(options: Options) -> Report:
    runs: dict[str, list[Run]] = {}
    for number, path in enumerate(options.records):
        try:
            found = msgspec.convert(read_record(path)["runs"], dict[str, list[Run]])
        except (OSError, ValueError, KeyError, msgspec.ValidationError) as error:
            raise ConfigurationError(f"{path} is no record of `policies`: {error}") from error
        for load, of_load in found.items():
            # Two records may have rounds of the same number.
            numbered = [replace(run, round=1000 * number + run.round) for run in of_load]
            runs.setdefault(load, []).extend(numbered)
    return Report(name="policies_report", texts=tables(runs, DEFAULT_POLICY))


def tables(runs: Mapping[str, Sequence[Run]], default: str) -> list[str]:
    """All of Markdown.

    Args:
        runs: those of each load; `Run.engine` is the policy. Each round has a run of each policy.
        default: the policy to compare with the others.
    """
    by_policy = [f"**{load}**\n\n{comparison_table(runs[load], None)}" for load in runs]
    return [best_table(runs, default), beaten_table(runs, default), *by_policy]


def best_table(runs: Mapping[str, Sequence[Run]], default: str) -> str:
    """A row for each load and measure."""
    heads = ["load", "measure", "best by its median", "median", default, "behind, %"]
    heads += ["behind in each round, %"]
    rows = []
    for load, of_load in runs.items():
        for measure in measures(of_load):
            best = measure.best(default)
            medians = [median(measure.values[policy]) for policy in (best, default)]
            whole = measure._replace(values={"best": [medians[0]], "default": [medians[1]]}).gains(
                "default", "best"
            )
            behind = [
                ", ".join(f"{0.0 - gain:.1f}" for gain in gains)
                for gains in (whole, measure.gains(default, best))
            ]
            rows.append([load, measure.name, best, *(f"{one:.1f}" for one in medians), *behind])
    return markdown_table(heads, rows)


def beaten_table(runs: Mapping[str, Sequence[Run]], default: str) -> str:
    """A row for each policy that beats the default at a load, by the rule of the simulated grid:
    the median of its gains in the rounds is above TOLERANCE in one measure, and in none below
    SLACK. Goodput follows from two others and does not count."""
    rows = []
    for load, of_load in runs.items():
        compared = [measure for measure in measures(of_load) if not measure.is_share]
        for policy in compared[0].values:
            gains = [measure.gains(policy, default) for measure in compared]
            medians = [median(of_measure) for of_measure in gains]
            if max(medians) <= 100 * TOLERANCE or min(medians) < -100 * SLACK:
                continue
            cells = [
                f"{one:+.1f} ({sum(gain > 0 for gain in of_measure)} of {len(of_measure)})"
                for one, of_measure in zip(medians, gains, strict=True)
            ]
            rows.append([load, policy, *cells])
    if not rows:
        return f"No policy beats `{default}` at any load."
    names = [f"{METRICS[metric]}, % better (rounds)" for metric in JUDGED]
    return markdown_table(["load", f"`{default}` is beaten by", *names], rows)


def measures(runs: Sequence[Run]) -> list[Measure]:
    """The measures of a load's runs. Goodput is the share of requests that are within the medians
    of TTFT and TPOT of all policies' requests."""
    ordered = sorted(runs, key=lambda run: run.round)
    found = [
        Measure(
            METRICS[metric], _by_policy(ordered, [run.metrics[metric] for run in ordered]), more
        )
        for metric, more in JUDGED.items()
    ]
    latencies = [latency for run in ordered for latency in run.latencies]
    if latencies:
        target = LatencyTarget(
            ttft_ms=round(median(one.ttft_ms for one in latencies), 1),
            tpot_ms=round(median(one.tpot_ms for one in latencies if one.tpot_ms is not None), 1),
        )
        shares = [100 * goodput(run.latencies, target) for run in ordered]
        found.append(Measure(f"% within {target}", _by_policy(ordered, shares), True, True))
    return found


def _by_policy(runs: Sequence[Run], values: Sequence[float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run, value in zip(runs, values, strict=True):
        found.setdefault(run.engine, []).append(value)
    return found


if __name__ == "__main__":
    sys.exit(main())
