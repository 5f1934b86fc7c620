"""One simulated run of several pipelines from names: mixed ones behind a router, or prefill and
decode apart, with attention offload or without. As `experiment.py` for one pipeline."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs, require
from sgl_pipeline.disaggregation.prefill_servers import MOST_PEERS
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.disaggregated_fleet import DisaggregatedFleet
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.fleet import MixedFleet
from sgl_pipeline.simulator.offload_setup import AttentionOffload
from sgl_pipeline.simulator.peer_pages import PeerLink, PeerReads, VirtualOffers
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.remote_attention import LocalAttention, RemoteAttention
from sgl_pipeline.simulator.room_servers import LIMITS, DecodeServer, PrefillServer
from sgl_pipeline.simulator.simulation import ServedRequest, Simulation
from sgl_pipeline.simulator.virtual_offload import LendingScheduler, OffloadSetting, VirtualOffload
from sgl_pipeline.simulator.workload import SimulatedRequest
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import POLICY_TABLE, make_policy

OnProgress = Callable[[int, float], None]
Scheduler = TypeVar("Scheduler", bound=StepScheduler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregation:
    """`num_prefills` pipelines that are each `prefill`, and `num_decodes` that are each `decode`.
    Models are equal; depths, splits, cards and pools need not be. `prefill_policy` None: both sides
    have the same. A decode pipeline has `extra_decode_steps` more in flight than it has stages, and
    begins no load without room for `reserved_tokens` more tokens of each request that may grow."""

    prefill: Cluster
    decode: Cluster
    link: PeerLink
    num_prefills: int = 1
    num_decodes: int = 1
    prefill_policy: str | None = None
    extra_decode_steps: int = 0
    reserved_tokens: int = LIMITS.reserved_tokens
    offload: AttentionOffload | None = None

    def __post_init__(self) -> None:
        require(self.num_prefills > 0 and self.num_decodes > 0, "there must be a server of each")
        require(self.num_prefills <= MOST_PEERS, f"at most {MOST_PEERS} prefill servers are known")
        require(self.prefill.shape == self.decode.shape, "both sides serve one model")
        for cluster in (self.prefill, self.decode):
            require(
                not cluster.migration.is_on and cluster.store is None,
                "layers that move and stores are not simulated with prefill and decode apart",
            )

    @property
    def num_devices(self) -> int:
        return (
            self.num_prefills * self.prefill.num_stages + self.num_decodes * self.decode.num_stages
        )

    @property
    def lenders(self) -> float:
        """Prefill servers for each decode server."""
        return self.num_prefills / self.num_decodes

    @property
    def bound(self) -> float:
        """The offload bound; 0 without offload."""
        if self.offload is None:
            return 0.0
        return self.offload.ratio_bound(self.prefill, self.decode, self.lenders)

    @property
    def prefill_pool_tokens(self) -> int:
        """The tokens of each prefill server's pool that are for prompts."""
        tokens = self.prefill.kv_pool_tokens()
        return tokens if self.offload is None else tokens - self.offload.lent_tokens(self.prefill)

    @property
    def decode_pool_tokens(self) -> int:
        """The tokens of each decode server's pool, with its share of prefill servers' pools."""
        own = self.decode.kv_pool_tokens()
        if self.offload is None:
            return own
        lent = self.lenders * self.offload.lent_tokens(self.prefill)
        return own + int(min(lent, self.bound * own))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """The requests, and what the pipelines did.

    `prefill_s` is what each request took to the end of its prefill, `handover_s` from there to its
    first token; `most_held_share` is the most of a prefill pool that was held. Without prefill
    servers these are empty or 0.
    """

    requests: tuple[ServedRequest, ...]
    pipelines: tuple[Simulation, ...]
    num_devices: int
    prefill_s: tuple[float, ...] = ()
    handover_s: tuple[float, ...] = ()
    loaded_bytes: int = 0
    num_offloaded: int = 0
    most_held_share: float = 0.0

    @property
    def num_retractions(self) -> int:
        return sum(one.num_retractions for one in self.pipelines)


def simulate_disaggregated(
    setup: Disaggregation,
    throttle: ThrottleArgs,
    scheduling: SchedulingArgs,
    workload: Iterable[SimulatedRequest],
    on_progress: OnProgress = lambda ended, now_s: None,
) -> FleetRun:
    """Serves `workload` with prefill and decode apart."""
    first = replace(throttle, policy=setup.prefill_policy or throttle.policy)
    require(scheduling.radix_cache, "pages that have crossed are found in the radix cache")
    prefills = [
        _prefill(f"prefill {number}", setup, first, scheduling)
        for number in range(setup.num_prefills)
    ]
    sources = {one.name: one.offers for one in prefills}
    decodes = [
        _decode(f"decode {number}", setup, throttle, scheduling, sources)
        for number in range(setup.num_decodes)
    ]
    fleet = DisaggregatedFleet(prefills, decodes)
    fleet.run(workload, on_progress)
    assert not any(one.pipeline.scheduler.tier.held.num_rooms for one in prefills)
    pages = setup.prefill_pool_tokens // scheduling.page_size
    return FleetRun(
        requests=tuple(fleet.served),
        pipelines=tuple(one.result() for one in fleet.pipelines),
        num_devices=setup.num_devices,
        prefill_s=tuple(fleet.prefill_s),
        handover_s=tuple(fleet.handover_s),
        loaded_bytes=sum(one.reads.loaded_bytes for one in decodes),
        num_offloaded=sum(one.offload.num_offloaded for one in decodes if one.offload is not None),
        most_held_share=max(one.most_held_pages for one in prefills) / pages,
    )


