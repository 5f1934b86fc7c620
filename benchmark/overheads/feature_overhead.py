"""Measures the cost of each feature of a request: TPOT with it over TPOT without, in one server.

    python -m benchmark.overheads.feature_overhead --rounds 5

Equal requests of one kind at a time stream from our server; the kinds take turns within a round, so
that what the machine does meanwhile hits all alike. A request alone, with everything off, must have
the same tokens after every round.
"""

import concurrent.futures
import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import requests

from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import EngineFailure
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import make_model
from benchmark.support.paths import SCRATCH
from benchmark.support.serving_report import spread
from sgl_pipeline.errors import SglPipelineError

PRESET = "0.27b"
VOCAB_SIZE = 32000
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 48
TIMEOUT_S = 300.0
BASELINE = "nothing"

_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 40},
    },
    "required": ["name", "tags"],
}

# What is added to a request: to its sampling parameters, or beside them.
SAMPLING: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "temperature, top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "frequency and presence penalty": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logit_bias of 300 tokens": {"logit_bias": {str(token): 0.01 for token in range(1, 301)}},
    "min_new_tokens": {"min_new_tokens": OUTPUT_TOKENS},
    "4 stop strings": {"stop": ["\x01\x02", "wibble", "wobble", "END OF TEXT"]},
    "stop_regex": {"stop_regex": "(ab|cd){3,9}x+y"},
    "regex": {"regex": "[a-z]{200}"},
    "json_schema": {"json_schema": json.dumps(_OBJECT)},
}
BESIDE: dict[str, dict[str, Any]] = {
    "log-probabilities": {"return_logprob": True},
    "the 20 likeliest tokens": {"return_logprob": True, "top_logprobs_num": 20},
}
FEATURES = (*SAMPLING, *BESIDE)


def body_of(feature: str, number: int) -> dict[str, Any]:
    """The `number`-th request with that feature."""
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    prompt = [
        (7 + 131 * number + 17 * place) % (VOCAB_SIZE - 1000) for place in range(PROMPT_TOKENS)
    ]
    return {
        "input_ids": prompt,
        "sampling_params": sampling | SAMPLING.get(feature, {}),
        "stream": True,
        **BESIDE.get(feature, {}),
    }


def stream(url: str, body: Mapping[str, Any]) -> tuple[float, list[int]]:
    """The mean time per further token in ms, and the tokens."""
    first_s = last_s = 0.0
    tokens: list[int] = []
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                reply = json.loads(line[6:])
                tokens = reply.get("output_ids", tokens)
    if len(tokens) < 2:
        raise SglPipelineError(f"{len(tokens)} tokens came back for {body['sampling_params']}")
    return (last_s - first_s) * 1e3 / (len(tokens) - 1), tokens


def measure(url: str, feature: str, concurrency: int) -> float:
    """The median TPOT in ms over `concurrency` requests that run together."""
    bodies = [body_of(feature, number) for number in range(concurrency)]
    with concurrent.futures.ThreadPoolExecutor(concurrency) as clients:
        answers = list(clients.map(lambda body: stream(url, body), bodies))
    return statistics.median(tpot_ms for tpot_ms, _ in answers)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=5, port=31950)
    command.add("--concurrency", type=at_least_one, default=8, help="requests that run together")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    engine = parse_engine("ours --pp 2", make_model(PRESET), options.port, SCRATCH, usable_cores())
    times: dict[str, list[float]] = {feature: [] for feature in FEATURES}
    with (
        running(engine, SCRATCH / "feature_overhead.log"),
        progress(options.rounds, "rounds") as bar,
    ):
        _, plain = stream(engine.base_url, body_of(BASELINE, 0))
        for feature in FEATURES:  # what is compiled or loaded at first use is not measured
            measure(engine.base_url, feature, options.concurrency)
        for round_number in range(1, options.rounds + 1):
            for feature in FEATURES:
                times[feature].append(measure(engine.base_url, feature, options.concurrency))
            if stream(engine.base_url, body_of(BASELINE, 0))[1] != plain:
                raise EngineFailure("the same request had other tokens than before")
            say(f"round {round_number}: {BASELINE} {times[BASELINE][-1]:.1f} ms")
            bar.update()
    workload = {
        "requests": f"{options.concurrency} together",
        "tokens": f"{PROMPT_TOKENS} in, {OUTPUT_TOKENS} out",
        "model": f"{PRESET}, vocabulary {VOCAB_SIZE}, pp 2",
        "figures": f"median TPOT, medians (min to max) of {options.rounds} rounds",
    }
    return Report(
        name="feature_overhead",
        texts=[_table(times)],
        facts={"workload": workload},
        record={"tpot_ms": times},
    )


def _table(times: Mapping[str, list[float]]) -> str:
    """TPOT of each feature, and its ratio to that of nothing, taken within each round."""
    rows = []
    for feature, values in times.items():
        ratios = [value / base for value, base in zip(values, times[BASELINE], strict=True)]
        rows.append([feature, str(spread(values)), f"{statistics.median(ratios):.3f}"])
    return markdown_table(["every request has", "TPOT ms", f"of {BASELINE}"], rows)


if __name__ == "__main__":
    sys.exit(main())
