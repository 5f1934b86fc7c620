"""Loads put on servers in turns, and what their clients and their own traces say of each run.

Runs of unequal work are never compared.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmark.support.command import progress, say
from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import running
from benchmark.support.load_client import MEMORY_OF, THEN
from benchmark.support.loads import ClientLoad
from benchmark.support.paths import BUILD, ROOT, SCRATCH
from benchmark.support.serving_report import METRICS, Run, pipeline_cost
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import RequestLatency
from sgl_pipeline.records.trace import StepRecord, read_trace

DEFAULT_PRESET = "0.27b"

Competitor = TypeVar("Competitor")


def turns(engines: Sequence[Competitor], num_rounds: int) -> Iterator[tuple[int, Competitor]]:
    """Each engine once a round, with the round's number from 1, in an order that turns around from
    round to round (A B, B A): the one that runs second may find the machine slower."""
    for round_number in range(1, num_rounds + 1):
        for engine in engines if round_number % 2 else reversed(engines):
            yield round_number, engine


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
        bar = up.enter_context(progress(num_rounds * len(engines), "runs"))
        for round_number, engine in turns(engines, num_rounds):
            if engine in keep_up:
                run = measure(engine, model, [load], round_number)[-1].run
            else:
                with running(engine, _log_path(engine)):
                    run = measure(engine, model, [warm_up, load], round_number)[-1].run
            say(f"{engine.label}, round {round_number}: {_one_line(run)}")
            bar.update()
            runs.append(run)
            check_equal_work(runs)
    return runs


def _log_path(engine: Engine) -> Path:
    """The path of the output of the engine's latest start."""
    return SCRATCH / re.sub(r"[^\w.]+", "_", f"{engine.label}.log")


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """A run as its clients saw it, and its steps as the server wrote them down, where it does."""

    run: Run
    records: tuple[StepRecord, ...]


def measure(
    engine: Engine,
    model: Path,
    loads: Sequence[ClientLoad],
    round_number: int,
    server: psutil.Process | None = None,
) -> list[MeasuredLoad]:
    """Puts the loads on a server that is up, one after the other.

    Args:
        server: the engine's main process, where the runs shall have its memory.

    Raises EngineFailure when the client fails or not every request is answered.
    """
    steps_before = len(trace_of(engine))
    with tempfile.TemporaryDirectory() as directory:
        output, memory_path = Path(directory) / "result.jsonl", Path(directory) / "memory"
        common = ["--backend", engine.client_backend, "--base-url", engine.base_url]
        common += ["--model", str(model), "--tokenizer", str(model), "--disable-tqdm"]
        # A warm-up request would be in the trace; a whole uncounted run comes before instead.
        common += ["--warmup-requests", "0", "--output-file", str(output), "--output-details"]
        command = [sys.executable, "-m", "benchmark.support.load_client"]
        if server is not None:
            command += [MEMORY_OF, str(server.pid), str(memory_path)]
        for load in loads:
            command += [*load.client_flags(), *common, THEN]
        client = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        results = output.read_text().splitlines() if output.exists() else []
        if client.returncode != 0 or len(results) != len(loads):
            raise EngineFailure(f"{engine.label}: the client failed:\n{client.stdout[-4000:]}")
        memory_mib: list[float | None] = [None] * len(loads)
        if server is not None:
            memory_mib = [float(line) for line in memory_path.read_text().splitlines()]
    records = iter(trace_of(engine)[steps_before:])
    return [
        _measured(engine, load, round_number, json.loads(result), taken_mib, records)
        for load, result, taken_mib in zip(loads, results, memory_mib, strict=True)
    ]


def _measured(
    engine: Engine,
    load: ClientLoad,
    round_number: int,
    result: dict[str, Any],
    memory_mib: float | None,
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
        # As the server counts them.
        input_tokens=sum(result["input_lens"]),
        output_tokens=result["total_output_tokens"],
        duration_s=result["duration"],
        metrics={name: result[name] for name in METRICS},
        cost=pipeline_cost(of_load),
        memory_mib=memory_mib,
        latencies=client_latencies(result),
    )
    return MeasuredLoad(run, of_load)


def client_latencies(result: Mapping[str, Any]) -> tuple[RequestLatency, ...]:
    """The latencies of a run whose requests have all been answered, from the client's details,
    which are in seconds."""
    return tuple(
        RequestLatency.of(ttft_s * 1e3, (ttft_s + sum(gaps_s)) * 1e3, output_tokens)
        for ttft_s, gaps_s, output_tokens in zip(
            result["ttfts"], result["itls"], result["output_lens"], strict=True
        )
    )


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


def trace_of(engine: Engine) -> list[StepRecord]:
    """The steps that the engine has written down so far; none where it does not."""
    if engine.trace_path is None or not engine.trace_path.exists():
        return []
    return list(read_trace(engine.trace_path))


def _one_line(run: Run) -> str:
    return ", ".join(f"{head} {run.metrics[name]:.1f}" for name, head in METRICS.items())
