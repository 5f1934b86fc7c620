"""Holds the promises of `POST /pipeline/tune` on badly set knobs to what comes of them.

    python -m benchmark.forecasts.tune_live
    python -m benchmark.forecasts.tune_live --rate 2.5 --ttft-ms 800 --tpot-ms 60 --rounds 4

Run by hand, some four minutes. One server runs all the time, started with a tiny #MaxP. It serves a
load, is asked for better knobs for a pair of latencies, and serves the same load with what was
proposed; then both settings again, in turns. Each run begins with an empty prefix cache. Measured
and predicted are of the same kind: times since a request arrived in the scheduler process, and the
share of requests that met both latencies.
"""

import dataclasses
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmark.support.command import Command, Options, Report, at_least_one, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import parse_engine, running
from benchmark.support.loads import Load
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import check_equal_work, make_model, measure
from benchmark.support.paths import SCRATCH
from benchmark.support.serving_report import Run, spread
from sgl_pipeline.records.trace import RequestRecord

BAD_FLAGS = "--chunked-prefill-size 32 --min-prefill-tokens 16"
TUNE_TIMEOUT_S = 40.0
REQUEST_TIMEOUT_S = 200.0
LATENCIES = ("ttft_ms p50", "ttft_ms p90", "tpot_ms p50", "tpot_ms p90")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRun:
    """One run of the load; latencies in ms by the names of `LATENCIES`."""

    round_number: int
    knobs: str  # "as started" or "proposed"
    target_share: float
    latencies: dict[str, float]
    tokens_per_s: float


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=2, port=31400)
    command.add("--model", default="0.27b", help="a preset of benchmark.models.make_model")
    command.add("--stages", type=int, default=2)
    command.add("--bad-flags", default=BAD_FLAGS, help="what the server is started with")
    command.add("--requests", type=at_least_one, default=40)
    command.add("--rate", type=float, default=2.0, help="requests a second")
    command.add("--ttft-ms", type=float, default=1000.0)
    command.add("--tpot-ms", type=float, default=100.0)
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    told, runs = _runs(options)
    return Report(
        name="tune_live",
        texts=[knob_table(told), promise_table(told, runs), *_notes(told)],
        facts={
            "model": {"preset": options.model, "stages": str(options.stages)},
            "load": {
                "requests": f"{options.requests} at {options.rate:g} a second",
                "wanted": f"ttft {options.ttft_ms:g} ms, tpot {options.tpot_ms:g} ms",
                "started with": options.bad_flags,
                "figures": f"medians (smallest to largest) of {options.rounds} rounds",
            },
        },
        record={"told": told, "runs": [asdict(run) for run in runs]},
    )


def knob_table(told: Mapping[str, Any]) -> str:
    """Markdown: what is to change."""
    rows = [[name, told["knobs_in_force"][name], value] for name, value in told["knobs"].items()]
    return markdown_table(
        ["knob", "as started", "proposed"], [[str(cell) for cell in row] for row in rows]
    )


def promise_table(told: Mapping[str, Any], runs: Sequence[TunedRun]) -> str:
    """Markdown: predicted beside measured, under either setting."""
    before, after = (
        [run for run in runs if run.knobs == knobs] for knobs in ("as started", "proposed")
    )
    rows = [
        [
            "in time, %",
            f"{100 * told['now']['target_share']:.0f}",
            str(spread([100 * run.target_share for run in before])),
            f"{100 * told['proposed']['target_share']:.0f}",
            str(spread([100 * run.target_share for run in after])),
        ]
    ]
    for name in LATENCIES:
        latency, rank = name.split()
        rows.append(
            [
                name,
                f"{told['now'][latency][rank]:.0f}",
                str(spread([run.latencies[name] for run in before])),
                f"{told['proposed'][latency][rank]:.0f}",
                str(spread([run.latencies[name] for run in after])),
            ]
        )
    heads = ["", "as started: predicted", "measured", "proposed: predicted", "measured"]
    return markdown_table(heads, rows)


