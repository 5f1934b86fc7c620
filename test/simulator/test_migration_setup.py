"""Clusters whose layers may move: memory, the planner's costs, and what it makes of real tables."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from sgl_pipeline.args import MigrationArgs, SchedulingArgs, ThrottleArgs
from sgl_pipeline.layer_partition import even_layer_counts
from sgl_pipeline.migration.delta_rule import even_split_less
from sgl_pipeline.migration.step_fit import errors_on
from sgl_pipeline.simulator.experiment import Cluster, simulate
from sgl_pipeline.simulator.forecasts import fitted_costs, part_samples
from sgl_pipeline.simulator.kernel_costs import DEVICES, part_seconds
from sgl_pipeline.simulator.migration_setup import Migration
from sgl_pipeline.simulator.models import MODELS
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.summary import Summary, summarize
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import poisson_arrivals

pytestmark = pytest.mark.slow

AUTO = MigrationArgs(mode="auto", spare_layers=3)
CARDS = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie", link="net73")


def serve(cluster: Cluster, trace: str, count: int, rate_per_s: float) -> Simulation:
    workload = poisson_arrivals(load_trace(trace, count), rate_per_s, Random(0))
    args = SchedulingArgs(max_running_requests=4096)
    return simulate(cluster, ThrottleArgs(policy="throttle"), args, workload)


@cache
def summary_of(cluster: Cluster, trace: str, count: int, rate_per_s: float) -> Summary:
    return summarize(serve(cluster, trace, count, rate_per_s))


def test_without_migration_runs_are_those_of_before_there_was_any() -> None:
    """Recorded at commit 3f56dfe, of whose simulator no layer could move."""
    found = summary_of(CARDS, "azure_conv", 60, 16.0)
    assert (found.num_steps, CARDS.kv_pool_tokens()) == (1610, 566341)
    assert found.e2e_ms.mean == pytest.approx(4757.787741672179, rel=1e-12)
    assert found.bubble_share == pytest.approx(0.28340766601115375, rel=1e-12)
    slow = Cluster(model="Qwen3-32B", device="rtxpro6000", stage_slowness=(1.0, 1.1, 1.0, 1.2))
    found = summary_of(slow, "azure_conv", 60, 4.0)
    assert (found.num_steps, slow.kv_pool_tokens()) == (2121, 1056539)
    assert found.e2e_ms.mean == pytest.approx(8063.736220121941, rel=1e-12)
    assert found.bubble_share == pytest.approx(0.2674567941736943, rel=1e-12)


def test_room_is_kept_for_the_most_layers_that_a_card_may_hold() -> None:
    """DynaPipe: 16 to 19 layers of the 32B model on 40 GB, about 7.5 % of it for their weights."""
    cards = replace(CARDS, model="Qwen2.5-32B")
    may_move = replace(cards, migration=Migration(args=AUTO))
    held = replace(cards, layer_counts=(19, 19, 19, 7))  # the first three hold as much
    assert may_move.kv_pool_tokens() == held.kv_pool_tokens()
    assert 3 * MODELS["Qwen2.5-32B"].layer_weight_bytes / 40e9 == pytest.approx(0.073, abs=0.001)


@pytest.mark.parametrize(
    ("model", "device", "most"),
    [
        ("Qwen2.5-14B", "a100-40g-pcie", 0.03),
        ("Qwen2.5-32B", "l40s", 0.03),
        # Where attention was measured for mixed steps, chunks beside decodes take their own time.
        ("Llama-3.1-8B", "rtxpro6000", 0.20),
    ],
)
def test_fitted_costs_predict_steps_that_they_were_not_fitted_to(
    model: str, device: str, most: float
) -> None:
    random = Random(5)
    steps = []
    for _ in range(300):
        decodes = random.randint(1, 160)
        contexts = tuple(random.randint(64, 1500) for _ in range(decodes))
        chunk = random.choice((0, 0, random.randint(1, 1024)))
        prefills = ((chunk, random.choice((0, 300))),) if chunk else ()
        steps.append(StepShape(prefills, contexts, decodes + (chunk > 0)))
    shape = MODELS[model]
    parts = part_seconds(DEVICES[device], shape)
    errors = errors_on(fitted_costs(parts, shape.num_layers), part_samples(parts, steps), (0,))
    assert errors.layer < most
    assert errors.tail < 0.02


@pytest.mark.parametrize(("trace", "rate_per_s"), [("sharegpt", 32.0), ("azure_conv", 8.0)])
def test_costs_from_tables_and_costs_learned_lead_to_equally_good_splits(
    trace: str, rate_per_s: float
) -> None:
    """The best of all numbers of layers off the last stage, and what the planner finds, by the
    bottleneck's time: both learn from the same steps."""
    even = even_layer_counts(48, 4)
    still = [
        summary_of(replace(CARDS, layer_counts=even_split_less(48, 4, less)), trace, 90, rate_per_s)
        for less in range(5)
    ]
    best_ms = min(one.e2e_ms.mean for one in still)
    for costs in ("tables", "online"):
        moving = replace(CARDS, migration=Migration(args=AUTO), forecast=costs)
        simulation = serve(moving, trace, 90, rate_per_s)
        assert simulation.moves, costs
        last = simulation.moves[-1].after
        assert last[-1] < even[-1]
        settled = summary_of(replace(CARDS, layer_counts=last), trace, 90, rate_per_s)
        assert settled.e2e_ms.mean <= 1.01 * best_ms, costs
    assert best_ms < 0.95 * still[0].e2e_ms.mean
