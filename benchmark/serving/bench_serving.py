"""Measures servers under the load of `sglang.bench_serving`, ours beside its peers.

    python -m benchmark.serving.bench_serving --engine "ours --pp 2" --engine "vllm --pp 2"

Run by hand or `make bench`. Engines take turns, one at a time (A B A B), each started afresh, with
one run that is not counted before the one that is. It must never compare runs of unequal work.
"""

import argparse
import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmark.support.dated_result import save_result
from benchmark.support.engines import Engine, EngineFailure, parse_engine, running
from benchmark.support.load_client import THEN
from benchmark.support.loads import ClientLoad, Load
from benchmark.support.machine import usable_cores
from benchmark.support.paths import BUILD, RESULTS, ROOT, SCRATCH
from benchmark.support.serving_report import (
    METRICS,
    Run,
    comparison_table,
    cost_table,
    pipeline_cost,
)
from sgl_pipeline.errors import ConfigurationError, SglPipelineError
from sgl_pipeline.trace import StepRecord, read_trace

DEFAULT_PRESET = "0.27b"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 after an error that was printed."""
    options = _parse(argv)
    try:
        _bench(options)
    except SglPipelineError as error:
        print(f"bench_serving: error: {error}", file=sys.stderr)
        return 1
    return 0


def _bench(options: argparse.Namespace) -> None:
    load = Load(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Load)})
    SCRATCH.mkdir(parents=True, exist_ok=True)
    model = Path(options.model_path) if options.model_path else make_model(DEFAULT_PRESET)
    engines = _engines(options, model)
    against = options.against or (engines[-1].label if len(engines) > 1 else None)
    if against is not None and against not in [engine.label for engine in engines]:
        raise ConfigurationError(f"--against {against!r} is none of the engines that are measured")
    runs = measure_rounds(engines, model, load, load, options.rounds)
    tables = [comparison_table(runs, against), cost_table(runs)]
    print("\n" + "\n\n".join(filter(None, tables)))
    if not options.no_save:
        stem = save_run(RESULTS, options.name, load, model, runs, tables)
        print(f"\nWritten: {stem}.md and .json")


def measure_rounds(
    engines: Sequence[Engine],
    model: Path,
    warm_up: ClientLoad,
    load: ClientLoad,
    num_rounds: int,
    keep_up: Collection[Engine] = (),
) -> list[Run]:
    """Lets the engines take turns; each start is followed by `warm_up`, which does not count.

    Args:
        keep_up: engines, at ports of their own, that are started once; the others are started
            afresh for each of their turns. Turns then follow each other sooner, so that a drift of
            the machine's speed meets all alike. They must be idle while they have nothing to do.

    Raises EngineFailure when a server fails or the work of two runs is not the same.
    """
    runs: list[Run] = []
    with contextlib.ExitStack() as up:
        for engine in keep_up:
            up.enter_context(running(engine, _log_path(engine)))
            measure(engine, model, [warm_up], round_number=0)
        for round_number, engine in product(range(1, num_rounds + 1), engines):
            if engine in keep_up:
                run = measure(engine, model, [load], round_number)[-1].run
            else:
                with running(engine, _log_path(engine)):
                    run = measure(engine, model, [warm_up, load], round_number)[-1].run
            print(f"{engine.label}, round {round_number}: {_one_line(run)}", flush=True)
            runs.append(run)
            check_equal_work(runs)
    return runs


def _log_path(engine: Engine) -> Path:
    """Where the output of the engine's latest start goes."""
    return SCRATCH / re.sub(r"[^\w.]+", "_", f"{engine.label}.log")


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """A run as its clients saw it, and its steps as the server wrote them down, where it does."""

    run: Run
    records: tuple[StepRecord, ...]


def measure(
    engine: Engine, model: Path, loads: Sequence[ClientLoad], round_number: int
) -> list[MeasuredLoad]:
    """Puts the loads on a server that is up, one after the other.

    Raises EngineFailure when the client fails or not every request is answered.
    """
    steps_before = len(trace_of(engine))
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.jsonl"
        common = ["--backend", engine.client_backend, "--base-url", engine.base_url]
        common += ["--model", str(model), "--tokenizer", str(model), "--disable-tqdm"]
        # A warm-up request would be in the trace; a whole uncounted run comes before instead.
        common += ["--warmup-requests", "0", "--output-file", str(output)]
        command = [sys.executable, "-m", "benchmark.support.load_client"]
        for load in loads:
            command += [*load.client_flags(), *common, THEN]
        client = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        results = output.read_text().splitlines() if output.exists() else []
        if client.returncode != 0 or len(results) != len(loads):
            raise EngineFailure(f"{engine.label}: the client failed:\n{client.stdout[-4000:]}")
    records = iter(trace_of(engine)[steps_before:])
    return [
        _measured(engine, load, round_number, json.loads(result), records)
        for load, result in zip(loads, results, strict=True)
    ]


