"""The plans that figures of layer moves compare: static plans, our planner, DynaPipe's published
rule.

Shared by those figures. A static plan has all of a card's memory for KV; who may move layers keeps
room for `SPARE_LAYERS` more on each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from benchmark.figures.figure import Options, Row, numbers, run
from sgl_pipeline.args import MigrationArgs, ThrottleArgs
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.migration.delta_rule import even_split_less
from sgl_pipeline.migration.planner_args import PlannerArgs
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.migration_setup import Migration
from sgl_pipeline.simulator.models import MODELS
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import Distribution
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds, poisson_arrivals

# DynaPipe: the 32B model's stages have 16 layers and may have 19.
SPARE_LAYERS = 3
# Layers off the last stage. 0 is gLLM's default; 1 the other plan that its own help names.
REMOVED = (0, 1, 2, 3, 4)
STYLE: dict[str, dict[str, Any]] = {
    "even": {"color": "#999999", "marker": "^"},
    "one off the last": {"color": "#56B4E9", "marker": "v"},
    "best static": {"color": "#009E73", "marker": "D"},
    "dynapipe": {"color": "#D55E00", "marker": "s"},
    "auto": {"color": "#0072B2", "marker": "o"},
}


def with_auto(cluster: Cluster, window_steps: int = 25, **options: Any) -> Cluster:
    """Our planner, as the server starts it; `options` are fields of `Migration`."""
    args = MigrationArgs(mode="auto", spare_layers=SPARE_LAYERS, window_steps=window_steps)
    return replace(cluster, migration=Migration(args=args, **options))


def with_published(cluster: Cluster, window_steps: int = 25, **options: Any) -> Cluster:
    """DynaPipe's: its rule and window, weights resident, pages copied beside the steps."""
    args = MigrationArgs(mode="auto", spare_layers=SPARE_LAYERS, weights="resident")
    planner = PlannerArgs.as_published(window_steps)
    options = {"copying": "beside"} | options
    return replace(cluster, migration=Migration(args=args, planner=planner, **options))


def with_removed(cluster: Cluster, removed: int) -> Cluster:
    """The even plan with so many layers of the last stage spread over the others."""
    num_layers = MODELS[cluster.model].num_layers
    return replace(cluster, layer_counts=even_split_less(num_layers, cluster.num_stages, removed))


def served(
    cluster: Cluster,
    workload: Sequence[SimulatedRequest],
    target: LatencyTarget | None = None,
    policy: str = "throttle",
) -> tuple[Row, Simulation]:
    """A run, and its row. Of many moves waits and bytes are those of the newest 64."""
    simulation = run(cluster, ThrottleArgs(policy=policy), workload)
    ends = [one for one in simulation.requests if one.finished_s is not None]
    e2e_ms = [((one.finished_s or 0.0) - one.arrival_s) * 1e3 for one in ends]
    done = [move for move in simulation.moves if move.outcome is MoveOutcome.DONE]
    return (
        {
            "plan": plan_text(done[-1].after if done else cluster.layers),
            "e2e_p99_ms": Distribution.of(e2e_ms).p99,
            "num_moves": simulation.steps[-1].record.epoch,
            "longest_wait_ms": max((move.wait_ms for move in done), default=0.0),
            "moved_mb": sum(move.copied_bytes + move.patched_bytes for move in done) / 1e6,
            "pool_tokens": cluster.kv_pool_tokens(),
            **numbers(simulation, target),
        },
        simulation,
    )


def best_static(
    cluster: Cluster, cost: Callable[[Cluster], float], starts: Sequence[int] = REMOVED
) -> Cluster:
    """The plan of the least `cost`: the best of `starts` layers off the last stage, then greedy
    exchanges of one layer between any two stages until none helps."""
    found = min((with_removed(cluster, one) for one in starts), key=cost)
    least = cost(found)
    while True:
        others = [replace(cluster, layer_counts=counts) for counts in _neighbors(found.layers)]
        nearest = min(others, key=cost)
        if cost(nearest) >= least:
            return found
        found, least = nearest, cost(nearest)


def _neighbors(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for source in range(len(counts)):
        for target in range(len(counts)):
            if source != target and counts[source] > 1:
                changed = list(counts)
                changed[source] -= 1
                changed[target] += 1
                yield tuple(changed)


def plan_text(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))


def load(name: str, rate_per_s: float, options: Options) -> list[SimulatedRequest]:
    """`azure_short` is Azure-conv up to 1,024 prompt tokens: mean 526 in and 190 out, where
    DynaPipe's summaries say 514 and 192."""
    if options.trace is not None or name != "azure_short":
        requests = load_trace(options.trace or name, options.num_requests)
    else:
        short = (one for one in load_trace("azure_conv") if one.input_tokens <= 1024)
        requests = [one for one, _ in zip(short, range(options.num_requests), strict=False)]
    return poisson_arrivals(requests, rate_per_s, Random(options.seed))


def made_up(
    count: int, input_tokens: int, output_tokens: int, seed: int = 0
) -> list[SimulatedRequest]:
    """Requests of these lengths, a quarter more or less, so that they do not run in lockstep."""
    ids, random = TokenIds(), Random(seed)

    def near(length: int) -> int:
        return max(1, round(length * random.uniform(0.75, 1.25)))

    return [
        SimulatedRequest(
            arrival_s=0.0,
            prompt=(ids.fresh(near(input_tokens)),),
            output=ids.fresh(near(output_tokens) if output_tokens > 1 else 1),
        )
        for _ in range(count)
    ]
