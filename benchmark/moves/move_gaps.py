"""Measures the effect of a layer move on users: the longest gap in their streams, and the rate
around it.

    python -m benchmark.moves.move_gaps
    python -m benchmark.moves.move_gaps --stages 4 --moves 20
    python -m benchmark.moves.move_gaps --models 0.27b 0.45b-hybrid --weights resident

Run by hand, some two minutes for each server: rounds x models x weights modes. Clients stream
answers all the time, each the next one when the last has ended; every few seconds a layer moves to
the next plan of a cycle. What a move costs is compared with times of the same run in which nothing
moves. In each round the models and the modes of `--migration-weights` take turns. A layer with
states takes those of all streams along.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import requests

from benchmark.moves.streams import OUTPUT_TOKENS, PROMPT_TOKENS, Streams
from benchmark.support.command import Command, Options, Report, at_least_one, progress
from benchmark.support.dated_result import markdown_table
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import make_model
from benchmark.support.paths import SCRATCH
from sgl_pipeline.errors import SglPipelineError
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import layer_moves

WEIGHTS_MODES = ("background", "resident")
WARM_UP_S = 5.0
# A move's marks: from its begin until this long after it is over. Equal times without a move, and
# as long before the next one, are what it is compared with.
AFTER_S = 0.3
REST_S = 2.0
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """One move as its users saw it. `longest_gap_ms` is of any stream between the move's begin and
    `AFTER_S` after its end, `usual_gap_ms` the same in the equally long time before it, and
    `token_ms` the median gap of the whole rest before it; the rates are of the second from the
    begin on and of that rest. Of the layers that moved `moved_states` have states. The rest is the
    server's own account."""

    model: str
    weights: str
    round_number: int
    before: list[int]
    after: list[int]
    moved_states: int
    longest_gap_ms: float
    usual_gap_ms: float
    token_ms: float
    tokens_per_s: float
    usual_tokens_per_s: float
    prepare_ms: float
    load_ms: float
    patch_ms: float
    wait_ms: float
    copied_bytes: int
    patched_bytes: int


@dataclass(frozen=True, slots=True)
class _Server:
    """One that serves, by `layer_types` of its model (none: all layers are alike)."""

    url: str
    model: str
    layer_types: tuple[str, ...]
    weights: str
    round_number: int


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=2, port=31900)
    command.add("--stages", type=int, default=2)
    presets = "presets of benchmark.models.make_model"
    command.add("--models", nargs="+", default=["0.27b"], help=presets)
    command.add("--weights", nargs="+", choices=WEIGHTS_MODES, default=WEIGHTS_MODES)
    command.add("--clients", type=at_least_one, default=16)
    command.add("--moves", type=at_least_one, default=24, help="of each server")
    return command.run(_measure_all, argv)


def _measure_all(options: Options) -> Report:
    costs: list[MoveCost] = []
    servers = [*product(range(options.rounds), options.models, options.weights)]
    with progress(len(servers) * options.moves, "moves") as bar:
        for round_number, model, weights in servers:
            for cost in _measure(options, model, weights, round_number):
                costs.append(cost)
                bar.update()
    return Report(
        name="move_gaps",
        texts=[move_table(costs)],
        facts={
            "model": {"presets": ", ".join(options.models), "stages": str(options.stages)},
            "load": {
                "clients": f"{options.clients}, always streaming",
                "tokens": f"{PROMPT_TOKENS} in, {OUTPUT_TOKENS} out",
            },
        },
        record={"moves": [asdict(one) for one in costs]},
    )


def _measure(options: Options, model: str, weights: str, round_number: int) -> Iterator[MoveCost]:
    """One server and its moves."""
    flags = f"--migration manual --migration-weights {weights}"
    flags += f" --max-running-requests {options.clients}"
    directory = make_model(model)
    engine = parse_engine(
        f"ours --pp {options.stages} {flags}",
        directory,
        options.port,
        SCRATCH,
        usable_cores(),
    )
    with running(engine, SCRATCH / "move_gaps.log"):
        server = _Server(engine.base_url, model, _layer_types(directory), weights, round_number)
        plan = requests.get(server.url + "/pipeline/plan", timeout=_TIMEOUT_S).json()
        cycle = _cycle(plan["layer_counts"])
        streams = Streams(server.url, options.clients)
        streams.start()
        time.sleep(WARM_UP_S)
        for number in range(options.moves):
            time.sleep(REST_S)
            yield _move(server, streams, cycle[number % len(cycle)])
        streams.stop()
        if streams.errors:
            raise SglPipelineError(f"a client got an error: {streams.errors[0]}")


