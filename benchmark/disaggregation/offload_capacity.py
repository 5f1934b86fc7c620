"""Counts requests that decode at once when attention is lent back, and measures their speed.

    python -m benchmark.disaggregation.offload_capacity
    python -m benchmark.disaggregation.offload_capacity --rounds 2 --ratios 0,inf

Run by hand, as root, on a quiet machine, some ten minutes. A prefill server with a large pool has
one core, and decode servers with a small one share the other: one for each offload ratio, which
take turns. Clients ask again when they have their answer, more of them than a small pool has room
for. Memory and its bandwidth are one for both cores, so this shows capacity and what a layer's way
costs; a gain in speed needs machines apart. Greedy answers must be the same tokens with each ratio,
or the exit code is 1.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median
from threading import Event
from typing import Any

import requests

from benchmark.disaggregation.apart_report import (
    ALL_KINDS,
    GAP_P99,
    OUTPUT_RATE,
    TPOT_P50,
    TTFT_P50,
    Figure,
    LoadRun,
    figures,
)
from benchmark.disaggregation.mixed_clients import run_load
from benchmark.disaggregation.mixed_load import Kind, MixedLoad, Place
from benchmark.disaggregation.setups import LendingSetup, lending_setups
from benchmark.hosts.namespaces import hosts, why_no_hosts
from benchmark.models.make_model import PRESETS
from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import EngineFailure
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model, turns

_POLL_S = 0.25
_LENDS = "--enable-attention-offload"
_RATIO = "--attention-offload-ratio"
_KIND = "answers"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a decode server: requests that run, and those whose attention is elsewhere."""

    running: int
    offloaded: int
    wait_share: float
    refusal: str

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Sample":
        """From the scheduler's part of `/server_info`."""
        offload = state["rooms"]["offload"] or {}
        return cls(
            state["num_running_requests"],
            offload.get("requests", 0),
            offload.get("wait_share", 0.0),
            offload.get("last_refusal", ""),
        )


@dataclass(frozen=True, slots=True)
class OffloadRun:
    """A load on the decode server with this ratio."""

    ratio: str
    load: LoadRun
    samples: tuple[Sample, ...]

    def figures(self) -> dict[str, float]:
        """The measures of the run."""
        found = figures(self.load)
        name = self.load.load
        return {
            "running at once": fmean(one.running for one in self.samples),
            "of these offloaded": fmean(one.offloaded for one in self.samples),
            OUTPUT_RATE: found[Figure(name, ALL_KINDS, OUTPUT_RATE)],
            **{key: found[Figure(name, _KIND, key)] for key in (TTFT_P50, TPOT_P50, GAP_P99)},
        }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3, port=31960)
    add = command.add
    add("--model", default=DEFAULT_PRESET, choices=PRESETS, help=f"(default: {DEFAULT_PRESET})")
    add("--ratios", default="0,1,inf,auto", help="of the decode servers (default: 0,1,inf,auto)")
    add("--decode-tokens", type=at_least_one, default=4096, help="of a small pool (default: 4096)")
    add("--input-tokens", type=at_least_one, default=512)
    add("--output-tokens", type=at_least_one, default=128)
    add("--clients", type=at_least_one, default=16)
    add("--seconds", type=at_least_one, default=30, help="of each run (default: 30)")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    if reason := why_no_hosts():
        raise EngineFailure(reason)
    ratios = options.ratios.split(",")
    first, second, *_ = usable_cores()
    small = ["--max-total-tokens", str(options.decode_tokens)]
    flags = {one: [*small, *([] if one == "0" else [_LENDS, _RATIO, one])] for one in ratios}
    model, vocab_size = make_model(options.model), PRESETS[options.model].vocab_size
    load = load_of(options)
    runs: list[OffloadRun] = []
    cores = [(first,), *[(second,)] * len(ratios)]
    with (
        hosts(len(cores), cores=cores, is_bridged=True) as network,
        lending_setups(
            network, model, ["--max-total-tokens", "65536", _LENDS], flags, options.port
        ) as setups,
        progress(options.rounds * len(ratios), "runs") as bar,
    ):
        for ratio in ratios:
            _run(ratio, setups[ratio], load, 0, 8, vocab_size)
        for round_number, ratio in turns(ratios, options.rounds):
            runs.append(_run(ratio, setups[ratio], load, round_number, options.seconds, vocab_size))
            told = ", ".join(f"{key} {value:.1f}" for key, value in runs[-1].figures().items())
            say(f"ratio {ratio}, round {round_number}: {told}")
            bar.update()
    return Report(
        name="offload_capacity",
        texts=[table(runs), reasons(runs)],
        facts={
            "Servers": {
                "model": options.model,
                "prefill": f"one core, 65536 tokens, {_LENDS}",
                "decode": f"one core, {options.decode_tokens} tokens, {_LENDS} {_RATIO} as given",
            },
            "Load": {"requests": str(load.kinds[0]), "seconds": str(options.seconds)},
            "Run": {"rounds": str(options.rounds)},
        },
        record={"runs": [[one.ratio, one.load.round, one.figures()] for one in runs]},
        problems=unequal(runs),
    )


