"""Prefill and decode on a core each, beside one pipeline of two stages on the same two cores.

    python -m benchmark.disaggregation.apart_or_together
    python -m benchmark.disaggregation.apart_or_together --rounds 3 --seconds 20 --loads 1,4
    python -m benchmark.disaggregation.apart_or_together --delay-ms 1 --gbit-per-s 1

Run by hand, as root, on a quiet machine, some 25 minutes. A prefill server has one core and a
decode server the other, each in a network namespace; clients ask SGLang's router, unmodified. The
pipeline has a stage on each core, and is asked itself. All servers are up, and take turns (A B,
B A) by the load. Prompts are random ids that no cache has, answers greedy; what both set-ups answer
to a request must be the same tokens, or the exit code is 1.

Loads: long prompts, which arrive evenly, beside streams, where being apart should win; few users
with short prompts, and many short prompts with short answers, where it should lose; and streams
alone. Namespaces are joined by the kernel; with `--delay-ms` or `--gbit-per-s` by
`benchmark/hosts/switch.py`, which takes some of the cores' time.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from statistics import median

import psutil

from benchmark.disaggregation.apart_plot import draw
from benchmark.disaggregation.apart_report import (
    APART,
    GAP_P99,
    TOGETHER,
    TOTAL_RATE,
    TTFT_P50,
    LoadRun,
    busy_table,
    compare_answers,
    figure_table,
    figures,
    ratios,
    record_of,
)
from benchmark.disaggregation.mixed_clients import prefill_seconds, run_load
from benchmark.disaggregation.mixed_load import LOADS, MixedLoad
from benchmark.disaggregation.setups import both_setups
from benchmark.hosts.namespaces import Network, hosts, why_no_hosts
from benchmark.models.make_model import PRESETS
from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.engine import EngineFailure
from benchmark.support.machine import describe_machine, usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model, turns
from sgl_pipeline.args import require

POOL_TOKENS = 32_768
_WARM_UP_ROUND = 0
_CALIBRATIONS = 3


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=5, port=31980)
    add = command.add
    numbers = ",".join(str(number) for number in range(1, len(LOADS) + 1))
    named = "; ".join(f"{number} {load.name}" for number, load in enumerate(LOADS, 1))
    add("--loads", default=numbers, help=f"{named} (default: {numbers})")
    add("--model", default=DEFAULT_PRESET, choices=PRESETS, help=f"(default: {DEFAULT_PRESET})")
    add("--seconds", type=at_least_one, default=30, help="of each run (default: 30)")
    add("--warm-up-s", type=at_least_one, default=5, help="of each load, uncounted (default: 5)")
    add("--delay-ms", type=float, default=0.0, help="from server to server (default: none)")
    add("--gbit-per-s", type=float, default=0.0, help="each way (default: the machine's)")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    loads = _loads(options.loads)
    if reason := why_no_hosts():
        raise EngineFailure(reason)
    model, vocab_size = make_model(options.model), PRESETS[options.model].vocab_size
    flags = ["--max-total-tokens", str(POOL_TOKENS)]
    with (
        _network(options) as network,
        both_setups(network, model, flags, options.port) as urls,
    ):
        prefill_s = _prefill_times(urls[APART], vocab_size, loads)
        take = partial(_run, vocab_size=vocab_size, prefill_s=prefill_s)
        for load in loads:
            for setup, url in urls.items():
                take(setup, url, load, _WARM_UP_ROUND, options.warm_up_s)
        runs = []
        with progress(options.rounds * len(loads) * len(urls), "runs") as bar:
            for load in loads:
                for round_number, setup in turns([APART, TOGETHER], options.rounds):
                    runs.append(take(setup, urls[setup], load, round_number, options.seconds))
                    bar.update()
    equality = compare_answers(runs)
    found = ratios(runs)
    return Report(
        name="apart_or_together",
        texts=[
            figure_table(runs),
            busy_table(runs),
            f"Answers to the same request that are equal as far as both go: "
            f"{equality.answers - len(equality.unequal)} of {equality.answers} "
            f"({equality.tokens} tokens).",
        ],
        facts=_facts(options, loads, flags, prefill_s),
        record={"prefill_s": prefill_s, "runs": [record_of(run) for run in runs]},
        problems=[f"not the same tokens: {one}" for one in equality.unequal],
        draw=partial(draw, found, describe_machine().get("cpu", "an unknown CPU")),
    )


def _loads(numbers: str) -> list[MixedLoad]:
    named = {str(number): load for number, load in enumerate(LOADS, 1)}
    chosen = numbers.split(",")
    require(set(chosen) <= set(named), f"--loads: choose from {', '.join(named)}")
    return [named[one] for one in chosen]


@contextmanager
def _network(options: Options) -> Iterator[Network]:
    """Hosts for prefill, decode and the whole pipeline, joined as asked."""
    first, second, *_ = usable_cores()
    has_cables = bool(options.delay_ms or options.gbit_per_s)
    cores = [(first,), (second,), (first, second)]
    with hosts(len(cores), cores=cores, is_bridged=not has_cables) as network:
        for host in network.hosts if has_cables else ():
            host.cable(gbit_per_s=options.gbit_per_s, delay_ms=options.delay_ms / 2)
        yield network


def _prefill_times(url: str, vocab_size: int, loads: Sequence[MixedLoad]) -> dict[str, float]:
    """Seconds that a prompt of each kind that arrives evenly takes the prefill server."""
    found = {}
    for kind in (kind for load in loads for kind in load.kinds if not kind.clients):
        found[kind.name] = median(prefill_seconds(url, vocab_size, kind, _CALIBRATIONS))
        say(f"{kind.name}: {found[kind.name]:.2f} s of prefill")
    return found


def _run(
    setup: str,
    url: str,
    load: MixedLoad,
    round_number: int,
    seconds: float,
    *,
    vocab_size: int,
    prefill_s: dict[str, float],
) -> LoadRun:
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(_busy_shares, seconds)
        answers = run_load(url, vocab_size, load, round_number, seconds, prefill_s)
    run = LoadRun(
        setup=setup,
        load=load.name,
        round=round_number,
        seconds=seconds,
        answers=tuple(answers),
        busy=busy.result(),
    )
    if round_number != _WARM_UP_ROUND:
        say(_one_line(run))
    return run


def _busy_shares(seconds: float) -> tuple[float, ...]:
    """The share of the next seconds in which each usable core is not idle."""
    busy = psutil.cpu_times_percent(seconds, percpu=True)
    return tuple(1.0 - (busy[core].idle + busy[core].iowait) / 100 for core in usable_cores())


def _one_line(run: LoadRun) -> str:
    told = ", ".join(
        f"{figure.kind} {figure.name} {value:.0f}"
        for figure, value in figures(run).items()
        if figure.name in (GAP_P99, TTFT_P50, TOTAL_RATE)
    )
    return f"{run.load}, round {run.round}, {run.setup}: {told}"


def _facts(
    options: Options, loads: Sequence[MixedLoad], flags: Sequence[str], prefill_s: dict[str, float]
) -> dict[str, dict[str, str]]:
    link = "the kernel's bridge"
    if options.delay_ms or options.gbit_per_s:
        link = (
            f"{options.delay_ms:g} ms, {options.gbit_per_s:g} Gbit/s (0: any) by a switch of ours"
        )
    return {
        "model": {options.model: "bf16"},
        "servers": {
            APART: "prefill and decode, one stage and one core each, behind SGLang's router",
            TOGETHER: "one pipeline of two stages, one core each",
            "both": " ".join(flags),
            "link": link,
        },
        "loads": {load.name: "; ".join(map(str, load.kinds)) for load in loads},
        "run": {"seconds": str(options.seconds), "rounds": str(options.rounds)},
        "seconds of prefill of an evenly arriving prompt": {
            name: f"{seconds:.2f}" for name, seconds in prefill_s.items()
        },
        "figures": {"ratios": f"{APART} / {TOGETHER} of the same round"},
    }


if __name__ == "__main__":
    sys.exit(main())
