"""Links of unequal hosts in virtual time: against a schedule by hand, and against the planner."""

import random
from dataclasses import dataclass

import pytest
from support.pipelines import new_scheduler

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.costs.stage_costs import StageCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.host_network import HostNetwork, HostPair, NetworkLink, PaperHost
from sgl_pipeline.migration.host_order import Hop, RouteSearch
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts, SimulatedLink
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds

ROW_BYTES = 10_000


@dataclass(frozen=True)
class FlatSeconds:
    """A layer takes a millisecond whatever the step, the tail two."""

    def layer_s(self, shape: StepShape) -> float:
        return 1e-3

    def embedding_s(self, shape: StepShape) -> float:
        return 0.0

    def tail_s(self, shape: StepShape) -> float:
        return 2e-3


def scheduler(num_stages: int) -> StepScheduler:
    return new_scheduler(
        throttle=ThrottleArgs(policy="sarathi", max_prefill_tokens=64),
        num_pages=4000,
        num_stages=num_stages,
    )


def lone_requests(count: int, num_tokens: int) -> list[SimulatedRequest]:
    """Each arrives alone and stays in a step of its own."""
    ids = TokenIds()
    return [
        SimulatedRequest(
            arrival_s=1e-4 * number, prompt=(ids.fresh(1),), output=ids.fresh(num_tokens)
        )
        for number in range(count)
    ]


def test_each_boundary_has_its_own_link_and_results_have_a_way_back() -> None:
    links = (
        SimulatedLink(latency_s=0.25, bytes_per_s=2.0, bytes_per_token=1),
        SimulatedLink(latency_s=0.0, bytes_per_s=8.0, bytes_per_token=1),
        SimulatedLink(latency_s=4.0),
    )
    costs = PipelineCosts(FlatSeconds(), layer_counts=(1, 1, 1), links=links)
    ids = TokenIds()
    request = SimulatedRequest(arrival_s=0.0, prompt=(ids.fresh(4),), output=ids.fresh(1))
    (served,) = VirtualPipeline(scheduler(3), costs).run([request]).requests
    assert served.finished_s == pytest.approx(3e-3 + 2e-3 + (4 / 2 + 0.25) + 4 / 8 + 4.0)


@pytest.mark.parametrize("seed", range(12))
def test_the_planner_predicts_the_period_of_the_simulated_pipeline(seed: int) -> None:
    rng = random.Random(seed)
    network = HostNetwork(
        hosts=tuple(PaperHost(name=name, stages=rng.choice([1, 2])) for name in "abc"),
        links=tuple(
            HostPair(
                between=pair,
                gbit_per_s=rng.choice([0.01, 0.1, 10.0]),
                delay_ms=rng.choice([0.05, 2.0, 20.0]),
            )
            for pair in (("a", "b"), ("b", "c"), ("a", "c"))
        ),
    )
    hops = [[_hop(network.between(a, b)) for b in range(3)] for a in range(3)]
    search = RouteSearch(
        [StageCosts((1.0,) * 12, 0.0, 2.0)] * 3,
        [host.stages for host in network.hosts],
        hops,
        lambda host, start, end: True,
        network.num_stages,
    )
    route = search.best()
    cluster = Cluster(
        model="Qwen2.5-14B",
        device="a100-80g",
        link="ideal",
        num_stages=network.num_stages,
        hosts=network.ordered(route.order),
    )
    links = tuple(
        SimulatedLink(
            latency_s=link.latency_s, bytes_per_s=link.bytes_per_s, bytes_per_token=ROW_BYTES
        )
        for link in cluster.costs().links
    )
    costs = PipelineCosts(FlatSeconds(), layer_counts=route.layer_counts, links=links)
    pipeline = VirtualPipeline(scheduler(network.num_stages), costs)
    steps = pipeline.run(lone_requests(network.num_stages, 60)).steps
    # Whole rounds: within one, steps may come in a bunch.
    rounds = 30 * network.num_stages
    took_s = steps[40 * network.num_stages].ends_s[-1] - steps[10 * network.num_stages].ends_s[-1]
    assert took_s / rounds * 1e3 == pytest.approx(route.period_ms, rel=0.01)


def _hop(link: NetworkLink | None) -> Hop:
    if link is None:
        return Hop()
    return Hop(link.busy_ms(ROW_BYTES), link.transfer_ms(ROW_BYTES), link.delay_ms)


def test_hosts_join_cards_by_their_links_and_slow_their_stages() -> None:
    network = HostNetwork(
        hosts=(PaperHost(name="a", stages=2), PaperHost(name="b", stages=2, speed=0.5)),
        link=NetworkLink(gbit_per_s=8.0, delay_ms=3.0),
    )
    costs = Cluster(
        model="Qwen2.5-14B", device="a100-80g", link="nvlink", num_stages=4, hosts=network
    ).costs()
    assert [link.latency_s for link in costs.links] == pytest.approx([14e-6, 3e-3, 14e-6, 3e-3])
    assert costs.links[1].bytes_per_s == 1e9
    assert costs.links[1].bytes_per_token == 2 * 5120
    assert costs.stage_slowness == (1.0, 1.0, 2.0, 2.0)


def test_what_the_simulator_cannot_do_with_hosts_is_refused() -> None:
    link = NetworkLink(gbit_per_s=8.0, delay_ms=3.0)
    two = HostNetwork(hosts=(PaperHost(name="a"), PaperHost(name="b")), link=link)
    large = HostNetwork(hosts=(PaperHost(name="a", memory="80GiB"), PaperHost(name="b")), link=link)
    for hosts, setting, message in (
        (two, {"num_stages": 4}, "the hosts have 2 stages"),
        (large, {"num_stages": 2}, "equal cards"),
        (two, {"num_stages": 2, "stage_slowness": (1.0, 2.0)}, "name no slowness"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Cluster(model="Qwen2.5-14B", device="a100-80g", hosts=hosts, **setting)
