"""One simulated run of several pipelines from names: mixed ones behind a router, or prefill and
decode apart, with attention offload or without. As `experiment.py` for one pipeline."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs, require
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.disaggregated_fleet import (
    DecodeServer,
    DisaggregatedFleet,
    OffloadRule,
    PrefillServer,
)
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.fleet import MixedFleet
from sgl_pipeline.simulator.offload_setup import AttentionOffload
from sgl_pipeline.simulator.peer_pages import PeerLink, PeerPages, peer_rules
from sgl_pipeline.simulator.remote_attention import LocalAttention, RemoteAttention
from sgl_pipeline.simulator.simulation import ServedRequest, Simulation
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.virtual_store import SIMULATED_PLACE
from sgl_pipeline.simulator.workload import SimulatedRequest
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import POLICY_TABLE, make_policy

OnProgress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregation:
    """`num_prefills` pipelines that are each `prefill`, and `num_decodes` that are each `decode`.
    Models are equal; depths, splits, cards and pools need not be. `prefill_policy` None: both sides
    have the same. A decode pipeline has `extra_decode_steps` more in flight than it has stages."""

    prefill: Cluster
    decode: Cluster
    link: PeerLink
    num_prefills: int = 1
    num_decodes: int = 1
    prefill_policy: str | None = None
    extra_decode_steps: int = 0
    offload: AttentionOffload | None = None

    def __post_init__(self) -> None:
        require(self.num_prefills > 0 and self.num_decodes > 0, "there must be a server of each")
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
    def rule(self) -> OffloadRule | None:
        """None without offload."""
        if self.offload is None:
            return None
        return OffloadRule(self.bound, self.offload.reading, self.offload.only_hidden)

    @property
    def prefill_pool_tokens(self) -> int:
        """Of each prefill server, for prompts."""
        tokens = self.prefill.kv_pool_tokens()
        return tokens if self.offload is None else tokens - self.offload.lent_tokens(self.prefill)

    @property
    def decode_pool_tokens(self) -> int:
        """Of each decode server, what it may fill of prefill servers' pools included."""
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
    for policy in (first.policy, throttle.policy):
        require(
            not POLICY_TABLE[policy].budgets_time,
            f"{policy} is not simulated with prefill and decode apart",
        )
    require(scheduling.radix_cache, "pages that have crossed are found in the radix cache")
    prefills = [
        PrefillServer(_prefill(setup, first, scheduling)) for _ in range(setup.num_prefills)
    ]
    decodes = [_decode(setup, throttle, scheduling) for _ in range(setup.num_decodes)]
    fleet = DisaggregatedFleet(prefills, decodes, setup.rule)
    fleet.run(workload, on_progress)
    assert not any(one.pipeline.scheduler.kept_pages.num_pages for one in prefills)
    pages = setup.prefill_pool_tokens // scheduling.page_size
    return FleetRun(
        requests=tuple(fleet.served),
        pipelines=tuple(one.result() for one in fleet.pipelines),
        num_devices=setup.num_devices,
        prefill_s=tuple(fleet.prefill_s),
        handover_s=tuple(fleet.handover_s),
        loaded_bytes=sum(one.pages.loaded_bytes for one in decodes),
        num_offloaded=sum(one.num_offloaded for one in decodes),
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
                _scheduler(throttle, scheduling, pool_tokens, cluster.num_stages),
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
    setup: Disaggregation, throttle: ThrottleArgs, scheduling: SchedulingArgs
) -> VirtualPipeline:
    costs = setup.prefill.costs()
    if setup.offload is not None:
        slowness = costs.stage_slowness or (1.0,) * costs.num_stages
        left = 1.0 - setup.offload.compute_share
        costs = replace(costs, stage_slowness=tuple(one / left for one in slowness))
    scheduler = _scheduler(throttle, scheduling, setup.prefill_pool_tokens, costs.num_stages)
    return VirtualPipeline(scheduler, costs, _no_forecast(costs.layer_counts))


def _decode(
    setup: Disaggregation, throttle: ThrottleArgs, scheduling: SchedulingArgs
) -> DecodeServer:
    cluster, offload, costs = setup.decode, setup.offload, setup.decode.costs()
    page_size, remote = scheduling.page_size, None
    if offload is not None:
        parts = cluster.parts()
        speed = offload.speed(setup.prefill, cluster, setup.lenders)
        exchange = offload.exchange(cluster.shape, speed)
        remote = RemoteAttention(parts, exchange, costs.layer_counts, offload.fills_waits)
        costs = replace(costs, stage=LocalAttention(parts))
    extra_steps = scheduling.extra_steps_in_flight + setup.extra_decode_steps
    scheduling = replace(scheduling, extra_steps_in_flight=extra_steps)
    scheduler = _scheduler(throttle, scheduling, setup.decode_pool_tokens, costs.num_stages)
    scheduler.tier.use(SIMULATED_PLACE, peer_rules(page_size))
    pages = PeerPages(setup.link, cluster.shape.kv_bytes_per_layer_token * page_size)
    pipeline = VirtualPipeline(
        scheduler, costs, _no_forecast(costs.layer_counts), store=pages, remote=remote
    )
    lent_pages = (setup.decode_pool_tokens - cluster.kv_pool_tokens()) // page_size
    return DecodeServer(pipeline, pages, remote, lent_pages)


def _scheduler(
    throttle: ThrottleArgs, scheduling: SchedulingArgs, pool_tokens: int, num_stages: int
) -> StepScheduler:
    return StepScheduler(
        scheduling,
        make_policy(throttle),
        num_pages=pool_tokens // scheduling.page_size,
        num_stages=num_stages,
        context_length=pool_tokens,
    )


def _no_forecast(layer_counts: tuple[int, ...]) -> StepForecast:
    """Nothing is known of step times, so that no load is declined as too slow."""
    return StepForecast(StagePlan(0, layer_counts), learns=False)
