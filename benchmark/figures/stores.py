"""The cluster, the loads and the stores that the figures of tiers share.

Llama-3.1-70B has nearly the KV of CachedAttention's LLaMA-2-70B for a token, on four of its cards.
The KV pool is cut to `POOL_TOKENS`, so that a thousand requests outgrow it as a day's do the real
one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmark.figures.figure import Options, Row, numbers, run
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.simulator.experiment import LINKS, SERVER_RULES, Cluster
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import summarize, ttft_ms
from sgl_pipeline.simulator.traces import load_trace, thinking
from sgl_pipeline.simulator.virtual_store import StoreCosts
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals, scaled_arrivals

PAGE_TOKENS = 64
POOL_TOKENS = 120_000
CLUSTER = Cluster(
    model="Llama-3.1-70B", device="a100-80g", link="pcie", num_stages=4, pool_tokens=POOL_TOKENS
)
KV_BYTES_PER_TOKEN = CLUSTER.shape.kv_bytes_per_layer_token * CLUSTER.shape.num_layers
# Behind PCIe, as gLLM's machine has it; each card has a link of its own.
HOST_MEMORY = StoreCosts(
    capacity_bytes=float("inf"),
    read_bytes_per_s=LINKS["pcie"][1],
    write_bytes_per_s=LINKS["pcie"][1],
    save_bytes_per_s=LINKS["pcie"][1],
    latency_s=LINKS["pcie"][0],
)
MEAN_THINK_S = 60.0
SESSIONS_PER_S = 0.5
MOONCAKE_PER_S = 0.4


@dataclass(frozen=True, slots=True)
class Load:
    """A workload of figures: `make` gives its requests."""

    name: str
    make: Callable[[Options], list[SimulatedRequest]]


def _conversations(options: Options) -> list[SimulatedRequest]:
    """Sessions of ShareGPT, begun as a Poisson process, with an exponential pause before each
    further turn."""
    random = Random(options.seed)
    turns = load_trace(options.trace or "sharegpt_multiturn", options.num_requests)
    return poisson_arrivals(thinking(turns, MEAN_THINK_S, random), SESSIONS_PER_S, random)


def _mooncake(options: Options) -> list[SimulatedRequest]:
    """Mooncake's conversations with their own arrivals, slower or faster as a whole."""
    requests = load_trace("mooncake_conversation", options.num_requests)
    return scaled_arrivals(requests, MOONCAKE_PER_S)


SHAREGPT = Load("ShareGPT, several turns", _conversations)
MOONCAKE = Load("Mooncake", _mooncake)
LOADS = (SHAREGPT, MOONCAKE)


def with_store(store: StoreCosts, rules: TierRules = SERVER_RULES) -> Cluster:
    return replace(CLUSTER, store=store, tier_rules=rules)


def served(cluster: Cluster, workload: Sequence[SimulatedRequest], *, reuses: bool = True) -> Row:
    """The row of a run; without `reuses` every prompt is computed whole."""
    scheduling = SchedulingArgs(
        page_size=PAGE_TOKENS, max_running_requests=16384, radix_cache=reuses
    )
    simulation = run(cluster, ThrottleArgs(), workload, scheduling)
    tier = simulation.tier
    return numbers(simulation) | {
        "further_ttft_ms": _further_ttft_ms(simulation),
        "loaded_share": summarize(simulation).loaded_share,
        "loaded_tokens": 0 if tier is None else tier.loaded_tokens,
        "saved_tokens": 0 if tier is None else tier.saved_tokens,
        "unsaved_tokens": 0 if tier is None else tier.unsaved_tokens,
        "unfulfilled": {} if tier is None else dict(tier.unfulfilled),
    }


def _further_ttft_ms(simulation: Simulation) -> float:
    """Mean time to the first token of requests whose prompt continues another one's."""
    times = [ttft_ms(one) for one in simulation.requests if len(one.asked.prompt) > 1]
    return sum(times) / len(times)


def distinct_tokens(workload: Sequence[SimulatedRequest]) -> int:
    """Tokens of prompts and answers, those that several requests share counted once."""
    lengths: dict[int, int] = {}
    for first in workload:
        for request in first.with_follow_ups():
            for segment in (*request.prompt, request.output):
                lengths[segment.first] = max(lengths.get(segment.first, 0), segment.length)
    return sum(lengths.values())
