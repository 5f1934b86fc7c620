"""The cells of `policy_grid.py`: pipelines, loads and latency targets, and one run in a cell."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from benchmark.figures.figure import closed_loop
from benchmark.figures.plans import made_up
from benchmark.figures.wrong_forecasts import CASES
from benchmark.forecasts.cpu_parts import CPU_PARTS, NUM_LAYERS
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.layer_partition import even_layer_counts
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.forecasts import fitted_costs
from sgl_pipeline.simulator.pipeline_costs import HostCosts, PipelineCosts, PipelineTiming
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import LatencyTarget, summarize
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import POLICY_TABLE, make_policy

# Requests of a lone client and of a rate's cell, and most of a cell.
FEW_REQUESTS, MANY_REQUESTS = 8, 64
SCHEDULING = SchedulingArgs(max_running_requests=1024)
# A request is served well if it takes at most so many times what a request takes alone.
TTFT_FACTOR, TPOT_FACTOR = 5.0, 2.0
# Scheduler and stages of a CPU server, a step (`scheduler ms a step` of the recorded loads).
CPU_HOST = HostCosts(schedule_step_s=0.5e-3, result_step_s=0.5e-3, transit_s=1e-3)
CPU_POOL_TOKENS = 65536
# Of `wrong_forecasts`, those of costs that are known and times that do not deviate.
KNOWN_CASES = {name: case for name, case in CASES.items() if case.is_known and not case.noise}


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on stages of one kind. Prompts and answers are `scale` times as long as on a GPU."""

    name: str
    depths: tuple[int, ...]
    cluster: tuple[str, str] | None = None  # model and card; None: a small model on CPU cores
    scale: float = 1.0

    def costs(self, depth: int) -> PipelineCosts:
        cluster = self._cluster(depth)
        if cluster is not None:
            return cluster.costs()
        return PipelineCosts(CPU_PARTS, even_layer_counts(NUM_LAYERS, depth), host=CPU_HOST)

    def pool_tokens(self, depth: int) -> int:
        cluster = self._cluster(depth)
        return CPU_POOL_TOKENS if cluster is None else cluster.kv_pool_tokens()

    def _cluster(self, depth: int) -> Cluster | None:
        if self.cluster is None:
            return None
        model, device = self.cluster
        return Cluster(model=model, device=device, num_stages=depth, split="auto")


