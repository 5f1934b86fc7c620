"""One simulated serving run from names: a model on cards behind links, a policy, a workload.

The door of the room: the command line, the figures and the budget search all go through `simulate`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs, require
from sgl_pipeline.costs.stage_costs import TYPICAL_STEP, StageCosts
from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.host_network import HostNetwork
from sgl_pipeline.layer_partition import even_layer_counts
from sgl_pipeline.migration.partition import balanced_layer_counts
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.simulator.calibration import FittedCosts, fit_trace, known_of_trace
from sgl_pipeline.simulator.forecasts import fitted_costs
from sgl_pipeline.simulator.kernel_costs import DEVICES, part_seconds
from sgl_pipeline.simulator.migration_setup import STILL, Migration
from sgl_pipeline.simulator.models import (
    KV_CACHE_DTYPES,
    MODELS,
    QUANTIZATIONS,
    KvCacheDtype,
    ModelShape,
    Quantization,
    model_shape,
)
from sgl_pipeline.simulator.pipeline_costs import (
    AttentionSeconds,
    HostCosts,
    PipelineCosts,
    ScaledTail,
    SimulatedLink,
)
from sgl_pipeline.simulator.predicted_pipeline import PredictedPipeline
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.stage_clock import Slowdown
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.virtual_store import SIMULATED_PLACE, StoreCosts, VirtualStore
from sgl_pipeline.simulator.workload import SimulatedRequest
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import POLICY_TABLE, make_policy

# Latency and bytes a second. pcie and net73 are gLLM's two machines (section 4.1: 20.79 GB/s and
# 73.28 Gbps), with the latency of Vidur's a100_dgx inter-node fit; nvlink is that file's intra-node
# fit. net10 is a 10 Gbps network of that latency.
LINKS = {
    "pcie": (27e-6, 20.79e9),
    "net73": (27e-6, 9.16e9),
    "net10": (27e-6, 1.25e9),
    "nvlink": (14e-6, 317e9),
    "ideal": (0.0, float("inf")),
}

# Vidur's engine measurements on A100 (cpu_overheads_ms.csv, run 6555c85: medians fitted over 8 to
# 128 decodes): schedule 0.02 + 0.003 b ms, prepare 0.15 + 0.001 b ms, results 0.04 + 0.030 b ms.
VIDUR_A100_HOST = HostCosts(
    schedule_step_s=0.02e-3,
    schedule_chunk_s=0.003e-3,
    prepare_step_s=0.15e-3,
    prepare_chunk_s=0.001e-3,
    result_step_s=0.04e-3,
    result_token_s=0.030e-3,
)

# Of a store, by default.
SERVER_RULES = TierRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_stages` equal cards, one a stage. `memory_share` of each is for weights and KV; some of
    the rest is for activations. `pool_tokens` overrides what would fit. Where layers may move, each
    card keeps room for the most of them that it may hold.

    `layer_counts` is the split, by default made by `split`: `auto` is the server's, by the time of
    a typical step, the head included, among those that fit. `layer_weights` are as in
    `PipelineCosts`; norm, head and sampling take `tail_factor` times what the tables say.

    `forecast` says what planner and policy predict by: `tables`, costs fitted beforehand to made-up
    steps of the cluster's own tables, as a server has them from a file; `online`, costs fitted to
    the steps that they see. The stages' speeds are learned from their steps with both.

    With `hosts`, their links join the stages of neighboring hosts in place of `link`, and their
    speeds are those of their stages. Orders reach all hosts at once; results have the way back.

    With `store`, pages go to a store, empty at first, and come back, by `tier_rules`.
    """

    model: str
    device: str
    quantization: Quantization = "none"
    kv_cache_dtype: KvCacheDtype = "auto"
    link: str = "pcie"
    num_stages: int = 4
    tensor_parallel: int = 1
    memory_share: float = 0.9
    layer_counts: tuple[int, ...] = ()
    split: Literal["even", "auto"] = "even"
    layer_weights: tuple[float, ...] = ()
    tail_factor: float = 1.0
    hosts: HostNetwork | None = None
    stage_slowness: tuple[float, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    migration: Migration = STILL
    forecast: Literal["tables", "online"] = "tables"
    pool_tokens: int | None = None
    host: HostCosts = VIDUR_A100_HOST
    store: StoreCosts | None = None
    tier_rules: TierRules = SERVER_RULES

    def __post_init__(self) -> None:
        for name, known in (
            (self.model, MODELS),
            (self.device, DEVICES),
            (self.link, LINKS),
            (self.quantization, QUANTIZATIONS),
            (self.kv_cache_dtype, KV_CACHE_DTYPES),
        ):
            if name not in known:
                raise ConfigurationError(f"{name!r} is unknown; choose from {', '.join(known)}")
        if self.hosts is not None:
            self._check_hosts(self.hosts)

    def _check_hosts(self, hosts: HostNetwork) -> None:
        require(
            hosts.num_stages == self.num_stages,
            f"the hosts have {hosts.num_stages} stages, the pipeline {self.num_stages}",
        )
        require(
            all(host.memory is None for host in hosts.hosts),
            "the simulator has all stages on equal cards; name one (--device), not hosts' memory",
        )
        require(not self.stage_slowness, "hosts say how fast their stages are; name no slowness")
        require(not self.migration.is_on, "layers that move between hosts are not simulated")

    @property
    def shape(self) -> ModelShape:
        """The shape of the model as it is served."""
        return model_shape(self.model, self.quantization, self.kv_cache_dtype)

    def costs(self) -> PipelineCosts:
        return PipelineCosts(
            self.parts(),
            self.layers,
            self._link(*LINKS[self.link]),
            self.host,
            self._slowness,
            self.layer_weights,
            () if self.hosts is None else self._host_links(self.hosts),
        )

    def _link(self, latency_s: float, bytes_per_s: float) -> SimulatedLink:
        return SimulatedLink(
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            bytes_per_token=self.shape.hidden_bytes_per_token,
        )

    def _host_links(self, hosts: HostNetwork) -> tuple[SimulatedLink, ...]:
        """After each stage; the last one's results have no more than a delay."""
        places = hosts.host_of_stage
        links = []
        for one, other in pairwise(places):
            joint = hosts.between(one, other)
            if joint is None:
                links.append(self._link(*LINKS[self.link]))
            else:
                links.append(self._link(joint.delay_ms * 1e-3, joint.gbit_per_s * 1e9 / 8))
        back = hosts.between(places[-1], places[0])
        return (*links, SimulatedLink(latency_s=0.0 if back is None else back.delay_ms * 1e-3))

    @property
    def _slowness(self) -> tuple[float, ...]:
        return self.stage_slowness if self.hosts is None else self.hosts.stage_slowness

    @property
    def layers(self) -> tuple[int, ...]:
        if self.layer_counts:
            return self.layer_counts
        if self.split == "auto":
            return self._auto_layers()
        return even_layer_counts(self.shape.num_layers, self.num_stages)

    def _auto_layers(self) -> tuple[int, ...]:
        """The server's split, by each worker's time for the typical step, from the tables."""
        model = self.shape
        weights = self.layer_weights or (1.0,) * model.num_layers
        parts, shape = self.parts(), StepShape.made_up(TYPICAL_STEP)
        layer_ms = parts.layer_s(shape) * 1e3
        costs = StageCosts(
            tuple(weight * layer_ms for weight in weights),
            parts.embedding_s(shape) * 1e3,
            parts.tail_s(shape) * 1e3,
        )
        slowness = self._slowness or (1.0,) * self.num_stages
        return balanced_layer_counts([costs.scaled(slow) for slow in slowness], self._fits)

    def _fits(self, stage: int, start: int, end: int) -> bool:
        """True if a card holds those layers' weights and a page."""
        num_ends = (stage == 0) + (stage == self.num_stages - 1)
        return self.shape.weight_bytes(end - start, num_ends) < self._usable_bytes

    @property
    def _usable_bytes(self) -> float:
        """Bytes of a stage for weights and KV."""
        return DEVICES[self.device].memory_bytes * self.memory_share * self.tensor_parallel

    def parts(self) -> AttentionSeconds:
        """The times of a layer and of the ends."""
        return _parts(self.device, self.shape, self.tensor_parallel, self.tail_factor)

    def kv_pool_tokens(self) -> int:
        if self.pool_tokens is not None:
            return self.pool_tokens
        most_layers = self.migration.args.max_layers(StagePlan(0, self.layers))
        return self.shape.kv_pool_tokens(most_layers, self._usable_bytes)

    def pipeline(
        self, scheduler: StepScheduler, page_size: int, *, is_timed: bool = False
    ) -> VirtualPipeline:
        """A new one, with nothing in it; `is_timed` where its policy or drafts ask what steps
        take."""
        costs = self.costs()
        plan = StagePlan(0, costs.layer_counts)
        forecast = StepForecast(plan, learns=False)
        store = self._new_store(page_size)
        if store is not None:
            scheduler.tier.use(SIMULATED_PLACE, self.tier_rules)
        # A load is declined if it would take longer than to compute.
        if is_timed or self.migration.is_on or store is not None:
            forecast = self.step_forecast(costs)
        return VirtualPipeline(
            scheduler,
            costs,
            forecast,
            self.migration.control(plan, forecast, scheduler),
            self.migration.move_costs(self.shape, *LINKS[self.link], page_size),
            self.slowdowns,
            self.migration.wishes,
            store,
        )

    def step_forecast(self, costs: PipelineCosts) -> StepForecast:
        """Predicts the steps of stages with these costs, by what `forecast` says. Tables are those
        of the cluster: the steps that costs are fitted to compute all attention here."""
        predictor = None
        if self.forecast == "tables":
            fitted = _fitted_to_tables(
                self.device, self.shape, self.tensor_parallel, self.tail_factor, self.layer_weights
            )
            predictor = StepPredictor(fitted)
        return StepForecast(StagePlan(0, costs.layer_counts), predictor)

    def _new_store(self, page_size: int) -> VirtualStore | None:
        if self.store is None:
            return None
        layer_page_bytes = self.shape.kv_bytes_per_layer_token * page_size
        return VirtualStore(
            self.store, layer_page_bytes, self.shape.num_layers, self.host.transit_s
        )


def _parts(
    device: str, shape: ModelShape, tensor_parallel: int, tail_factor: float
) -> AttentionSeconds:
    parts = part_seconds(DEVICES[device], shape, tensor_parallel)
    return parts if tail_factor == 1.0 else ScaledTail(parts, tail_factor)


@lru_cache(maxsize=16)  # runs that are compared differ in load, policy and split
def _fitted_to_tables(
    device: str,
    shape: ModelShape,
    tensor_parallel: int,
    tail_factor: float,
    layer_weights: tuple[float, ...],
) -> StepCosts:
    parts = _parts(device, shape, tensor_parallel, tail_factor)
    return fitted_costs(parts, shape.num_layers, layer_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPipeline:
    """Our own server as it was recorded: `trace_path` is what `--trace-path` wrote. Its stages take
    `slowness` times as long as they did then. `forecast` as in `Cluster`: `tables` are the fitted
    costs, known from the start as on a server that has run for a while: `slowness` is not in them,
    and is learned from the steps."""

    trace_path: str
    pool_tokens: int
    slowness: float = 1.0
    forecast: Literal["tables", "online"] = "tables"

    def costs(self) -> FittedCosts:
        return fit_trace(self.trace_path).slowed_by(self.slowness)

    def kv_pool_tokens(self) -> int:
        return self.pool_tokens

    @property
    def num_stages(self) -> int:
        return self.costs().num_stages

    def pipeline(
        self, scheduler: StepScheduler, page_size: int, *, is_timed: bool = False
    ) -> VirtualPipeline:
        """A new one, with nothing in it; its layers stay where they are."""
        costs = self.costs()
        is_known = is_timed and self.forecast == "tables"
        known = known_of_trace(self.trace_path) if is_known else None
        forecast = StepForecast(StagePlan(0, costs.layer_counts), known, learns=is_timed)
        return VirtualPipeline(scheduler, costs, forecast)


def simulate(
    pipeline: Cluster | MeasuredPipeline | PredictedPipeline,
    throttle: ThrottleArgs,
    scheduling: SchedulingArgs,
    workload: Iterable[SimulatedRequest],
    on_progress: Callable[[int, float], None] = lambda finished, now_s: None,
    most_steps: int | None = None,
) -> Simulation:
    """Serves `workload` to its end, or for `most_steps` steps, with the runtime's own scheduler and
    policy."""
    pool_tokens = pipeline.kv_pool_tokens()
    scheduler = StepScheduler(
        scheduling,
        make_policy(throttle),
        num_pages=pool_tokens // scheduling.page_size,
        num_stages=pipeline.num_stages,
        context_length=pool_tokens,
    )
    is_timed = (
        POLICY_TABLE[throttle.policy].budgets_time
        or scheduling.fair_shares_by is not None
        or scheduling.draft_tokens > 0
    )
    virtual = pipeline.pipeline(scheduler, scheduling.page_size, is_timed=is_timed)
    return virtual.run(workload, on_progress, most_steps)
