"""Is the default policy the best one on a real server, and how far is it from the best elsewhere?

    python -m benchmark.serving.policies
    python -m benchmark.serving.policies --rounds 1 --first-round 2
    python -m benchmark.serving.policies --policies throttle,throttle-time --loads offline

Run by hand on a quiet machine; on two cores with AMX a round of all policies and loads takes some
12 minutes, without AVX-512 and with `--model 0.03b` 17, with 0.07b 25. One server of ours serves
them all and learns first what its steps take, which all policies then find known; its policy is
changed while nothing runs. The policies take turns at each load, in an order that turns around from
round to round (A B, B A), so that runs that are compared lie seconds apart. Prefix caches are off.
Rounds may be measured by several commands: `--first-round` says which way the first one goes, and
`policies_report` prints the tables of all.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmark.serving.against_peers import USUAL_LOADS, WARM_UP
from benchmark.serving.policies_report import DEFAULT_POLICY, tables
from benchmark.support.command import (
    Command,
    Options,
    Report,
    at_least_one,
    names_of,
    progress,
    say,
)
from benchmark.support.engine import Engine
from benchmark.support.engines import parse_engine, running
from benchmark.support.load_client import UNDER_POLICY
from benchmark.support.loads import ClientLoad, Load
from benchmark.support.machine import usable_cores
from benchmark.support.measured_models import NAMES, MeasuredModel, measured_model
from benchmark.support.measured_runs import (
    DEFAULT_PRESET,
    MeasuredLoad,
    check_equal_work,
    measure,
)
from benchmark.support.paths import SCRATCH
from benchmark.support.serving_report import Run
from sgl_pipeline.args import POLICIES, require
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.throttle import POLICY_TABLE

# A split that was measured anew by each start would make rounds of two commands hard to compare.
SERVER = f"ours --pp 2 --pp-layer-partition 9,7 --policy {DEFAULT_POLICY}"
# Steps of all sizes, and enough of them: step times are known after the first fit.
WARM_UPS = (WARM_UP, Load(num_requests=16, input_tokens=128, output_tokens=128, seed=8))
# A client's first requests wait for what it imports.
FIRST = Load(num_requests=4, input_tokens=64, output_tokens=8, seed=9)


@dataclass(frozen=True, slots=True)
class UnderPolicy:
    """A load that begins by changing the server's policy."""

    load: ClientLoad
    policy: str

    @property
    def num_requests(self) -> int:
        return self.load.num_requests

    def client_flags(self) -> list[str]:
        return [UNDER_POLICY, self.policy, *self.load.client_flags()]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3, port=31900)
    text = "number of the first round; in even ones the policies come in reverse (default: 1)"
    command.add("--first-round", type=at_least_one, default=1, help=text)
    text = f"of {', '.join(POLICIES)}, {DEFAULT_POLICY} among them (default: all)"
    command.add("--policies", type=names_of(POLICIES), default=list(POLICIES), help=text)
    loads = list(USUAL_LOADS)
    text = f"of {', '.join(loads)} (default: all)"
    command.add("--loads", type=names_of(loads), default=loads, help=text)
    command.add("--model", default=DEFAULT_PRESET, help=f"{NAMES} (default: {DEFAULT_PRESET})")
    command.add("--server", default=SERVER, help=f"a server of ours (default: {SERVER})")
    return command.run(_compare, argv)


def _compare(options: Options) -> Report:
    policies: list[str] = options.policies
    require(
        DEFAULT_POLICY in policies,
        f"--policies {','.join(policies)} must name {DEFAULT_POLICY}, the default, to which the "
        "others are compared",
    )
    model = measured_model(options.model)
    engine = parse_engine(options.server, model.path, options.port, SCRATCH, usable_cores())
    loads = {name: model.written(USUAL_LOADS[name], f"policies_{name}") for name in options.loads}
    first = model.written(FIRST, "policies_first")
    warm_ups = [model.written(one, f"policies_warm-up-{one.seed}") for one in WARM_UPS]
    runs: dict[str, list[Run]] = {name: [] for name in loads}
    problems: list[str] = []
    rounds = range(options.first_round, options.first_round + options.rounds)
    with (
        running(engine, SCRATCH / "policies.log"),
        progress(len(rounds) * len(loads), "loads of all policies") as bar,
    ):
        measure(engine, model.directory, warm_ups, round_number=0)
        for round_number in rounds:
            order = policies if round_number % 2 else policies[::-1]
            for name, load in loads.items():
                served = _take_turns(engine, model, [first, load], order, round_number)
                latest = [replace(one.run, engine=policy) for policy, one in served.items()]
                runs[name] += latest
                check_equal_work(runs[name])
                where = f"round {round_number}, {name}"
                say(f"{where}: {_throughputs(latest)} tokens/s")
                found = [limit_problem(policy, one.records) for policy, one in served.items()]
                problems += [f"{where}, {one}" for one in found if one is not None]
                bar.update()
    return Report(
        name="policies",
        texts=tables(runs, DEFAULT_POLICY),
        facts={
            "server": {options.model: options.server, "prefix caches": "off"},
            "rounds": {"numbers": ", ".join(map(str, rounds))},
            "loads": {name: str(USUAL_LOADS[name]) for name in loads},
        },
        record={
            "runs": {name: [_recorded(run) for run in of_load] for name, of_load in runs.items()}
        },
        problems=problems,
    )


def _take_turns(
    engine: Engine,
    model: MeasuredModel,
    loads: Sequence[ClientLoad],
    policies: Sequence[str],
    round_number: int,
) -> dict[str, MeasuredLoad]:
    """The last of `loads` under each policy, by one client; the others do not count."""
    *before, load = loads
    under = [UnderPolicy(load, policy) for policy in policies]
    measured = measure(engine, model.directory, [*before, *under], round_number)[len(before) :]
    return dict(zip(policies, measured, strict=True))


def limit_problem(policy: str, records: Sequence[StepRecord]) -> str | None:
    """A line where not all steps, or any, were limited by time, as the policy does or does not."""
    by_time = sum(record.budget_ms is not None for record in records)
    if by_time == len(records) * POLICY_TABLE[policy].budgets_time:
        return None
    return f"{policy}: {by_time} of {len(records)} steps were limited by time"


def _recorded(run: Run) -> dict[str, Any]:
    """A record has thousands of latencies: microseconds would make it too large."""
    latencies = [[value and round(value, 2) for value in one] for one in run.latencies]
    return asdict(run) | {"latencies": latencies}


def _throughputs(runs: Sequence[Run]) -> str:
    return ", ".join(f"{run.engine} {run.metrics['total_throughput']:.0f}" for run in runs)


if __name__ == "__main__":
    sys.exit(main())
