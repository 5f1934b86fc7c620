"""Measures the effect of a layer move on users: the longest gap in their streams, and the rate
around it.

    python -m benchmark.moves.move_gaps
    python -m benchmark.moves.move_gaps --stages 4 --moves 20

Run by hand, some three minutes for each weights mode. Clients stream answers all the time, each the
next one when the last has ended; every few seconds a layer moves to the next plan of a cycle. What
a move costs is compared with times of the same run in which nothing moves. In each round the modes
of `--migration-weights` take turns.
"""

import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

import requests

from benchmark.support.command import Command, Options, Report, at_least_one, progress
from benchmark.support.dated_result import markdown_table
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import make_model
from benchmark.support.paths import SCRATCH
from sgl_pipeline.errors import SglPipelineError

WEIGHTS_MODES = ("background", "resident")
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 300
WARM_UP_S = 5.0
# A move's marks: from its begin until this long after it is over. Equal times without a move, and
# as long before the next one, are what it is compared with.
AFTER_S = 0.3
REST_S = 2.0
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """One move as its users saw it. `longest_gap_ms` is of any stream between the move's begin and
    `AFTER_S` after its end, `usual_gap_ms` the same in the equally long time before it; the rates
    are of the second from the begin on and of the whole rest before it. The rest is the server's
    own account."""

    weights: str
    round_number: int
    before: list[int]
    after: list[int]
    longest_gap_ms: float
    usual_gap_ms: float
    tokens_per_s: float
    usual_tokens_per_s: float
    prepare_ms: float
    load_ms: float
    patch_ms: float
    wait_ms: float
    copied_bytes: int
    patched_bytes: int


class Streams:
    """Clients in threads; `moments` are of all tokens, for each stream of its own."""

    def __init__(self, url: str, count: int) -> None:
        self.moments: list[list[float]] = [[] for _ in range(count)]
        self.errors: list[str] = []
        self._url = url + "/generate"
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for number, thread in enumerate(self._threads):
            thread.start()
            time.sleep(0.05 * (number % 4))  # so that their prompts do not come together

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def longest_gap_ms(self, start_s: float, end_s: float) -> float:
        """Between two tokens of one answer, of which the later came in that time."""
        gaps = [
            later - earlier
            for moments in list(self.moments)
            for earlier, later in pairwise(moments)
            if start_s <= later <= end_s and earlier > 0.0
        ]
        return max(gaps, default=0.0) * 1e3

    def tokens_per_s(self, start_s: float, end_s: float) -> float:
        count = sum(start_s <= one < end_s for moments in self.moments for one in moments)
        return count / (end_s - start_s)

    def _run(self, number: int) -> None:
        answer = 0
        while not self._is_over.is_set():
            answer += 1
            first = number * 7919 + answer * 104_729
            prompt = [(first + place * 31) % 30_000 + 10 for place in range(PROMPT_TOKENS)]
            body = {
                "input_ids": prompt,
                "sampling_params": {
                    "max_new_tokens": OUTPUT_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                },
                "stream": True,
            }
            try:
                self._stream(number, body)
            except (requests.RequestException, ValueError) as error:
                self.errors.append(repr(error))
                return

    def _stream(self, number: int, body: dict[str, Any]) -> None:
        moments = self.moments[number]
        # Keeps the wait for an answer's first token out of the gaps.
        moments.append(0.0)
        with requests.post(self._url, json=body, stream=True, timeout=_TIMEOUT_S) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    moments.append(time.monotonic())
                    if "error" in json.loads(line[6:]):
                        raise ValueError(line.decode())
                if self._is_over.is_set():
                    return


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=2, port=31900)
    command.add("--stages", type=int, default=2)
    command.add("--model", default="0.27b", help="preset of benchmark.models.make_model")
    command.add("--clients", type=at_least_one, default=16)
    command.add("--moves", type=at_least_one, default=24, help="of each server")
    return command.run(_measure_all, argv)


def _measure_all(options: Options) -> Report:
    costs: list[MoveCost] = []
    with progress(options.rounds * len(WEIGHTS_MODES) * options.moves, "moves") as bar:
        for round_number, weights in product(range(options.rounds), WEIGHTS_MODES):
            for cost in _measure(options, weights, round_number):
                costs.append(cost)
                bar.update()
    return Report(
        name="move_gaps",
        texts=[move_table(costs)],
        facts={
            "model": {"preset": options.model, "stages": str(options.stages)},
            "load": {
                "clients": f"{options.clients}, always streaming",
                "tokens": f"{PROMPT_TOKENS} in, {OUTPUT_TOKENS} out",
            },
        },
        record={"moves": [asdict(one) for one in costs]},
    )