def _measured(
    engine: Engine,
    load: ClientLoad,
    round_number: int,
    result: dict[str, Any],
    records: Iterator[StepRecord],
) -> MeasuredLoad:
    """The run that the client's `result` tells of, whose steps come next in `records`."""
    if result["completed"] != load.num_requests:
        raise EngineFailure(
            f"{engine.label}: {result['completed']} of {load.num_requests} requests were answered"
        )
    of_load = take_requests(records, load.num_requests)
    run = Run(
        engine=engine.label,
        round=round_number,
        input_tokens=result["total_input_tokens"],
        output_tokens=result["total_output_tokens"],
        duration_s=result["duration"],
        metrics={name: result[name] for name in METRICS},
        cost=pipeline_cost(of_load),
    )
    return MeasuredLoad(run, of_load)


def take_requests(records: Iterator[StepRecord], num_requests: int) -> tuple[StepRecord, ...]:
    """The next steps up to the one with which the last of `num_requests` has ended."""
    taken = []
    for record in records:
        taken.append(record)
        num_requests -= len(record.ended)
        if num_requests <= 0:
            break
    return tuple(taken)


def check_equal_work(runs: list[Run]) -> None:
    """Raises EngineFailure unless all runs took in and gave out the same number of tokens."""
    work = {(run.input_tokens, run.output_tokens): run.engine for run in runs}
    if len(work) > 1:
        told = "; ".join(f"{engine}: {i} in, {o} out" for (i, o), engine in work.items())
        raise EngineFailure(f"the engines did unequal work and cannot be compared ({told})")


def make_model(preset: str) -> Path:
    """The random-weight checkpoint of that preset under build/models, written when missing."""
    directory = BUILD / "models" / preset
    if not directory.exists():
        # An interrupted write must not look like a model.
        partial = directory.with_name(f"{preset}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "benchmark.models.make_model", preset, str(partial)]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            raise ConfigurationError(f"could not write the {preset} model to {partial}")
        partial.rename(directory)
    return directory


def _engines(options: argparse.Namespace, model: Path) -> list[Engine]:
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


def trace_of(engine: Engine) -> list[StepRecord]:
    """The steps that the engine has written down so far; none where it does not."""
    if engine.trace_path is None or not engine.trace_path.exists():
        return []
    return list(read_trace(engine.trace_path))


def _one_line(run: Run) -> str:
    return ", ".join(f"{head} {run.metrics[name]:.1f}" for name, head in METRICS.items())


def save_run(
    folder: Path, name: str, load: Load, model: Path, runs: list[Run], tables: list[str]
) -> Path:
    """Writes the dated result of `runs`; returns its path without suffix."""
    work = f"{runs[0].input_tokens} tokens in, {runs[0].output_tokens} out a run"
    facts = {
        # JSON has no infinity.
        "load": {key: str(value) for key, value in dataclasses.asdict(load).items()},
        "model": {model.name: work, "prefix caches": "off", "figures": "medians (min to max)"},
    }
    record = {"runs": [dataclasses.asdict(run) for run in runs]}
    return save_result("serving.bench_serving", name, facts, record, tables, folder)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.serving.bench_serving", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--engine",
        action="append",
        help="'ours|vllm|sglang|transformers --pp N [its flags]'; repeatable",
    )
    add("--against", help="engine whose throughput is 1 in the ratios (default: the last one)")
    add("--rounds", type=int, default=3, help="counted runs of each engine (default: 3)")
    add("--model-path", help=f"checkpoint (default: the {DEFAULT_PRESET} preset, made on demand)")
    add("--port", type=int, default=31900, help="loopback port of the engines (default: 31900)")
    add("--base-url", help="measure this running server instead of starting engines")
    add("--backend", default="sglang", choices=("sglang", "vllm"), help="protocol at --base-url")
    add("--trace-path", help="where the server at --base-url writes its trace")
    add("--name", default="serving", help="of the result files (default: serving)")
    add("--no-save", action="store_true", help="print only")
    for field in dataclasses.fields(Load):
        flag, kind = "--" + field.name.replace("_", "-"), type(field.default)
        add(flag, type=kind, default=field.default, help=f"(default: {field.default})")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