MACHINES = (
    Machine("0.27B on CPU cores", (1, 2, 4, 8), scale=0.5),
    Machine("14B on A100", (1, 2, 4, 8), ("Qwen2.5-14B", "a100-80g")),
    Machine("8B on RTX PRO 6000", (1, 4), ("Llama-3.1-8B", "rtxpro6000")),
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with prompts and answers of mean `lengths`, one in four of `long_lengths` where
    those are given: at a `share` of the rate that the token throttle carries when all come at once
    (1: at once), or of so many `clients`. KV has room for `pool_requests` whole requests, or for as
    many as the cards hold."""

    name: str
    lengths: tuple[int, int]
    share: float = 1.0
    clients: int | None = None
    long_lengths: tuple[int, int] | None = None
    pool_requests: int | None = None


CHAT = (256, 128)
LOADS = (
    Load("chat 0.3", CHAT, 0.3),
    Load("chat 0.6", CHAT, 0.6),
    Load("chat 0.9", CHAT, 0.9),
    Load("long prompts 0.7", (2048, 64), 0.7),
    Load("long prompts at once", (2048, 64)),
    Load("decode heavy 0.8", (32, 256), 0.8),
    Load("prefill only 0.7", (1024, 1), 0.7),
    Load("mixed contexts 0.8", CHAT, 0.8, long_lengths=(3072, 128)),
    Load("1 client", CHAT, clients=1),
    Load("4 clients", CHAT, clients=4),
    Load("16 clients", CHAT, clients=16),
    Load("64 clients", CHAT, clients=64),
    Load("scarce memory at once", CHAT, pool_requests=20),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A load on a pipeline; `seed` draws lengths and arrivals."""

    machine: Machine
    depth: int
    load: Load
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.machine.name}, PP {self.depth}, {self.load.name}"

    @property
    def pool_tokens(self) -> int:
        load = self.load
        if load.pool_requests is None:
            return self.machine.pool_tokens(self.depth)
        return round(load.pool_requests * sum(load.lengths) * self.machine.scale)

    def workload(self) -> list[SimulatedRequest]:
        load = self.load
        clients = load.clients
        if clients is not None:
            requests = self.requests(max(FEW_REQUESTS, min(3 * clients, 2 * MANY_REQUESTS)))
            return closed_loop(requests, clients)
        requests = self.requests(MANY_REQUESTS)
        if load.share == 1.0:
            return requests
        rate_per_s = load.share * _capacity_per_s(self.machine, self.depth, load)
        return poisson_arrivals(requests, rate_per_s, Random(self.seed))

    def target(self) -> LatencyTarget:
        """From a lone request's times."""
        return latency_target(self.served("throttle", "exact", self.requests(1)))

    def served(self, policy: str, case: str, workload: Sequence[SimulatedRequest]) -> Simulation:
        """A run of a policy whose forecast is wrong as in that case of `wrong_forecasts`."""
        costs = self.machine.costs(self.depth)
        forecast = None
        if POLICY_TABLE[policy].budgets_time:
            biased = KNOWN_CASES[case].biased(_fitted(self.machine))
            plan = StagePlan(0, costs.layer_counts)
            forecast = StepForecast(plan, StepPredictor(biased), KNOWN_CASES[case].learns)
        return serve(policy, costs, forecast, self.pool_tokens, workload)

    def requests(self, count: int) -> list[SimulatedRequest]:
        """The first requests of the load."""
        scale, load = self.machine.scale, self.load

        def scaled(lengths: tuple[int, int]) -> list[SimulatedRequest]:
            prompt, answer = lengths
            lengths_in_out = round(scale * prompt), max(1, round(scale * answer))
            return made_up(count, *lengths_in_out, self.seed)

        requests = scaled(load.lengths)
        if load.long_lengths is not None:
            requests[::4] = scaled(load.long_lengths)[::4]
        return requests


@cache
def _capacity_per_s(machine: Machine, depth: int, load: Load) -> float:
    """Requests a second that the token throttle carries when all come at once."""
    cell = Cell(machine, depth, load)
    served = cell.served("throttle", "exact", cell.requests(MANY_REQUESTS))
    return summarize(served).requests_per_s


@cache
def _fitted(machine: Machine) -> StepCosts:
    """The costs that policies predict by, as `fit` would find them."""
    costs = machine.costs(machine.depths[0])
    return fitted_costs(costs.stage, sum(costs.layer_counts))


def cells() -> Iterator[Cell]:
    """All of them, load by load on each pipeline."""
    for machine in MACHINES:
        for depth in machine.depths:
            for load in LOADS:
                yield Cell(machine, depth, load)


def serve(
    policy: str,
    costs: PipelineTiming,
    forecast: StepForecast | None,
    pool_tokens: int,
    workload: Sequence[SimulatedRequest],
) -> Simulation:
    """A run of `workload` on a pipeline of these costs, under a policy with this forecast."""
    scheduler = StepScheduler(
        SCHEDULING,
        make_policy(ThrottleArgs(policy=policy)),
        num_pages=pool_tokens // SCHEDULING.page_size,
        num_stages=costs.num_stages,
        context_length=pool_tokens,
    )
    return VirtualPipeline(scheduler, costs, forecast).run(workload)


def latency_target(alone: Simulation) -> LatencyTarget:
    """The targets of a cell in which a request alone was served like this."""
    found = summarize(alone)
    has_pauses = any(len(one.token_times_s) > 1 for one in alone.requests)
    tpot_ms = found.tpot_ms.mean if has_pauses else 0.0
    return LatencyTarget(ttft_ms=TTFT_FACTOR * found.ttft_ms.mean, tpot_ms=TPOT_FACTOR * tpot_ms)
