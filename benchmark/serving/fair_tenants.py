"""Does one tenant's flood make another one wait? A server with fair shares beside one without.

    python -m benchmark.serving.fair_tenants
    python -m benchmark.serving.fair_tenants --rounds 1 --seconds 20

Run by hand, some four minutes on two cores. Each round starts a server that serves first come,
first served, and one with `--fair-shares-by header:X-Tenant`. Each gets the requests of the light
tenant alone, then the same beside those of a tenant that floods it with long prompts from more
clients than may run at once.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    tokens_per_s: float


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=2, port=31970)
    add = command.add
    add("--model", default=DEFAULT_PRESET, choices=PRESETS, help=f"(default: {DEFAULT_PRESET})")
    add("--pp", type=at_least_one, default=2, help="stages (default: 2)")
    add("--places", type=at_least_one, default=8, help="requests that run at once (default: 8)")
    add("--clients", type=at_least_one, default=16, help="of the flood (default: 16)")
    add("--seconds", type=at_least_one, default=20, help="of each load (default: 20)")
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
            say(f"{engine.label}: {runs[-1].ttft_p99_ms:.0f} ms p99 {BESIDE}")
            bar.update()
    return Report(
        name="fair_tenants",
        texts=[_table(runs, [one.label for one in engines])],
        facts={
            "load": {
                LIGHT: "prompts of 64 tokens, answers of 16, a twentieth of a core's prefill",
                FLOOD: f"{options.clients} clients, prompts of 512 tokens, answers of 32",
                "seconds of each": str(options.seconds),
                "rounds": str(options.rounds),
            }
        },
        record={"runs": [asdict(one) for one in runs]},
    )


def _serve(engine: Engine, vocab_size: int, round_number: int, options: Options) -> list[Run]:
    """The light tenant alone and beside the flood."""
    light = Kind(name=LIGHT, input_tokens=64, output_tokens=16, prefill_share=0.05)
    flood = Kind(name=FLOOD, input_tokens=512, output_tokens=32, clients=options.clients)
    url = engine.base_url
    # Its own first requests warm the server up.
    prefill_s = {LIGHT: median(prefill_seconds(url, vocab_size, light, 8))}
    runs = []
    for load in (MixedLoad(ALONE, (light,)), MixedLoad(BESIDE, (light, flood))):
        answers = run_load(url, vocab_size, load, round_number, options.seconds, prefill_s)
        runs.append(run_of(engine.label, load.name, answers, options.seconds))
    return runs


def run_of(server: str, load: str, answers: Sequence[Answered], seconds: float) -> Run:
    """The numbers of one load. Tokens count within its seconds, a prompt where its first token
    does."""
    first_ms = [1e3 * (one.moments_s[0] - one.sent_s) for one in answers if one.place.kind == LIGHT]
    tokens = 0
    for one in answers:
        moments = zip(one.tokens, one.moments_s, strict=True)
        until = [count for count, moment_s in moments if moment_s <= seconds]
        tokens += until[-1] + one.input_tokens if until else 0
    p50, p99 = np.percentile(first_ms, (50, 99))
    return Run(server, load, len(first_ms), float(p50), float(p99), tokens / seconds)


def _table(runs: Sequence[Run], servers: Sequence[str]) -> str:
    """Medians over the rounds."""
    rows = []
    for server in servers:
        for load in (ALONE, BESIDE):
            chosen = [one for one in runs if (one.server, one.load) == (server, load)]
            rows.append(
                [
                    server,
                    load,
                    str(sum(one.requests for one in chosen)),
                    *(
                        f"{median(getattr(one, name) for one in chosen):.0f}"
                        for name in ("ttft_p50_ms", "ttft_p99_ms", "tokens_per_s")
                    ),
                ]
            )
    header = ["server", "light tenant", "requests", "TTFT p50, ms", "p99, ms", "tokens/s of all"]
    return markdown_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
