"""Tables of `policies.py`: the best policy for each load and metric, and how far the default is."""

from collections.abc import Mapping, Sequence
from statistics import median

from benchmark.support.dated_result import markdown_table
from benchmark.support.serving_report import METRICS, Run, comparison_table

# Of METRICS, those that a policy is judged by.
JUDGED = ("total_throughput", "mean_ttft_ms", "mean_tpot_ms")
_MORE_IS_BETTER = ("total_throughput",)


def best_table(runs: Mapping[str, Sequence[Run]], default: str) -> str:
    """Markdown: a row for each load and metric.

    Args:
        runs: those of each load; `Run.engine` is the policy. Each round has a run of each policy.
        default: the policy to compare with the best.
    """
    heads = ["load", "metric", "best by its median", "median", default, "behind, %"]
    heads += ["behind in each round, %"]
    rows = []
    for load, of_load in runs.items():
        for metric in JUDGED:
            medians = _medians(of_load, metric)
            choose = max if metric in _MORE_IS_BETTER else min
            # Of equal ones the default, whose distance is then none.
            best = choose(sorted(medians, key=lambda one: one != default), key=medians.__getitem__)
            pairs = _by_round(of_load, metric, default, best)
            rows.append(
                [
                    load,
                    METRICS[metric],
                    best,
                    f"{medians[best]:.1f}",
                    f"{medians[default]:.1f}",
                    f"{_behind(metric, medians[default], medians[best]):.1f}",
                    ", ".join(f"{_behind(metric, *pair):.1f}" for pair in pairs),
                ]
            )
    return markdown_table(heads, rows)


def policy_tables(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Markdown: for each load a table with a row for each policy, medians with extremes."""
    return [f"**{load}**\n\n{comparison_table(of_load, None)}" for load, of_load in runs.items()]


def _behind(metric: str, value: float, best: float) -> float:
    """The distance of `value` from `best`, in per cent of it; negative where it is better."""
    share = value / best - 1.0
    return 100.0 * (-share if metric in _MORE_IS_BETTER else share)


def _medians(runs: Sequence[Run], metric: str) -> dict[str, float]:
    """By policy."""
    values: dict[str, list[float]] = {}
    for run in runs:
        values.setdefault(run.engine, []).append(run.metrics[metric])
    return {policy: median(of_policy) for policy, of_policy in values.items()}


def _by_round(
    runs: Sequence[Run], metric: str, default: str, best: str
) -> list[tuple[float, float]]:
    """The values of both policies in each round."""
    values = {(run.round, run.engine): run.metrics[metric] for run in runs}
    rounds = sorted({run.round for run in runs})
    return [(values[number, default], values[number, best]) for number in rounds]