def _measure(options: Options, weights: str, round_number: int) -> Iterator[MoveCost]:
    """One server and its moves."""
    flags = f"--migration manual --migration-weights {weights}"
    engine = parse_engine(
        f"ours --pp {options.stages} {flags}",
        make_model(options.model),
        options.port,
        SCRATCH,
        usable_cores(),
    )
    with running(engine, SCRATCH / "move_gaps.log"):
        plan = requests.get(engine.base_url + "/pipeline/plan", timeout=_TIMEOUT_S).json()
        cycle = _cycle(plan["layer_counts"])
        streams = Streams(engine.base_url, options.clients)
        streams.start()
        time.sleep(WARM_UP_S)
        for number in range(options.moves):
            time.sleep(REST_S)
            yield _move(engine.base_url, streams, cycle[number % len(cycle)], weights, round_number)
        streams.stop()
        if streams.errors:
            raise SglPipelineError(f"a client got an error: {streams.errors[0]}")


def _cycle(counts: list[int]) -> list[list[int]]:
    """Plans that end where they began: one layer leaves the first stage for the last, and back, and
    the other way around."""
    down = [counts[0] - 1, *counts[1:-1], counts[-1] + 1]
    up = [counts[0] + 1, *counts[1:-1], counts[-1] - 1]
    return [down, counts, up, counts]


def _move(
    url: str, streams: Streams, layer_counts: list[int], weights: str, round_number: int
) -> MoveCost:
    began_s = time.monotonic()
    reply = requests.post(
        url + "/pipeline/plan", json={"layer_counts": layer_counts}, timeout=_TIMEOUT_S
    )
    ended_s = time.monotonic()
    if reply.status_code != 200:
        raise SglPipelineError(f"a move was answered {reply.status_code}: {reply.text}")
    move = reply.json()["move"]
    time.sleep(max(AFTER_S, 1.0 - (ended_s - began_s)))
    length_s = ended_s - began_s + AFTER_S
    return MoveCost(
        weights=weights,
        round_number=round_number,
        longest_gap_ms=streams.longest_gap_ms(began_s, ended_s + AFTER_S),
        usual_gap_ms=streams.longest_gap_ms(began_s - length_s, began_s),
        tokens_per_s=streams.tokens_per_s(began_s, began_s + 1.0),
        usual_tokens_per_s=streams.tokens_per_s(began_s - REST_S, began_s),
        **{name: move[name] for name in _FROM_SERVER},
    )


_FROM_SERVER = (
    "before",
    "after",
    "prepare_ms",
    "load_ms",
    "patch_ms",
    "wait_ms",
    "copied_bytes",
    "patched_bytes",
)


def move_table(costs: Sequence[MoveCost]) -> str:
    """Markdown: one row a weights mode, medians over the moves with the 99th percentile."""
    heads = ["weights", "moves", "longest gap, ms", "without a move", "gap beyond that, ms"]
    heads += ["tokens/s in its second", "of the usual", "prepare ms", "load ms"]
    heads += ["patch + wait ms", "copied MB", "patched MB"]
    rows = []
    for weights in dict.fromkeys(one.weights for one in costs):
        of_mode = [one for one in costs if one.weights == weights]
        columns = [
            [one.longest_gap_ms for one in of_mode],
            [one.usual_gap_ms for one in of_mode],
            [one.longest_gap_ms - one.usual_gap_ms for one in of_mode],
            [one.tokens_per_s for one in of_mode],
            [one.tokens_per_s / one.usual_tokens_per_s for one in of_mode],
            [one.prepare_ms for one in of_mode],
            [one.load_ms for one in of_mode],
            [one.patch_ms + one.wait_ms for one in of_mode],
            [one.copied_bytes * 1e-6 for one in of_mode],
            [one.patched_bytes * 1e-6 for one in of_mode],
        ]
        rows.append([weights, str(len(of_mode)), *map(_median_and_tail, columns)])
    return markdown_table(heads, rows)


def _median_and_tail(values: Sequence[float]) -> str:
    """`median (1 % to 99 %)`."""
    if len(values) < 2:
        return f"{values[0]:.3g}"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return f"{statistics.median(values):.3g} ({cuts[0]:.3g} to {cuts[-1]:.3g})"


if __name__ == "__main__":
    sys.exit(main())