def _layer_types(directory: Path) -> tuple[str, ...]:
    return tuple(json.loads((directory / "config.json").read_text()).get("layer_types", ()))


def _cycle(counts: list[int]) -> list[list[int]]:
    """Plans that end where they began: one layer leaves the first stage for the last, and back, and
    the other way around."""
    down = [counts[0] - 1, *counts[1:-1], counts[-1] + 1]
    up = [counts[0] + 1, *counts[1:-1], counts[-1] - 1]
    return [down, counts, up, counts]


def _move(server: _Server, streams: Streams, layer_counts: list[int]) -> MoveCost:
    began_s = time.monotonic()
    usual_tokens_per_s = streams.tokens_per_s(began_s - REST_S, began_s)
    if usual_tokens_per_s == 0:
        raise SglPipelineError(
            f"no token came in the {REST_S:g} s before a move: {server.model} is too slow here for "
            "so many --clients, and the rate during a move has nothing to be compared with"
        )
    reply = requests.post(
        server.url + "/pipeline/plan", json={"layer_counts": layer_counts}, timeout=_TIMEOUT_S
    )
    ended_s = time.monotonic()
    if reply.status_code != 200:
        raise SglPipelineError(f"a move was answered {reply.status_code}: {reply.text}")
    move = reply.json()["move"]
    time.sleep(max(AFTER_S, 1.0 - (ended_s - began_s)))
    length_s = ended_s - began_s + AFTER_S
    return MoveCost(
        model=server.model,
        weights=server.weights,
        round_number=server.round_number,
        moved_states=count_states(server.layer_types, move["before"], move["after"]),
        longest_gap_ms=streams.longest_gap_ms(began_s, ended_s + AFTER_S),
        usual_gap_ms=streams.longest_gap_ms(began_s - length_s, began_s),
        token_ms=streams.usual_gap_ms(began_s - REST_S, began_s),
        tokens_per_s=streams.tokens_per_s(began_s, began_s + 1.0),
        usual_tokens_per_s=usual_tokens_per_s,
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


def count_states(layer_types: Sequence[str], before: Sequence[int], after: Sequence[int]) -> int:
    """Number of layers with states that change hands between two splits."""
    moved = layer_moves(StagePlan(0, tuple(before)), StagePlan(1, tuple(after)))
    return sum(layer_types[one.layer] == "linear_attention" for one in moved if layer_types)


def move_table(costs: Sequence[MoveCost]) -> str:
    """Markdown: one row a model, weights mode and number of layers with states that moved, medians
    over the moves with the 99th percentile."""
    heads = ["model", "weights", "moved with states", "moves", "longest gap, ms", "without a move"]
    heads += ["gap beyond that, ms", "a token, ms", "tokens/s in its second", "of the usual"]
    heads += ["prepare ms", "load ms", "patch + wait ms", "copied MB", "patched MB"]
    rows = []
    for kind in sorted({(one.model, one.weights, one.moved_states) for one in costs}):
        of_kind = [one for one in costs if (one.model, one.weights, one.moved_states) == kind]
        columns = [
            [one.longest_gap_ms for one in of_kind],
            [one.usual_gap_ms for one in of_kind],
            [one.longest_gap_ms - one.usual_gap_ms for one in of_kind],
            [one.token_ms for one in of_kind],
            [one.tokens_per_s for one in of_kind],
            [one.tokens_per_s / one.usual_tokens_per_s for one in of_kind],
            [one.prepare_ms for one in of_kind],
            [one.load_ms for one in of_kind],
            [one.patch_ms + one.wait_ms for one in of_kind],
            [one.copied_bytes * 1e-6 for one in of_kind],
            [one.patched_bytes * 1e-6 for one in of_kind],
        ]
        rows.append([*map(str, kind), str(len(of_kind)), *map(_median_and_tail, columns)])
    return markdown_table(heads, rows)


def _median_and_tail(values: Sequence[float]) -> str:
    """`median (1 % to 99 %)`."""
    if len(values) < 2:
        return f"{values[0]:.3g}"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return f"{statistics.median(values):.3g} ({cuts[0]:.3g} to {cuts[-1]:.3g})"


if __name__ == "__main__":
    sys.exit(main())
