"""Measures servers under the load of `sglang.bench_serving`, ours beside its peers.

    python -m benchmark.serving.bench_serving --engine "ours --pp 2" --engine "vllm --pp 2"

Run by hand or `make bench`. Engines take turns, one at a time (A B B A), each started afresh, with
one run that is not counted before the one that is. It must never compare runs of unequal work.
"""

import dataclasses
import sys
from math import inf
from pathlib import Path

from benchmark.support.command import Command, Options, Report
from benchmark.support.engine import Engine
from benchmark.support.engines import parse_engine
from benchmark.support.loads import Load
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model, measure_rounds
from benchmark.support.paths import SCRATCH
from benchmark.support.serving_report import (
    Run,
    comparison_table,
    cost_table,
)
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.simulator.fleet_command import positive


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3, port=31900)
    add = command.add
    add(
        "--engine",
        action="append",
        help="'ours|vllm|sglang|transformers --pp N [its flags]'; repeatable",
    )
    add("--against", help="engine whose throughput is 1 in the ratios (default: the last one)")
    add("--model-path", help=f"checkpoint (default: the {DEFAULT_PRESET} preset, made on demand)")
    add("--base-url", help="measure this running server instead of starting engines")
    add("--backend", default="sglang", choices=("sglang", "vllm"), help="protocol at --base-url")
    add("--trace-path", help="where the server at --base-url writes its trace")
    add("--ttft-ms", type=positive, help="limit for the column goodput: first token")
    add("--tpot-ms", type=positive, help="and mean time per further token of a request")
    add("--name", default="serving", help="of the result files (default: serving)")
    for field in dataclasses.fields(Load):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        # Only a count may be None.
        kind = int if default is None else type(default)
        add(flag, type=kind, default=default, help=f"(default: {default})")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    load = Load(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Load)})
    model = Path(options.model_path) if options.model_path else make_model(DEFAULT_PRESET)
    engines = _engines(options, model)
    against = options.against or (engines[-1].label if len(engines) > 1 else None)
    if against is not None and against not in [engine.label for engine in engines]:
        raise ConfigurationError(f"--against {against!r} is none of the engines that are measured")
    runs = measure_rounds(engines, model, load, load, options.rounds)
    return report_of(options.name, load, model, runs, against, _target(options))


def _target(options: Options) -> LatencyTarget | None:
    if options.ttft_ms is None and options.tpot_ms is None:
        return None
    return LatencyTarget(ttft_ms=options.ttft_ms or inf, tpot_ms=options.tpot_ms or inf)


def _engines(options: Options, model: Path) -> list[Engine]:
    if options.base_url is None:
        texts = options.engine or ["ours --pp 2"]
        return [parse_engine(text, model, options.port, SCRATCH, usable_cores()) for text in texts]
    if options.engine:
        raise ConfigurationError("--base-url measures one running server; drop --engine")
    return [
        Engine(
            label=options.base_url,
            client_backend=options.backend,
            base_url=options.base_url.rstrip("/"),
            trace_path=Path(options.trace_path) if options.trace_path else None,
        )
    ]


def report_of(
    name: str,
    load: Load,
    model: Path,
    runs: list[Run],
    against: str | None = None,
    target: LatencyTarget | None = None,
) -> Report:
    """The report on `runs`, with ratios over the engine `against`, and goodput for `target`."""
    limits = {} if target is None else {"goodput": f"within {target}"}
    work = f"{runs[0].input_tokens} tokens in, {runs[0].output_tokens} out a run"
    return Report(
        name=name,
        texts=[comparison_table(runs, against, target), cost_table(runs)],
        facts={
            # JSON has no infinity.
            "load": {key: str(value) for key, value in dataclasses.asdict(load).items()},
            "model": {model.name: work, "prefix caches": "off", "figures": "medians (min to max)"}
            | limits,
        },
        record={"runs": [dataclasses.asdict(run) for run in runs]},
    )


if __name__ == "__main__":
    sys.exit(main())
