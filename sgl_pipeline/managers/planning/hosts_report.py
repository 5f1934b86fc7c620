"""Forecasts a pipeline over hosts and their links: `sgl_pipeline plan --hosts FILE`.

Pure arithmetic and text.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.costs.stage_costs import PartSizes, StageCosts
from sgl_pipeline.host_network import HostNetwork, NetworkLink
from sgl_pipeline.managers.planning.devices import StageDevice, parse_devices
from sgl_pipeline.managers.planning.split_report import SplitForecast, SplitPlanner
from sgl_pipeline.migration.host_order import Hop, Route, RouteSearch

_MOST_EXTRA_STEPS = 8  # as --extra-steps-in-flight


class HostPlanner:
    """Orders and splits of one model over given hosts.

    Args:
        costs: of the measured device; hosts have speeds relative to it.
        step_bytes: bytes that a stage sends in a step.
        memory_bytes: of this machine, assumed for every host that names no memory.
        memory_fraction: of a memory that is named, for weights and pages.
        num_tokens: every stage has pages for them.
        extra_steps: in flight, beyond one a stage.

    Raises ConfigurationError for a memory that cannot be read, and extra steps out of range.
    """

    def __init__(
        self,
        network: HostNetwork,
        costs: StageCosts,
        sizes: PartSizes,
        step_bytes: int,
        memory_bytes: int,
        memory_fraction: float,
        num_tokens: int,
        extra_steps: int,
    ) -> None:
        SchedulingArgs(extra_steps_in_flight=extra_steps)  # raises for values that a server refuses
        self.network = network
        self.steps_in_flight = network.num_stages + extra_steps
        self.step_bytes = step_bytes
        self._costs, self._sizes = costs, sizes
        self._devices = [
            parse_devices(
                ",".join([f"{host.memory or 'cpu'}:{host.speed}"] * host.stages),
                host.stages,
                memory_bytes,
                memory_fraction,
            )
            for host in network.hosts
        ]
        least_pages = max(1, -(-num_tokens // sizes.page_size))

        def fits(host: int, start: int, end: int) -> bool:
            device: StageDevice = self._devices[host][0]
            return sizes.num_pages(start, end, device.memory_bytes) >= least_pages

        places = range(len(network.hosts))
        self._search = RouteSearch(
            [costs.scaled(1.0 / host.speed) for host in network.hosts],
            [host.stages for host in network.hosts],
            [[self._hop(network.between(one, other)) for other in places] for one in places],
            fits,
            self.steps_in_flight,
        )

    def _hop(self, link: NetworkLink | None) -> Hop:
        if link is None:
            return Hop()
        return Hop(link.busy_ms(self.step_bytes), link.transfer_ms(self.step_bytes), link.delay_ms)

    def best(self) -> Route:
        """The order and split of the shortest period. Raises ConfigurationError if none fits."""
        return self._search.best()

    def as_listed(self) -> Route | None:
        """The best split with the hosts in the file's order."""
        return self._search.along(range(len(self.network.hosts)))

    def split(self, route: Route) -> SplitForecast:
        """Times, weights and pages of the route's stages."""
        devices = [device for host in route.order for device in self._devices[host]]
        return SplitPlanner(self._costs, self._sizes, devices).forecast(route.layer_counts)


def describe_route(name: str, planner: HostPlanner, route: Route) -> list[str]:
    """A route as lines of text, without its stages."""
    network = planner.network.ordered(route.order)
    names = " > ".join(host.name for host in network.hosts)
    counts = ",".join(map(str, route.layer_counts))
    lines = [f"{name}: {names}, layers {counts}: a step every {route.period_ms:.2f} ms"]
    for place, (one, other) in enumerate(pairwise(network.hosts)):
        link = network.between(place, place + 1)
        assert link is not None
        lines.append(
            f"  {one.name} to {other.name}, {link.gbit_per_s:g} Gbit/s and {link.delay_ms:g} ms: "
            f"rows of a step take {link.transfer_ms(planner.step_bytes):.2f} ms"
        )
    return [*lines, f"  {_bound(planner, route)}"]


def bound_by(planner: HostPlanner, route: Route) -> Literal["round", "link", "stage"]:
    """The limit that keeps the period from being shorter."""
    if route.round_ms / planner.steps_in_flight > max(route.slowest_ms, route.busiest_ms):
        return "round"
    return "link" if route.busiest_ms > route.slowest_ms else "stage"


def _bound(planner: HostPlanner, route: Route) -> str:
    """The limit in words, and the flag that would change it."""
    bound = bound_by(planner, route)
    if bound == "stage":
        return f"bound by the slowest stage, {route.slowest_ms:.2f} ms"
    if bound == "link":
        return f"bound by a link, which rows take for {route.busiest_ms:.2f} ms of each step"
    in_flight, num_stages = planner.steps_in_flight, planner.network.num_stages
    extra = -(-route.round_ms // max(route.slowest_ms, route.busiest_ms)) - num_stages
    text = f"bound by a round of {route.round_ms:.2f} ms with {in_flight} steps in flight"
    wanted = int(min(extra, _MOST_EXTRA_STEPS))
    if wanted > in_flight - num_stages:
        text += f"; --extra-steps-in-flight {wanted} would use more of that time"
    return text


def start_lines(network: HostNetwork, route: Route) -> Sequence[str]:
    """The flags with which each host starts a server with this route."""
    hosts = network.ordered(route.order).hosts
    if len({host.stages for host in hosts}) > 1:
        return ["a server has as many stages on every host: it cannot be started on these yet"]
    counts = ",".join(map(str, route.layer_counts))
    shared = f"--nnodes {len(hosts)} --pp {network.num_stages} --pp-layer-partition {counts}"
    return [
        "each host is started with",
        *(
            f"  {host.name}: {shared} --node-rank {rank} --dist-init-addr {hosts[0].name}:PORT"
            for rank, host in enumerate(hosts)
        ),
    ]
