"""Does one tenant's flood make another one wait? A server with fair shares beside one without.

    python -m benchmark.serving.fair_tenants
    python -m benchmark.serving.fair_tenants --rounds 1 --seconds 10
    python -m benchmark.serving.fair_tenants --cold

Run by hand, some seven minutes on two cores. Each round starts a server that serves first come,
first served, and one with `--fair-shares-by header:X-Tenant`. Each gets the requests of the light
tenant alone, then the same beside those of a tenant that floods it with long prompts from more
clients than may run at once. With `--cold` the flood begins before the servers know what steps
take, and the light tenant is not measured alone.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np

from benchmark.disaggregation.mixed_clients import Answered, prefill_seconds, run_load
from benchmark.disaggregation.mixed_load import Kind, MixedLoad
from benchmark.models.make_model import PRESETS
from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model, turns
from benchmark.support.paths import SCRATCH

LIGHT, FLOOD = "light", "flood"
ALONE, BESIDE = "alone", "beside the flood"
SHARES = "--fair-shares-by header:X-Tenant"


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one server; times of the light tenant's requests."""

    server: str
    load: str
    sent_s: list[float]  # of each, from the beginning of the load
    ttft_ms: list[float]  # of each
    tokens_per_s: float


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=2, port=31970)
    add = command.add
    add("--model", default=DEFAULT_PRESET, choices=PRESETS, help=f"(default: {DEFAULT_PRESET})")
    add("--pp", type=at_least_one, default=2, help="stages (default: 2)")
    add("--places", type=at_least_one, default=8, help="requests that run at once (default: 8)")
    add("--clients", type=at_least_one, default=16, help="of the flood (default: 16)")
    add("--seconds", type=at_least_one, default=40, help="of each load (default: 40)")
    add("--cold", action="store_true", help="the flood begins at once, while times are unknown")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    model, vocab_size = make_model(options.model), PRESETS[options.model].vocab_size
    text = f"ours --pp {options.pp} --max-running-requests {options.places}"
    engines = [
        parse_engine(one, model, options.port, SCRATCH, usable_cores())
        for one in (text, f"{text} {SHARES}")
    ]
    runs: list[Run] = []
    with progress(options.rounds * len(engines), "servers") as bar:
        for round_number, engine in turns(engines, options.rounds):
            with running(engine, SCRATCH / "fair_tenants.log"):
                runs += _serve(engine, vocab_size, round_number, options)
            say(f"{engine.label}: {max(runs[-1].ttft_ms):.0f} ms at most {BESIDE}")
            bar.update()
    return Report(
        name="fair_tenants",
        texts=[_table(runs, [one.label for one in engines])],
        facts={
            "load": {
                LIGHT: "prompts of 64 tokens, answers of 16, a tenth of the time in prefill",
                FLOOD: f"{options.clients} clients, prompts of 512 tokens, answers of 32",
                "seconds of each": str(options.seconds),
                "rounds": str(options.rounds),
                "begins": "at once" if options.cold else "on a server that has served",
            }
        },
        record={"runs": [asdict(one) for one in runs]},
    )


def _serve(engine: Engine, vocab_size: int, round_number: int, options: Options) -> list[Run]:
    """The light tenant alone, unless the server is to be cold, and beside the flood."""
    light = Kind(name=LIGHT, input_tokens=64, output_tokens=16, prefill_share=0.1)
    flood = Kind(name=FLOOD, input_tokens=512, output_tokens=32, clients=options.clients)
    url = engine.base_url
    # Its own first requests warm the server up. On a cold one their few steps leave times unknown.
    first, times = (replace(light, output_tokens=1), 3) if options.cold else (light, 8)
    prefill_s = {LIGHT: median(prefill_seconds(url, vocab_size, first, times))}
    loads = [MixedLoad(ALONE, (light,)), MixedLoad(BESIDE, (light, flood))]
    runs = []
    for load in loads[1:] if options.cold else loads:
        answers = run_load(url, vocab_size, load, round_number, options.seconds, prefill_s)
        runs.append(run_of(engine.label, load.name, answers, options.seconds))
    return runs


def run_of(server: str, load: str, answers: Sequence[Answered], seconds: float) -> Run:
    """The numbers of one load. Tokens count within its seconds, a prompt where its first token
    does."""
    light = [one for one in answers if one.place.kind == LIGHT]
    first_ms = [1e3 * (one.moments_s[0] - one.sent_s) for one in light]
    tokens = 0
    for one in answers:
        moments = zip(one.tokens, one.moments_s, strict=True)
        until = [count for count, moment_s in moments if moment_s <= seconds]
        tokens += until[-1] + one.input_tokens if until else 0
    return Run(server, load, [one.sent_s for one in light], first_ms, tokens / seconds)


def _table(runs: Sequence[Run], servers: Sequence[str]) -> str:
    """Percentiles over the requests of all rounds, the median of their tokens/s."""
    rows = []
    for server in servers:
        for load in (ALONE, BESIDE):
            chosen = [one for one in runs if (one.server, one.load) == (server, load)]
            if not chosen:
                continue
            ttft_ms = [first for one in chosen for first in one.ttft_ms]
            percentiles = np.percentile(ttft_ms, (50, 90, 99))
            tokens_per_s = median(one.tokens_per_s for one in chosen)
            numbers = [f"{number:.0f}" for number in (*percentiles, tokens_per_s)]
            rows.append([server, load, str(len(ttft_ms)), *numbers])
    header = ["server", "light tenant", "requests", "TTFT p50, ms", "p90", "p99", "tokens/s of all"]
    return markdown_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
