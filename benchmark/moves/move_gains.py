"""Measures the worth of layer moves: `--migration auto` beside every fixed layer split, on loads
that want different ones.

    python -m benchmark.moves.move_gains

Run by hand, some ten minutes a round. The model has a large vocabulary: its head takes as long as
several layers when many rows are drawn, and next to nothing in a prefill. One server measures all
fixed splits, moving from one to the next by hand, the other one starts with an even split and moves
by itself. Loads are closed loops of clients, decode-heavy, prefill-heavy, and one that swings
between the two. A split's score under the swing is its mean share, over both phases, of what the
best split does when that phase's load lasts; rates have a spread, so it may be above 1.
"""

import itertools
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import requests

from benchmark.support.command import Command, Options, Report, progress
from benchmark.support.dated_result import markdown_table
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import make_model
from benchmark.support.paths import SCRATCH
from sgl_pipeline.errors import SglPipelineError

MODEL = "0.52b-152k"
NUM_LAYERS = 16
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that each ask again when they have their answer."""

    clients: int
    input_tokens: int
    output_tokens: int

    def first_output_tokens(self, client: int) -> int:
        """The length of a client's first answer: all lengths among the clients, so that prompts
        come evenly from the beginning on, and not from all clients at once every so often."""
        return -(-self.output_tokens * (client + 1) // self.clients)


LOADS = {
    "decode-heavy": ClosedLoop(clients=48, input_tokens=16, output_tokens=192),
    "prefill-heavy": ClosedLoop(clients=12, input_tokens=384, output_tokens=2),
}
SWING = "swing"


class Clients:
    """Serve one load after the other; tokens in and out of answers are kept by moment.

    They ask `PATH`; a subclass may ask another one.
    """

    PATH = "/generate"

    def __init__(self, url: str, load: ClosedLoop) -> None:
        self._url = url + self.PATH
        self._load = load
        self._lock = threading.Lock()
        self._moments: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()
        self._errors: list[str] = []
        most = max(one.clients for one in (load, *LOADS.values()))
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(most)
        ]
        for thread in self._threads:
            thread.start()

    def put_on(self, load: ClosedLoop) -> None:
        """From now on; answers under way are given up, so that nothing of the old load is left."""
        self._load = load

    def rate(self, settle_s: float, measured_s: float) -> float:
        """Tokens a second, in and out, of `measured_s` after `settle_s`."""
        return sum(self.rates(settle_s, measured_s))

    def rates(self, settle_s: float, measured_s: float) -> tuple[float, float]:
        """The same, tokens in and tokens out apart."""
        time.sleep(settle_s)
        start_s = time.monotonic()
        time.sleep(measured_s)
        end_s = time.monotonic()
        if self._errors:
            raise SglPipelineError(f"a client got an error: {self._errors[0]}")
        with self._lock:
            counted = [tokens for moment, *tokens in self._moments if start_s <= moment < end_s]
        took_s = end_s - start_s
        return sum(one[0] for one in counted) / took_s, sum(one[1] for one in counted) / took_s

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        before: ClosedLoop | None = None
        with requests.Session() as session:
            while not self._is_over.is_set():
                load = self._load
                if number >= load.clients:
                    before = None
                    time.sleep(0.05)
                    continue
                length = load.output_tokens if load is before else load.first_output_tokens(number)
                before = load
                try:
                    self._ask(session, load, length)
                except (requests.RequestException, ValueError) as error:
                    self._errors.append(repr(error))
                    return

    def _ask(self, session: requests.Session, load: ClosedLoop, output_tokens: int) -> None:
        first = next(self._numbers) * 7919
        prompt = [(first + place * 31) % 30_000 + 10 for place in range(load.input_tokens)]
        body = self._body(prompt, output_tokens)
        shown = 0
        with session.post(self._url, json=body, stream=True, timeout=_TIMEOUT_S) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith(b"data: {") and b'"error"' in line[:40]:
                    raise ValueError(line.decode())
                if tokens_out := self._tokens_out(line, shown, output_tokens):
                    tokens_in = 0 if shown else load.input_tokens
                    shown += tokens_out
                    with self._lock:
                        self._moments.append((time.monotonic(), tokens_in, tokens_out))
                if self._load is not load:
                    return

    def _body(self, prompt: list[int], output_tokens: int) -> dict[str, Any]:
        """The body of a request for exactly `output_tokens`, greedy and streamed."""
        return {
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "stream": True,
        }

    def _tokens_out(self, line: bytes, shown: int, output_tokens: int) -> int:
        """The tokens that a line of an answer counts, of which `shown` of `output_tokens` were
        counted."""
        return 1 if line.startswith(b"data: {") else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Tokens a second, in and out, of one load under one split, or under `auto` with the split that
    it had at the end."""

    round_number: int
    split: tuple[int, ...]
    is_auto: bool
    load: str
    tokens_per_s: float


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=2, port=31900)
    command.add("--first-stage", default="5-13", help="layers of it, of the fixed splits")
    command.add("--measured-s", type=float, default=12.0, help="of each load")
    command.add("--settle-s", type=float, default=4.0, help="before that")
    command.add("--phase-s", type=float, default=30.0, help="of the swing")
    command.add("--swings", type=int, default=2, help="times both phases come")
    command.add("--swing-first", default="8,11,13", help="fixed splits that get the swing")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    rates: list[Rate] = []
    with progress(2 * options.rounds, "servers") as bar:
        for round_number in range(options.rounds):
            for measure in (_fixed_splits, _auto):
                rates += measure(options, round_number)
                bar.update()
    return Report(
        name="move_gains",
        texts=[gain_table(rates)],
        facts={
            "model": {"preset": MODEL, "stages": "2"},
            "load": {name: str(load) for name, load in LOADS.items()},
            "figures": {
                "rates": f"tokens in and out a second, of {options.measured_s:g} s",
                "swing": f"{options.swings} times both loads, {options.phase_s:g} s each",
            },
        },
        record={"rates": [asdict(one) for one in rates]},
    )