def outcome(
    records: Sequence[RequestRecord], ttft_ms: float, tpot_ms: float
) -> tuple[float, dict[str, float]]:
    """The share of requests that met both latencies, and the ranks in `LATENCIES`."""
    ttfts = [one.first_token_ms for one in records]
    tpots = [
        (one.total_ms - one.first_token_ms) / (one.output_tokens - 1)
        if one.output_tokens > 1
        else 0
        for one in records
    ]
    met = [ttft <= ttft_ms and tpot <= tpot_ms for ttft, tpot in zip(ttfts, tpots, strict=True)]
    values = {"ttft_ms": sorted(ttfts), "tpot_ms": sorted(tpots)}
    ranks = {
        name: _rank(values[name.split()[0]], int(name.split()[1][1:]) / 100) for name in LATENCIES
    }
    return sum(met) / len(met), ranks


def _rank(ordered: Sequence[float], share: float) -> float:
    """The nearest rank, as the server has it."""
    return ordered[round(share * (len(ordered) - 1))]


def _notes(told: Mapping[str, Any]) -> list[str]:
    notes = [
        f"Tuning took {told['seconds']:.1f} s for {told['num_trials']} trials of "
        f"{told['num_requests']} requests, with step times fitted to {told['num_steps']} steps "
        f"(times {told['slowdown']:.2f})."
    ]
    if told["is_extrapolated"]:
        notes.append("It is marked as a guess: steps are larger than any that was measured.")
    if not told["is_complete"]:
        notes.append("Not everything was tried in time.")
    return notes


def _runs(options: Options) -> tuple[dict[str, Any], list[TunedRun]]:
    model = make_model(options.model)
    flags = f"--pp {options.stages} --pp-layer-partition even {options.bad_flags}"
    engine = parse_engine(
        f"ours {flags}", model, options.port, SCRATCH, usable_cores(), prefix_cache=True
    )
    load = Load(num_requests=options.requests, requests_per_s=options.rate)
    runs: list[TunedRun] = []
    work: list[Run] = []

    def run(round_number: int, knobs: str) -> None:
        _call(engine, "flush_cache", {})
        (measured,) = measure(engine, model, [load], round_number)
        work.append(measured.run)
        check_equal_work(work)
        ended = [one for record in measured.records for one in record.ended]
        share, latencies = outcome(ended, options.ttft_ms, options.tpot_ms)
        tokens_per_s = measured.run.metrics["total_throughput"]
        runs.append(
            TunedRun(
                round_number=round_number,
                knobs=knobs,
                target_share=share,
                latencies=latencies,
                tokens_per_s=tokens_per_s,
            )
        )
        told = ", ".join(f"{name} {value:.0f}" for name, value in latencies.items())
        say(f"round {round_number}, {knobs}: {share:.2f} in time, {told}")

    with running(engine, SCRATCH / "tune_live.log"):
        warm_up = dataclasses.replace(load, num_requests=16, seed=2)
        measure(engine, model, [warm_up], round_number=0)  # not counted
        began_s = time.monotonic()
        run(1, "as started")
        body = {"ttft_ms": options.ttft_ms, "tpot_ms": options.tpot_ms, "apply": True}
        body |= {"window_s": time.monotonic() - began_s, "timeout_s": TUNE_TIMEOUT_S}
        told = _call(engine, "pipeline/tune", body)
        if not told["knobs"]:
            raise EngineFailure(f"nothing better was found than what was set: {told}")
        say(f"proposed: {told['knobs']}")
        run(1, "proposed")
        as_started = {name: told["knobs_in_force"][name] for name in told["knobs"]}
        for number in range(2, options.rounds + 1):
            turns = [("as started", as_started), ("proposed", told["knobs"])]
            for name, knobs in turns if number % 2 else reversed(turns):
                _call(engine, "pipeline/throttle", knobs, method="PATCH")
                run(number, name)
    return told, runs


def _call(
    engine: Engine, route: str, body: Mapping[str, Any], method: str = "POST"
) -> dict[str, Any]:
    """The answer, empty where it is no JSON. Raises EngineFailure for a refusal."""
    request = urllib.request.Request(
        f"{engine.base_url}/{route}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
            text = reply.read()
    except urllib.error.HTTPError as error:
        raise EngineFailure(f"/{route}: {error.code} {error.read().decode()}") from error
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}


if __name__ == "__main__":
    sys.exit(main())
