"""The cluster, the loads and the stores that the figures of tiers share.

Llama-3.1-70B has nearly the KV of CachedAttention's LLaMA-2-70B for a token, on four of its cards.
For ShareGPT the KV pool is cut, so that some hundred turns outgrow it as a day's do the real one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmark.figures.figure import Options, Row, numbers, run
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.simulator.experiment import LINKS, SERVER_RULES, Cluster
from sgl_pipeline.simulator.summary import summarize
from sgl_pipeline.simulator.traces import load_trace, thinking
from sgl_pipeline.simulator.virtual_store import StoreCosts
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals, scaled_arrivals

PAGE_TOKENS = 64
SHAREGPT_POOL_TOKENS = 120_000
CLUSTER = Cluster(model="Llama-3.1-70B", device="a100-80g", link="pcie", num_stages=4)
KV_BYTES_PER_TOKEN = CLUSTER.shape.kv_bytes_per_layer_token * CLUSTER.shape.num_layers
# Behind PCIe, as gLLM's machine has it; each card has a link of its own.
HOST_MEMORY = StoreCosts(
    capacity_bytes=float("inf"),
    read_bytes_per_s=LINKS["pcie"][1],
    write_bytes_per_s=LINKS["pcie"][1],
    save_bytes_per_s=LINKS["pcie"][1],
    latency_s=LINKS["pcie"][0],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a trace at `rate_per_s`, for a pool of `pool_tokens` (None: what the cards hold).

    With `mean_think_s` they are sessions, begun as a Poisson process, with an exponential pause
    before each further turn; otherwise they arrive as recorded, sped up or slowed down.
    """

    name: str
    trace: str
    rate_per_s: float
    mean_think_s: float | None = None
    pool_tokens: int | None = None

    def requests(self, options: Options) -> list[SimulatedRequest]:
        requests = load_trace(self.trace, options.num_requests)
        if self.mean_think_s is None:
            return scaled_arrivals(requests, self.rate_per_s)
        random = Random(options.seed)
        sessions = thinking(requests, self.mean_think_s, random)
        return poisson_arrivals(sessions, self.rate_per_s, random)

    def cluster(self, store: StoreCosts | None = None, rules: TierRules = SERVER_RULES) -> Cluster:
        return replace(CLUSTER, pool_tokens=self.pool_tokens, store=store, tier_rules=rules)


SHAREGPT = Load(
    name="ShareGPT",
    trace="sharegpt_multiturn",
    rate_per_s=0.5,
    mean_think_s=60.0,
    pool_tokens=SHAREGPT_POOL_TOKENS,
)
BUSY_SHAREGPT = Load(
    name="ShareGPT, busy",
    trace="sharegpt_multiturn",
    rate_per_s=4.0,
    mean_think_s=20.0,
    pool_tokens=SHAREGPT_POOL_TOKENS,
)
MOONCAKE = Load(name="Mooncake", trace="mooncake_conversation", rate_per_s=0.2)


def served(cluster: Cluster, workload: Sequence[SimulatedRequest], *, reuses: bool = True) -> Row:
    """The row of a run; without `reuses` every prompt is computed whole."""
    scheduling = SchedulingArgs(
        page_size=PAGE_TOKENS, max_running_requests=16384, radix_cache=reuses
    )
    simulation = run(cluster, ThrottleArgs(policy="throttle"), workload, scheduling)
    tier = simulation.tier
    return numbers(simulation) | {
        "loaded_share": summarize(simulation).loaded_share,
        "loaded_tokens": 0 if tier is None else tier.loaded_tokens,
        "saved_tokens": 0 if tier is None else tier.saved_tokens,
        "unsaved_tokens": 0 if tier is None else tier.unsaved_tokens,
        "unfulfilled": {} if tier is None else dict(tier.unfulfilled),
    }


def distinct_tokens(workload: Sequence[SimulatedRequest]) -> int:
    """Tokens of prompts and answers, those that several requests share counted once."""
    lengths: dict[int, int] = {}
    for first in workload:
        for request in first.with_follow_ups():
            for segment in (*request.prompt, request.output):
                lengths[segment.first] = max(lengths.get(segment.first, 0), segment.length)
    return sum(lengths.values())
