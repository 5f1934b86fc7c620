"""Measures our server beside its peers under several loads: one table for each.

    python -m benchmark.serving.against_peers
    python -m benchmark.serving.against_peers --engine "ours --pp 1" --engine "vllm --pp 1"
    python -m benchmark.serving.against_peers --prefix-caches --loads offline
    python -m benchmark.serving.against_peers --loads clients-1,clients-4,clients-16,clients-64 \
        --engine "ours --pp 1 --weights int-quantized" --engine "llama --pp 1 --weights q8_0"
    python -m benchmark.serving.against_peers --model smollm2 --loads clients-1,clients-16 \
        --engine "ours --pp 1 --weights bf16" --engine "llama --pp 1 --weights bf16"

Run by hand; half an hour for two engines, six loads and three rounds. Engines take turns, one at a
time, each started afresh for a round, in which it gets all loads after one that is not counted.
Random weights are asked with random ids, a trained model with the text of our pages. Prefix caches
are off; with `--prefix-caches` they are on, each load comes twice, and the second time counts.
Memory is the sum of the PSS of the server's processes right after a load.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

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
from benchmark.support.loads import Load, MixedLoad
from benchmark.support.machine import usable_cores
from benchmark.support.measured_models import NAMES, measured_model
from benchmark.support.measured_runs import DEFAULT_PRESET, check_equal_work, measure, turns
from benchmark.support.paths import SCRATCH
from benchmark.support.serving_report import Run, comparison_table, cost_table

USUAL_LOADS: dict[str, Load | MixedLoad] = {
    "offline": Load(),
    "online": Load(requests_per_s=3.0),
    "decode-heavy": Load(input_tokens=32, output_tokens=256),
    "prefill-heavy": Load(num_requests=32, input_tokens=1024, output_tokens=8),
    "long-prompts": MixedLoad(
        groups=((1, 8000, 64), (1, 6000, 64), (1, 4000, 64), (24, 128, 64)), requests_per_s=2.0
    ),
    "mixed-contexts": MixedLoad(groups=((4, 3000, 96), (28, 64, 96))),
}
# So many clients, each with its next request as soon as one is answered. Few clients get few
# requests: a run then takes about 20 s on two cores.
LOADS = USUAL_LOADS | {
    "clients-1": Load(num_requests=16, num_clients=1),
    "clients-4": Load(num_requests=32, num_clients=4),
    "clients-16": Load(num_clients=16),
    "clients-64": Load(num_clients=64),
}
WARM_UP = Load(seed=7)
ENGINES = ("ours --pp 2", "vllm --pp 2")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3, port=31900)
    command.add("--engine", action="append", help=f"one to measure (default: {ENGINES})")
    command.add("--model", default=DEFAULT_PRESET, help=f"{NAMES} (default: {DEFAULT_PRESET})")
    command.add(
        "--loads",
        type=names_of(list(LOADS)),
        default=list(USUAL_LOADS),
        help=f"of {', '.join(LOADS)} (default: the first {len(USUAL_LOADS)})",
    )
    command.add("--prefix-caches", action="store_true", help="on; a load's second run counts")
    usual = WARM_UP.num_requests
    text = f"requests of the run that comes first and does not count (default: {usual})"
    command.add("--warm-up-requests", type=at_least_one, default=usual, help=text)
    return command.run(_compare, argv)


def _compare(options: Options) -> Report:
    names: list[str] = options.loads
    model = measured_model(options.model)
    engines = [
        parse_engine(
            text,
            model.path,
            options.port,
            SCRATCH,
            usable_cores(),
            prefix_cache=options.prefix_caches,
        )
        for text in options.engine or ENGINES
    ]
    warm_up = model.written(replace(WARM_UP, num_requests=options.warm_up_requests), "warm-up")
    loads = [model.written(LOADS[name], name) for name in names]
    times_each = 2 if options.prefix_caches else 1
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with progress(options.rounds * len(engines), "turns") as bar:
        for round_number, engine in turns(engines, options.rounds):
            with running(engine, SCRATCH / "against_peers.log") as server:
                repeated = [load for load in loads for _ in range(times_each)]
                measured = measure(
                    engine, model.directory, [warm_up, *repeated], round_number, server
                )
            counted = measured[times_each::times_each]
            for name, one in zip(names, counted, strict=True):
                runs[name].append(one.run)
                check_equal_work(runs[name])
            say(f"{engine.label}, round {round_number}: {_throughputs(runs, names)}")
            bar.update()
    caches = "on, second run of each load" if options.prefix_caches else "off"
    return Report(
        name="against_peers",
        texts=_tables(runs, engines),
        facts={
            "model": {options.model: f"prefix caches {caches}; medians (smallest to largest)"},
            "loads": {name: str(LOADS[name]) for name in names},
        },
        record={"runs": {name: [asdict(run) for run in runs[name]] for name in names}},
    )


def _throughputs(runs: dict[str, list[Run]], names: Sequence[str]) -> str:
    """The throughput of the latest run of each load."""
    return ", ".join(
        f"{name} {runs[name][-1].metrics['total_throughput']:.0f} tok/s" for name in names
    )


def _tables(runs: dict[str, list[Run]], engines: Sequence[Engine]) -> list[str]:
    """Markdown: two for each load, against the engine that was named last."""
    against = engines[-1].label if len(engines) > 1 else None
    tables = []
    for name, of_load in runs.items():
        parts = (f"**{name}**", comparison_table(of_load, against), cost_table(of_load))
        tables.append("\n\n".join(filter(None, parts)))
    return tables


if __name__ == "__main__":
    sys.exit(main())
