"""Idle parts: they add up to the idle time of the stages, and each cause alone gets the whole."""

from dataclasses import replace

import pytest

from benchmark.figures.bubble_parts import arrival_steps, watched
from benchmark.figures.idle_parts import CAUSES, MOMENTS, Run, idle_parts
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.pipeline_costs import HostCosts
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds

IDEAL = Cluster(
    model="Qwen2.5-14B",
    device="a100-80g",
    link="ideal",
    num_stages=4,
    host=HostCosts(),
    tail_factor=0.0,
)
# What links and a host of such times cost shows within a few steps.
SLOW_HOST = HostCosts(schedule_step_s=2e-3, result_step_s=2e-3)


def requests(
    count: int, every_s: float = 0.0, prompt: int = 1, answer: int = 60
) -> list[SimulatedRequest]:
    """Requests that share nothing; with 0 seconds between them all come at once."""
    ids = TokenIds()
    return [
        SimulatedRequest(
            arrival_s=number * every_s, prompt=(ids.fresh(prompt),), output=ids.fresh(answer)
        )
        for number in range(count)
    ]


def served(cluster: Cluster, workload: list[SimulatedRequest], policy: str = "throttle") -> Run:
    return watched(cluster, ThrottleArgs(policy=policy), workload, SchedulingArgs())[1]


def idle_share(run: Run, first: int, end: int) -> float:
    """As it follows from the steps alone; nothing may run empty between them."""
    steps = run.steps[first:end]
    stages = range(run.costs.num_stages)
    spans_s = [steps[-1].ends_s[i] - steps[0].starts_s[i] for i in stages]
    busy_s = sum(step.ends_s[i] - step.starts_s[i] for step in steps for i in stages)
    return 1.0 - busy_s / sum(spans_s)


@pytest.mark.parametrize("policy", ["throttle", "throttle-time", "sarathi"])
@pytest.mark.parametrize("link", ["ideal", "net10"])
def test_causes_and_moments_add_up_to_the_idle_time(policy: str, link: str) -> None:
    cluster = replace(IDEAL, link=link, host=SLOW_HOST)
    workload = requests(30, every_s=0.03, prompt=700, answer=30)
    run = served(cluster, workload, policy)
    parts = idle_parts(run, *arrival_steps(run))
    assert parts["idle"] == pytest.approx(sum(parts[name] for name in CAUSES))
    beyond = parts["idle"] - parts["whole layers"] - parts["ends of the window"]
    assert beyond == pytest.approx(sum(parts[name] for name in MOMENTS))
    assert parts["idle"] == pytest.approx(idle_share(run, *arrival_steps(run)))
    assert all(parts[name] >= 0.0 for name in MOMENTS)


def steady(run: Run) -> tuple[int, int]:
    """Steps in which all decodes run: after the prompts, before the first answer ends."""
    inside = [n for n, step in enumerate(run.steps) if not step.shape.prefills]
    return inside[0] + 20, inside[-1] - 20


def test_equal_steps_without_link_and_host_leave_whole_layers_alone() -> None:
    cluster = replace(IDEAL, layer_counts=(9, 12, 15, 12))
    run = served(cluster, requests(64))
    parts = idle_parts(run, *steady(run))
    assert parts["whole layers"] == pytest.approx(1 - 48 / 60, abs=0.02)
    assert parts["idle"] == pytest.approx(parts["whole layers"], abs=0.01)


def test_a_slow_host_is_a_cause() -> None:
    run = served(replace(IDEAL, host=SLOW_HOST), requests(64))
    parts = idle_parts(run, *steady(run))
    assert parts["host"] > 0.1
    assert abs(parts["lack of work"]) < 0.01 and abs(parts["links"]) < 0.01


def test_links_are_a_cause() -> None:
    run = served(replace(IDEAL, link="net10"), requests(200, answer=40))
    parts = idle_parts(run, *steady(run))
    assert parts["links"] > 0.03 and abs(parts["host"]) < 0.01
    assert abs(parts["lack of work"]) < 0.01


def test_fewer_requests_than_stages_are_lack_of_work() -> None:
    run = served(IDEAL, requests(2, answer=80))
    parts = idle_parts(run, *steady(run))
    assert parts["lack of work"] == pytest.approx(0.5, abs=0.05)
    assert parts["room, none waits"] > 0.2
    assert parts["room, work waits"] == parts["full, work waits"] == 0.0


def test_prompts_beside_decodes_differ() -> None:
    run = served(IDEAL, requests(40, every_s=0.02, prompt=900), policy="sarathi")
    parts = idle_parts(run, *arrival_steps(run))
    assert parts["prefill differs"] > 0.03
    assert parts["prefill differs"] > 3 * abs(parts["decodes differ"])