def simulate_mixed(
    cluster: Cluster,
    num_pipelines: int,
    throttle: ThrottleArgs,
    scheduling: SchedulingArgs,
    workload: Iterable[SimulatedRequest],
    on_progress: OnProgress = lambda ended, now_s: None,
) -> FleetRun:
    """Serves `workload` with pipelines that prefill and decode."""
    require(num_pipelines > 0, "there must be a pipeline")
    is_timed = POLICY_TABLE[throttle.policy].budgets_time
    pool_tokens = cluster.kv_pool_tokens()
    fleet = MixedFleet(
        [
            cluster.pipeline(
                _scheduler(StepScheduler, throttle, scheduling, pool_tokens, cluster.num_stages),
                scheduling.page_size,
                is_timed=is_timed,
            )
            for _ in range(num_pipelines)
        ]
    )
    fleet.run(workload, on_progress)
    return FleetRun(
        requests=tuple(fleet.served),
        pipelines=tuple(one.result() for one in fleet.pipelines),
        num_devices=num_pipelines * cluster.num_stages,
    )


def _prefill(
    name: str, setup: Disaggregation, throttle: ThrottleArgs, scheduling: SchedulingArgs
) -> PrefillServer:
    costs = setup.prefill.costs()
    if setup.offload is not None:
        slowness = costs.stage_slowness or (1.0,) * costs.num_stages
        left = 1.0 - setup.offload.compute_share
        costs = replace(costs, stage_slowness=tuple(one / left for one in slowness))
    tokens = setup.prefill_pool_tokens
    scheduler = _scheduler(StepScheduler, throttle, scheduling, tokens, costs.num_stages)
    forecast = _forecast(setup.prefill, costs, throttle.policy)
    return PrefillServer(name, scheduler, costs, forecast)


def _decode(
    name: str,
    setup: Disaggregation,
    throttle: ThrottleArgs,
    scheduling: SchedulingArgs,
    sources: Mapping[str, VirtualOffers],
) -> DecodeServer:
    cluster, costs = setup.decode, setup.decode.costs()
    extra_steps = scheduling.extra_steps_in_flight + setup.extra_decode_steps
    scheduling = replace(scheduling, extra_steps_in_flight=extra_steps)
    tokens = setup.decode_pool_tokens
    scheduler = _scheduler(LendingScheduler, throttle, scheduling, tokens, costs.num_stages)
    page_bytes = cluster.shape.kv_bytes_per_layer_token * scheduling.page_size
    reads = PeerReads(setup.link, page_bytes, sources)
    offload = _offload(setup, scheduler, costs.layer_counts)
    if offload is not None:
        costs = replace(costs, stage=LocalAttention(cluster.parts()))
    forecast = _forecast(cluster, costs, throttle.policy)
    return DecodeServer(
        name, scheduler, costs, reads, forecast, offload, reserved_tokens=setup.reserved_tokens
    )


def _offload(
    setup: Disaggregation, scheduler: LendingScheduler, layer_counts: tuple[int, ...]
) -> VirtualOffload | None:
    cluster, offload = setup.decode, setup.offload
    if offload is None:
        return None
    speed = offload.speed(setup.prefill, cluster, setup.lenders)
    exchange = offload.exchange(cluster.shape, speed)
    remote = RemoteAttention(cluster.parts(), exchange, layer_counts, offload.fills_waits)
    rule = OffloadSetting(setup.bound, offload.reading, offload.only_hidden)
    lent_tokens = setup.decode_pool_tokens - cluster.kv_pool_tokens()
    return VirtualOffload(scheduler, remote, rule, lent_tokens // scheduler.args.page_size)


def _scheduler(
    kind: type[Scheduler],
    throttle: ThrottleArgs,
    scheduling: SchedulingArgs,
    pool_tokens: int,
    num_stages: int,
) -> Scheduler:
    return kind(
        scheduling,
        make_policy(throttle),
        num_pages=pool_tokens // scheduling.page_size,
        num_stages=num_stages,
        context_length=pool_tokens,
    )


def _forecast(cluster: Cluster, costs: PipelineCosts, policy: str) -> StepForecast:
    """Step times for a policy that budgets time; else nothing is known of them.

    Decodes whose attention is computed elsewhere count as if it were not: schedulers here know no
    leases. Stages are then faster than predicted, which their learned speeds show.
    """
    if POLICY_TABLE[policy].budgets_time:
        return cluster.step_forecast(costs)
    return StepForecast(StagePlan(0, costs.layer_counts), learns=False)
