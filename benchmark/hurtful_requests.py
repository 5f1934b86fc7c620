"""Whether one request can hurt another: the pace of a stream beside every hurtful request.

    python -m benchmark.hurtful_requests --url http://127.0.0.1:30000

The server runs the demo model (`make serve`). Prints, and with `--output` writes, the inter-token
times of the stream, quiet and beside the table of `hurtful_table.py`, and the slowest answers.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import requests

from benchmark.hurtful_table import HURTFUL_REQUESTS
from benchmark.neighbour import Neighbour

MAX_ANSWER_S = 1.0
MAX_P99_RATIO = 2.0
QUIET_ANSWERS = 10
# Between one request and the next: what is measured is what a request does, not a load of them.
PAUSE_S = 0.05


def measure(url: str) -> dict[str, Any]:
    """The record of one run: times in ms unless the name says seconds."""
    with Neighbour(url) as warm_up:
        pass
    with Neighbour(url, min_answers=QUIET_ANSWERS) as quiet:
        pass
    # Made before anything is timed: the stream's client shares this process.
    num_bytes = sum(len(request.payload) for request in HURTFUL_REQUESTS)
    answers: dict[str, float] = {}
    faults: dict[str, str] = {}
    with Neighbour(url) as beside:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--output", type=Path, help="also written here, as JSON")
    options = parser.parse_args()
    requests.get(options.url + "/health", timeout=30).raise_for_status()
    record = measure(options.url)
    text = json.dumps(record, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