def _fixed_splits(options: Options, round_number: int) -> list[Rate]:
    """All loads under all splits, one server."""
    least, most = map(int, options.first_stage.split("-"))
    flags = f"--migration manual --migration-spare-layers {NUM_LAYERS} --pp-layer-partition even"
    engine = parse_engine(
        f"ours --pp 2 {flags}", make_model(MODEL), options.port, SCRATCH, usable_cores()
    )
    rates = []
    with running(engine, SCRATCH / "move_gains_fixed.log"):
        clients = Clients(engine.base_url, LOADS["decode-heavy"])
        for first in range(least, most + 1):
            split = (first, NUM_LAYERS - first)
            _move_to(engine.base_url, split)
            for name, load in LOADS.items():
                clients.put_on(load)
                rate = clients.rate(options.settle_s, options.measured_s)
                rates.append(_rate(round_number, split, False, name, rate))
            if str(first) in options.swing_first.split(","):
                rates += _swing(options, clients, engine.base_url, round_number, is_auto=False)
        clients.stop()
    return rates


def _auto(options: Options, round_number: int) -> list[Rate]:
    """All loads on a server that starts with an even split and moves by itself."""
    engine = parse_engine(
        "ours --pp 2 --migration auto --migration-spare-layers 6 --pp-layer-partition even",
        make_model(MODEL),
        options.port,
        SCRATCH,
        usable_cores(),
    )
    rates = []
    with running(engine, SCRATCH / "move_gains_auto.log"):
        clients = Clients(engine.base_url, LOADS["decode-heavy"])
        for name, load in LOADS.items():
            clients.put_on(load)
            # Time to find its split; how long that takes is what the swing is for.
            rate = clients.rate(options.phase_s, options.measured_s)
            rates.append(_rate(round_number, current_split(engine.base_url), True, name, rate))
        rates += _swing(options, clients, engine.base_url, round_number, is_auto=True)
        clients.stop()
    return rates


def _swing(
    options: Options, clients: Clients, url: str, round_number: int, *, is_auto: bool
) -> list[Rate]:
    """Both loads in turns."""
    rates = []
    for _ in range(options.swings):
        for name, load in LOADS.items():
            clients.put_on(load)
            rate = clients.rate(0.0, options.phase_s)
            split = current_split(url)
            rates.append(_rate(round_number, split, is_auto, f"{SWING}: {name}", rate))
    return rates


def _rate(
    round_number: int, split: tuple[int, ...], is_auto: bool, load: str, tokens_per_s: float
) -> Rate:
    kind = "auto, at" if is_auto else "fixed"
    print(f"round {round_number}, {kind} {split}, {load}: {tokens_per_s:.0f} tok/s", flush=True)
    return Rate(
        round_number=round_number,
        split=split,
        is_auto=is_auto,
        load=load,
        tokens_per_s=tokens_per_s,
    )


def current_split(url: str) -> tuple[int, ...]:
    """The layers of each stage, as the server says."""
    plan = requests.get(url + "/pipeline/plan", timeout=_TIMEOUT_S).json()
    return tuple(plan["layer_counts"])


def _move_to(url: str, split: tuple[int, ...]) -> None:
    if current_split(url) == split:
        return
    body = {"layer_counts": list(split)}
    reply = requests.post(url + "/pipeline/plan", json=body, timeout=_TIMEOUT_S)
    if reply.status_code != 200:
        raise SglPipelineError(f"a move was answered {reply.status_code}: {reply.text}")


def gain_table(rates: Sequence[Rate]) -> str:
    """Markdown: medians over the rounds; shares are of the best fixed split of the load."""
    splits = list(dict.fromkeys(one.split for one in rates if not one.is_auto))
    fixed = {(split, load): _median(rates, load, split=split) for split in splits for load in LOADS}
    best = {load: max(fixed[split, load] for split in splits) for load in LOADS}
    heads = ["split", *(f"{load}, tok/s (share of the best)" for load in LOADS), "swing, score"]
    rows = []
    for split in splits:
        shares = [fixed[split, load] / best[load] for load in LOADS]
        cells = [
            f"{fixed[split, load]:.0f} ({share:.2f})"
            for load, share in zip(LOADS, shares, strict=True)
        ]
        rows.append([",".join(map(str, split)), *cells, _score(rates, best, split)])
    cells = []
    for load in LOADS:
        rate = _median(rates, load, split=None)
        cells.append(f"{rate:.0f} ({rate / best[load]:.2f})")
    rows.append(["auto", *cells, _score(rates, best, None)])
    return markdown_table(heads, rows)


def _score(rates: Sequence[Rate], best: dict[str, float], split: tuple[int, ...] | None) -> str:
    """Under the swing, of a fixed split or (None) of `auto`."""
    swung = {one.split for one in rates if one.load.startswith(SWING) and not one.is_auto}
    if split is not None and split not in swung:
        return "-"
    shares = [_median(rates, f"{SWING}: {load}", split=split) / best[load] for load in LOADS]
    return f"{statistics.fmean(shares):.3f}"


def _median(rates: Sequence[Rate], load: str, *, split: tuple[int, ...] | None) -> float:
    """The median of the runs of `load` under a fixed split, or under `auto` where it is None."""
    return statistics.median(
        one.tokens_per_s
        for one in rates
        if one.load == load
        and (one.is_auto if split is None else one.split == split)
        and (split is None or not one.is_auto)
    )


if __name__ == "__main__":
    sys.exit(main())
