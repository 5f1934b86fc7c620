"""Measures if one request can hurt another: the pace of a stream beside every hurtful request.

    python -m benchmark.robustness.hurtful_requests --url http://127.0.0.1:30000

The server runs the demo model (`make serve`). Prints the inter-token times of the stream, quiet and
beside the table of `hurtful_table.py`, and the slowest answer.
"""

import statistics
import sys
import time
from typing import Any

import requests

from benchmark.robustness.hurtful_table import HURTFUL_REQUESTS
from benchmark.robustness.neighbor import Neighbor
from benchmark.support.command import Command, Options, Report
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import EngineFailure

MAX_ANSWER_S = 1.0
MAX_P99_RATIO = 2.0
QUIET_ANSWERS = 10
# Between one request and the next: what is measured is what a request does, not a load of them.
PAUSE_S = 0.05


def measure(url: str) -> dict[str, Any]:
    """The record of one run: times in ms unless the name says seconds."""
    with Neighbor(url) as warm_up:
        pass
    with Neighbor(url, min_answers=QUIET_ANSWERS) as quiet:
        pass
    # Made before anything is timed: the stream's client shares this process.
    num_bytes = sum(len(request.payload) for request in HURTFUL_REQUESTS)
    answers: dict[str, float] = {}
    faults: dict[str, str] = {}
    with Neighbor(url) as beside:
        for request in HURTFUL_REQUESTS:
            started_s = time.perf_counter()
            fault = request.fault_of(request.send(url))
            answers[request.reason] = time.perf_counter() - started_s
            if fault:
                faults[request.reason] = fault
            time.sleep(PAUSE_S)
    slowest = sorted(answers, key=lambda reason: -answers[reason])[:10]
    quiet_p99, beside_p99 = _p99(quiet.gaps_ms), _p99(beside.gaps_ms)
    return {
        "requests": len(answers),
        "request_megabytes": num_bytes // 10**6,
        "quiet": _pace(quiet.gaps_ms),
        "beside": _pace(beside.gaps_ms),
        "p99_ratio": round(beside_p99 / quiet_p99, 2),
        "same_texts": set(warm_up.texts + quiet.texts + beside.texts) == {warm_up.texts[0]},
        "slowest_answers_s": {reason: round(answers[reason], 3) for reason in slowest},
        "faults": faults,
        "passed": not faults
        and beside_p99 <= MAX_P99_RATIO * quiet_p99
        and answers[slowest[0]] < MAX_ANSWER_S,
    }


def _p99(gaps_ms: list[float]) -> float:
    return statistics.quantiles(gaps_ms, n=100)[98]


def _pace(gaps_ms: list[float]) -> dict[str, float]:
    return {
        "tokens": len(gaps_ms),
        "p50_ms": round(statistics.median(gaps_ms), 2),
        "p99_ms": round(_p99(gaps_ms), 2),
        "max_ms": round(max(gaps_ms), 2),
    }


def _table(record: dict[str, Any]) -> str:
    """The stream's pace, and the two limits that a run is held to."""
    rows = [
        [f"the stream, {when}", *(str(record[when][name]) for name in ("p50_ms", "p99_ms"))]
        for when in ("quiet", "beside")
    ]
    slowest, seconds = next(iter(record["slowest_answers_s"].items()))
    return "\n\n".join(
        (
            markdown_table(["time between tokens, ms", "p50", "p99"], rows),
            f"{record['requests']} requests; p99 beside them {record['p99_ratio']} times the quiet "
            f"one (at most {MAX_P99_RATIO}); slowest answer {seconds} s (at most {MAX_ANSWER_S}): "
            f"{slowest}; texts equal: {record['same_texts']}; faults: {len(record['faults'])}; "
            f"passed: {record['passed']}",
        )
    )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__)
    command.add("--url", default="http://127.0.0.1:30000", help="of the server")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    try:
        requests.get(options.url + "/health", timeout=30).raise_for_status()
    except requests.RequestException as error:
        raise EngineFailure(
            f"no server answers at {options.url} ({error}); start one with `make serve`, or name "
            "it: --url"
        ) from error
    record = measure(options.url)
    problems = [f"{reason}: {fault}" for reason, fault in record["faults"].items()]
    if not record["passed"] and not problems:
        problems.append("a limit of the table is not kept")
    return Report(name="hurtful_requests", texts=[_table(record)], record=record, problems=problems)


if __name__ == "__main__":
    sys.exit(main())
