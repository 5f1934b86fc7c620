"""The tables of a capacity benchmark's page."""

from collections.abc import Sequence

from benchmark.forecasts.capacity_bench import Checked
from benchmark.support.dated_result import markdown_table
from sgl_pipeline.capacity.curve import Estimate
from sgl_pipeline.capacity.result import RateRow
from sgl_pipeline.simulator.summary import Distribution


def capacity_table(checked: Sequence[Checked]) -> str:
    """Markdown: a row for each load."""
    heads = ["load, at most", "TTFT, TPOT within ms", "measured req/s", "predicted", "error"]
    heads += ["predicted at the runs' pace", "error", "slowness", "with 5 % slower steps"]
    heads += ["arrives, stays s"]
    rows = [
        [
            one.load,
            f"{one.target.ttft_ms:.0f}, {one.target.tpot_ms:.0f}",
            *(str(one.measured), str(one.predicted), _excess(one.ratio)),
            *(str(one.at_pace), _excess(one.ratio_at_pace), f"{one.slowness:.2f}"),
            f"{one.slower_share - 1.0:+.0%}",
            f"{one.arrives_s:.0f}, {one.stays_s:.1f}",
        ]
        for one in checked
    ]
    return markdown_table(heads, rows)


def trial_table(checked: Sequence[Checked]) -> str:
    """Markdown: a row for each rate that a side of a load was tried at."""
    heads = ["load", "side", "req/s", "goodput", "within TTFT", "within TPOT"]
    heads += ["TTFT p50, p90, p99 ms", "TPOT", "cores taken"]
    rows = [
        [one.load, side, *_trial_cells(row)]
        for one in checked
        for side, of_side in one.trials.items()
        for row in of_side
    ]
    return markdown_table(heads, rows)


def _trial_cells(row: RateRow) -> list[str]:
    cores = {} if row.processors is None else row.processors.cores
    return [
        f"{row.rate_per_s:.3g}",
        *(f"{share:.0%}" for share in (row.goodput, row.ttft_share, row.tpot_share)),
        _percentiles(row.ttft_ms, 0),
        _percentiles(row.tpot_ms, 1),
        ", ".join(f"{kind} {number:.2f}" for kind, number in cores.items() if number >= 0.005),
    ]


def _percentiles(one: Distribution, digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in (one.p50, one.p90, one.p99))


def _excess(ratio: Estimate) -> str:
    value, low, high = (one - 1.0 for one in (ratio.value, ratio.low, ratio.high))
    return f"{value:+.1%} ({low:+.0%} to {high:+.0%})"
