"""Every policy in some 130 simulated cells: which is best in each, and where the default is not.

    python -m benchmark.forecasts.policy_grid                         # resumes, for --seconds
    python -m benchmark.forecasts.policy_grid --cells "PP 2" --policies throttle,sarathi
    python -m benchmark.forecasts.policy_grid --case "layers +20%"    # with a wrong forecast
    python -m benchmark.forecasts.policy_grid --grid server --seeds 10

A run adds rows to a file and leaves out those that it has, so that the grid can be run in parts;
when none is missing, it writes the result. Remove the file when policies have changed. All policies
of a cell serve the same requests, drawn anew with each seed, and are judged by their means over the
seeds. Times are virtual: other work on the machine changes nothing. `--grid server` has the loads
of `benchmark.serving.policies` on stages as fast as those that it measured.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmark.figures.figure import Row, numbers
from benchmark.forecasts.grid_cells import KNOWN_CASES, Cell, cells
from benchmark.forecasts.grid_report import report
from benchmark.forecasts.server_cells import ServerCell, server_cells
from benchmark.support.command import at_least_one
from benchmark.support.dated_result import save_result
from benchmark.support.paths import RESULTS, SCRATCH
from sgl_pipeline.args import POLICIES
from sgl_pipeline.status_line import StatusLine, bar
from sgl_pipeline.throttle import POLICY_TABLE

ROWS = SCRATCH / "policy_grid.jsonl"
GRIDS: dict[str, Callable[[], Iterable[Cell | ServerCell]]] = {
    "machines": lambda: cells(),
    "server": server_cells,
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 once no row is missing."""
    parser = argparse.ArgumentParser(prog="benchmark.forecasts.policy_grid", description=__doc__)
    parser.add_argument("--grid", choices=GRIDS, default="machines")
    parser.add_argument("--cells", action="append", help="part of the names of the cells to run")
    parser.add_argument("--seeds", type=at_least_one, default=1, help="drawings of each cell")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--judged", default="throttle-time", help="the policy that is compared")
    parser.add_argument("--case", choices=KNOWN_CASES, default="exact", help="of wrong forecasts")
    parser.add_argument("--seconds", type=float, default=240.0, help="for this run")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of rows")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args(argv)
    chosen = [
        replace(cell, seed=seed)
        for cell in GRIDS[options.grid]()
        if options.cells is None or any(part in cell.name for part in options.cells)
        for seed in range(options.seeds)
    ]
    policies = options.policies.split(",")
    is_whole = run(chosen, policies, options.case, options.rows, options.seconds)
    wanted = {(cell.name, cell.seed, policy) for cell in chosen for policy in policies}
    rows = [row for row in read_rows(options.rows, options.case) if _key(row) in wanted]
    texts = report(rows, options.judged)
    print("\n\n".join(texts))
    if not is_whole:
        print(f"{len(wanted) - len(rows)} rows are missing: run it again", file=sys.stderr)
        return 1
    facts = {"forecasts": {"of step times": options.case}, "seeds": {"number": f"{options.seeds}"}}
    save_result(parser.prog, "policy_grid", facts, {"rows": rows}, texts, options.out)
    return 0


def run(
    chosen: Sequence[Cell | ServerCell],
    policies: Sequence[str],
    case: str,
    path: Path,
    seconds: float,
) -> bool:
    """Adds the missing rows to the file `path` until the time is over; True if none is missing."""
    have = {_key(row) for row in read_rows(path, case)}
    line, until_s = StatusLine(), time.monotonic() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate(chosen):
        missing = [policy for policy in policies if (cell.name, cell.seed, policy) not in have]
        if not missing:
            continue
        if time.monotonic() > until_s:
            line.clear()
            return False
        workload, target = cell.workload(), cell.target()
        for policy in missing:
            line.show(f"{bar(number, len(chosen))} {cell.name}: {policy}")
            simulation = cell.served(policy, case, workload)
            steps = simulation.steps
            names = {"cell": cell.name, "seed": cell.seed, "policy": policy, "case": case}
            row = {**names, **numbers(simulation, target)}
            row["step_tokens"] = sum(step.shape.num_tokens for step in steps) / len(steps)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    line.clear()
    return True


def read_rows(path: Path, case: str) -> Iterator[Row]:
    """The rows of the file, of any case where a policy asks for no forecast; none where the file
    does not exist."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["case"] == case or not POLICY_TABLE[row["policy"]].budgets_time:
            yield row


def _key(row: Row) -> tuple[str, int, str]:
    return row["cell"], row.get("seed", 0), row["policy"]


if __name__ == "__main__":
    sys.exit(main())