def load_of(options: Options) -> MixedLoad:
    """Clients with contexts of one length."""
    kind = Kind(
        name=_KIND,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        clients=options.clients,
    )
    return MixedLoad("clients beyond the pool", (kind,))


def _run(
    ratio: str,
    setup: LendingSetup,
    load: MixedLoad,
    round_number: int,
    seconds: float,
    vocab_size: int,
) -> OffloadRun:
    is_over = Event()
    with ThreadPoolExecutor(1) as pool:
        sampled = pool.submit(_samples, setup.decode, is_over)
        try:
            answers = run_load(setup.router, vocab_size, load, round_number, seconds, {})
        finally:
            is_over.set()
    run = LoadRun(
        setup=ratio,
        load=load.name,
        round=round_number,
        seconds=seconds,
        answers=tuple(answers),
        busy=(),
    )
    return OffloadRun(ratio, run, tuple(sampled.result()))


def _samples(url: str, is_over: Event) -> list[Sample]:
    found = []
    while not is_over.wait(_POLL_S):
        reply = requests.get(f"{url}/server_info", timeout=60)
        found.append(Sample.of(reply.json()["internal_states"][0]))
    return found


def table(runs: Sequence[OffloadRun]) -> str:
    """Markdown: medians over the rounds, with the smallest and the largest."""
    names = list(runs[0].figures())
    rows = []
    for ratio in dict.fromkeys(one.ratio for one in runs):
        of_ratio = [one.figures() for one in runs if one.ratio == ratio]
        cells = [[one[name] for one in of_ratio] for name in names]
        rows.append(
            [ratio, *(f"{median(one):.1f} ({min(one):.1f} to {max(one):.1f})" for one in cells)]
        )
    return markdown_table(["offload ratio", *names], rows)


def reasons(runs: Sequence[OffloadRun]) -> str:
    """Markdown: how long steps waited, and why requests were not offloaded, at the last look."""
    rows = []
    for run in runs:
        last = run.samples[-1]
        rows.append([run.ratio, str(run.load.round), f"{last.wait_share:.0%}", last.refusal])
    return markdown_table(["offload ratio", "round", "of steps' time waited", "last refusal"], rows)


def unequal(runs: Sequence[OffloadRun]) -> list[str]:
    """A line for each request whose tokens differ, as far as two answers go."""
    outputs: dict[Place, tuple[int, ...]] = {}
    found = []
    for run in runs:
        for one in run.load.answers:
            other = outputs.setdefault(one.place, one.output)
            length = min(len(other), len(one.output))
            if other[:length] != one.output[:length]:
                found.append(f"ratio {run.ratio}: other tokens for {one.place}")
    return found


if __name__ == "__main__":
    sys.exit(main())
