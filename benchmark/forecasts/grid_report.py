"""Puts the rows of `policy_grid.py` into words: the cells, and where the judged policy loses.

Time to the first token and time per token are a trade: no policy can win both against two that
stand at its ends. So a policy loses a cell to another one that is better in one measure by more
than TOLERANCE and worse in none by more than SLACK. Goodput, which weighs both against targets, is
judged by itself: it loses to the best of the cell. Where it is further than TOLERANCE behind the
best of a measure without losing the cell, the best one is named with its price.
"""

import math
from collections.abc import Sequence

from benchmark.figures.figure import Row, distinct, select
from benchmark.support.dated_result import markdown_table

TOLERANCE = 0.02
SLACK = 0.005
# What is compared, and whether more of it is better.
MEASURES = (
    ("total_tokens_per_s", "tokens/s", True),
    ("ttft_ms", "TTFT", False),
    ("tpot_ms", "TPOT", False),
)
SHARE = ("target_share", "in target", True)
WHOLE = ("e2e_ms", "request", False)


def report(rows: Sequence[Row], judged: str) -> list[str]:
    """A summary, the losses, the measures in which another one is best, and a table of all cells,
    by the means over the seeds."""
    rows = means(rows)
    names = [name for (name,) in distinct(rows, "cell")]
    by_cell = {name: select(rows, cell=name) for name in names}
    lost = [line for name in names for line in losses(by_cell[name], judged)]
    behind = [line for name in names for line in trades(by_cell[name], judged)]
    cells = {line[0] for line in lost}
    num_near = {label: len(names) for _, label, _ in (*MEASURES, SHARE)}
    for line in behind:
        num_near[line[1]] -= 1
    text = (
        f"`{judged}` loses in {len(cells)} of {len(names)} cells (TOLERANCE {TOLERANCE:.0%}), and "
        f"is the best or within {TOLERANCE:.0%} of it in "
        f"{', '.join(f'{number} ({label})' for label, number in num_near.items())}."
    )
    heads = ("cell", "to", "tokens/s", "TTFT", "TPOT", "in target", "why")
    price = ("cell", "behind in", "best", "tokens/s", "TTFT", "TPOT", "request", "in target")
    return [
        text,
        markdown_table(heads, lost) if lost else "",
        markdown_table(price, behind) if behind else "",
        _table(rows, judged),
    ]


def means(rows: Sequence[Row]) -> list[Row]:
    """A row for each policy in each cell, with the means over the rows of its seeds."""
    found = []
    for cell, policy in distinct(rows, "cell", "policy"):
        of_seeds = select(rows, cell=cell, policy=policy)
        numbers = {
            column: sum(row[column] for row in of_seeds) / len(of_seeds)
            for column, value in of_seeds[0].items()
            if isinstance(value, int | float)
        }
        found.append({"cell": cell, "policy": policy, **numbers})
    return found


def losses(rows: Sequence[Row], judged: str) -> list[tuple[str, ...]]:
    """A line for each policy to which `judged` loses the cell of these rows."""
    own = select(rows, policy=judged)
    if not own:
        return []
    lines = []
    best_share = max(row["target_share"] for row in rows)
    for other in rows:
        gains = [gain(other, own[0], *measure[::2]) for measure in MEASURES]
        is_better = max(gains) > TOLERANCE and min(gains) >= -SLACK
        share = other["target_share"]
        in_target = share == best_share and share > own[0]["target_share"] + TOLERANCE
        if other is not own[0] and (is_better or in_target):
            shares = f"{own[0]['target_share']:.0%}, {share:.0%}"
            line = (*(f"{one:+.1%}" for one in gains), shares, _reason(other, own[0]))
            lines.append((own[0]["cell"], other["policy"], *line))
    return lines


def trades(rows: Sequence[Row], judged: str) -> list[tuple[str, ...]]:
    """A line for each measure in which the best policy of these rows, of one cell, is better than
    `judged` by more than TOLERANCE: that policy, and by how much it is better in each."""
    own = next((row for row in rows if row["policy"] == judged), None)
    if own is None:
        return []
    lines = []
    for column, label, more_is_better in (*MEASURES, SHARE):
        best = max(rows, key=lambda row: _lead(row, own, column, more_is_better))
        if _lead(best, own, column, more_is_better) <= TOLERANCE:
            continue
        gains = [gain(best, own, *measure[::2]) for measure in (*MEASURES, WHOLE)]
        shares = f"{own['target_share']:.0%}, {best['target_share']:.0%}"
        line = (*(f"{one:+.1%}" for one in gains), shares)
        lines.append((own["cell"], label, best["policy"], *line))
    return lines


def _lead(other: Row, own: Row, column: str, more_is_better: bool) -> float:
    """As `gain`; of shares, which may be 0, the difference."""
    if column == SHARE[0]:
        return float(other[column] - own[column])
    return gain(other, own, column, more_is_better)


def gain(other: Row, own: Row, column: str, more_is_better: bool) -> float:
    """The share by which `other` is better than `own`; 0 where requests have a single token."""
    if math.isnan(other[column]) or math.isnan(own[column]):
        return 0.0
    change = other[column] / own[column] - 1.0
    return float(change if more_is_better else -change)


def _reason(other: Row, own: Row) -> str:
    """The difference of the two in their steps."""
    idle = other["bubble_share"] - own["bubble_share"]
    size = other["step_tokens"] / own["step_tokens"]
    return f"steps {size:.2f} times as large, stages idle {100 * idle:+.1f} points"


def _table(rows: Sequence[Row], judged: str) -> str:
    """A line for each cell: the judged policy, and the best of each measure."""
    measured = [f"{label}, best" for _, label, _ in MEASURES]
    heads = ("cell", *measured, "p99 TTFT", "p99 TPOT", "in target, best")
    lines = []
    for (name,) in distinct(rows, "cell"):
        of_cell = select(rows, cell=name)
        own = next((row for row in of_cell if row["policy"] == judged), None)
        if own is None:
            continue
        texts = [_beside(of_cell, own, *measure[::2]) for measure in MEASURES]
        tails = (f"{own['ttft_p99_ms']:.0f}", f"{own['tpot_p99_ms']:.1f}")
        lines.append((name, *texts, *tails, _beside(of_cell, own, "target_share", True)))
    return markdown_table(heads, lines)


def _beside(rows: Sequence[Row], own: Row, column: str, more_is_better: bool) -> str:
    """A number of the judged policy, and the best one with its policy."""
    pick = max if more_is_better else min
    best = pick(rows, key=lambda row: row[column])
    digits = 2 if column == "target_share" else 0 if own[column] >= 100.0 else 1
    return f"{own[column]:.{digits}f}, {best[column]:.{digits}f} {best['policy']}"
