"""The throttle by time where its forecast is biased, noisy or learned, and how its level swings.

The policy makes the steps that its forecast learns from; this shows whether the two swing together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np
from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, closed_loop, distinct, numbers, select
from benchmark.figures.plans import made_up
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.costs.step_costs import RowCost, StepCosts
from sgl_pipeline.migration.online_fit import FIRST_FIT_STEPS
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.forecasts import fitted_costs
from sgl_pipeline.simulator.pipeline_costs import (
    HostCosts,
    PipelineCosts,
    PipelineTiming,
    SimulatedLink,
)
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.summary import summarize
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy

CLUSTER = Cluster(model="Qwen2.5-14B", device="a100-80g", num_stages=4, split="auto")
SCHEDULING = SchedulingArgs(max_running_requests=1024)
TRACES = ("sharegpt", "azure_conv")
LOAD = 0.9  # of what the token throttle carries when all come at once
MOST_REQUESTS = 400
CLIENTS = 128
NOISE = 0.2
TOLERANCE = 0.02
COLUMNS = (("total_tokens_per_s", "throughput"), ("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A forecast that is wrong: known costs times these factors, or None known beforehand. With
    `learns` off, as on a GPU, the stages' speeds are not learned either. `noise` is the deviation
    of each stage's time, which it cannot foresee."""

    rows: float = 1.0
    attended: float = 1.0
    tail: float = 1.0
    is_known: bool = True
    learns: bool = True
    noise: float = 0.0

    def forecast(self, costs: PipelineCosts) -> StepForecast:
        plan = StagePlan(0, costs.layer_counts)
        if not self.is_known:
            return StepForecast(plan)
        fitted = fitted_costs(costs.stage, plan.num_layers)
        return StepForecast(plan, StepPredictor(self.biased(fitted)), self.learns)

    def biased(self, costs: StepCosts) -> StepCosts:
        layer = msgspec.structs.replace(
            costs.layer,
            rows=_times(costs.layer.rows, self.rows),
            decode_ms=self.rows * costs.layer.decode_ms,
            decode_attended_ms=self.attended * costs.layer.decode_attended_ms,
            prefill_attended_ms=self.attended * costs.layer.prefill_attended_ms,
        )
        return msgspec.structs.replace(
            costs,
            layer=layer,
            embedding=_times(costs.embedding, self.tail),
            tail=_times(costs.tail, self.tail),
        )


def _times(cost: RowCost, factor: float) -> RowCost:
    times_ms = tuple(factor * one for one in cost.times_ms)
    return RowCost(cost.rows, times_ms, factor * cost.row_ms)


def _cases() -> dict[str, Wrong]:
    cases = {"exact": Wrong()}
    for learns in (True, False):
        for factor in (1.2, 0.8):
            ending = f"{factor - 1:+.0%}" + ("" if learns else ", speeds not learned")
            cases |= {
                f"all costs {ending}": Wrong(
                    rows=factor, attended=factor, tail=factor, learns=learns
                ),
                f"layers {ending}": Wrong(rows=factor, attended=factor, learns=learns),
                f"attended {ending}": Wrong(attended=factor, learns=learns),
            }
    return cases | {
        "noise": Wrong(noise=NOISE),
        "noise, speeds not learned": Wrong(noise=NOISE, learns=False),
        "costs learned": Wrong(is_known=False),
        "costs learned, noise": Wrong(is_known=False, noise=NOISE),
    }


CASES = _cases()


@dataclass(frozen=True, slots=True)
class NoisyCosts:
    """`costs` with times that deviate, each stage's and step's by itself, alike in every run."""

    costs: PipelineCosts
    noise: float

    @property
    def num_stages(self) -> int:
        return self.costs.num_stages

    @property
    def layer_counts(self) -> tuple[int, ...]:
        return self.costs.layer_counts

    def link_after(self, stage: int) -> SimulatedLink:
        return self.costs.link_after(stage)

    @property
    def host(self) -> HostCosts:
        return self.costs.host

    def stage_seconds(self, shape: StepShape, step_id: int) -> tuple[float, ...]:
        random = Random(step_id)
        seconds = self.costs.stage_seconds(shape, step_id)
        return tuple(one * max(0.2, random.gauss(1.0, self.noise)) for one in seconds)

    def under(self, layer_counts: tuple[int, ...]) -> PipelineTiming:
        return NoisyCosts(self.costs.under(layer_counts), self.noise)

    def seconds_before(self, shape: StepShape, stage: int, layer: int) -> float:
        return self.costs.seconds_before(shape, stage, layer)


def served(policy: str, wrong: Wrong, workload: Sequence[SimulatedRequest]) -> Simulation:
    """A run of `CLUSTER` under that policy, whose forecast is wrong in that way."""
    costs, pool_tokens = CLUSTER.costs(), CLUSTER.kv_pool_tokens()
    scheduler = StepScheduler(
        SCHEDULING,
        make_policy(ThrottleArgs(policy=policy)),
        num_pages=pool_tokens // SCHEDULING.page_size,
        num_stages=costs.num_stages,
        context_length=pool_tokens,
    )
    timing = NoisyCosts(costs, wrong.noise) if wrong.noise else costs
    forecast = wrong.forecast(costs) if policy == "throttle-time" else None
    return VirtualPipeline(scheduler, timing, forecast).run(workload)


def steady(num_requests: int) -> list[SimulatedRequest]:
    """Clients that ask again when answered, with ShareGPT's mean lengths."""
    return closed_loop(made_up(num_requests, 223, 155), CLIENTS)


def swing(simulation: Simulation) -> float:
    """The deviation of what steps were allowed to take over its mean, once the clients are all
    there and before they run out."""
    levels = [step.record.budget_ms for step in simulation.steps]
    middle = [one for one in levels[len(levels) // 4 : -len(levels) // 4] if one is not None]
    return float(np.std(middle) / np.mean(middle)) if middle else float("nan")


def compute(options: Options) -> list[Row]:
    num_requests = min(options.num_requests, MOST_REQUESTS)
    traces = (options.trace,) if options.trace is not None else TRACES
    workloads = {trace: near_saturation(trace, num_requests, options.seed) for trace in traces}
    workloads["steady clients"] = steady(num_requests)
    rows = []
    for name, workload in workloads.items():
        for noise in (0.0, NOISE):
            simulation = served("throttle", Wrong(noise=noise), workload)
            setting = {"workload": name, "case": "tokens", "noise": noise}
            rows.append(setting | numbers(simulation))
        for case, wrong in CASES.items():
            simulation = served("throttle-time", wrong, workload)
            setting = {"workload": name, "case": case, "noise": wrong.noise}
            rows.append(setting | numbers(simulation) | {"swing": swing(simulation)})
    return rows


def near_saturation(trace: str, num_requests: int, seed: int = 0) -> list[SimulatedRequest]:
    """Poisson arrivals at `LOAD`."""
    requests = load_trace(trace, num_requests)
    at_once = poisson_arrivals(requests, float("inf"), Random(seed))
    capacity = summarize(served("throttle", Wrong(), at_once)).requests_per_s
    return poisson_arrivals(requests, LOAD * capacity, Random(seed))


def ratio(rows: Sequence[Row], row: Row, column: str) -> float:
    """Against the token throttle on the same workload, whose stages are as noisy."""
    (base,) = select(rows, workload=row["workload"], case="tokens", noise=row["noise"])
    return float(row[column] / base[column])


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(13, 5)
    panels = canvas.subplots(1, 4, sharey=True)
    places = range(len(CASES))
    for number, (workload,) in enumerate(distinct(rows, "workload")):
        chosen = [select(rows, workload=workload, case=case)[0] for case in CASES]
        style = {"color": f"C{number}", "markersize": 4, "label": workload}
        for panel, (column, label) in zip(panels, COLUMNS, strict=False):
            panel.plot([ratio(rows, row, column) for row in chosen], places, "o", **style)
            panel.axvline(1.0, color="black", linewidth=0.8)
            panel.set_xlabel(f"{label}, time / tokens")
        if workload == "steady clients":
            panels[3].plot([100 * row["swing"] for row in chosen], places, "o", **style)
    panels[3].set_xlabel("steady clients: level +- (%)")
    panels[3].set_xlim(left=0)
    panels[0].set_yticks(places, list(CASES), fontsize=8)
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=7)
    for panel in panels:
        panel.grid(alpha=0.3)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (workload,) in distinct(rows, "workload"):
        chosen = [select(rows, workload=workload, case=case)[0] for case in CASES]
        ranges = []
        for column, label in COLUMNS:
            ratios = [ratio(rows, row, column) for row in chosen]
            ranges.append(f"{label} {ratios[0]:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        lines.append(
            f"{workload}, exact forecast (range over all): {', '.join(ranges)} of the token "
            f"throttle's; the level deviates by {chosen[0]['swing']:.1%} of its mean "
            f"({min(row['swing'] for row in chosen):.1%} to "
            f"{max(row['swing'] for row in chosen):.1%})"
        )
    return lines + [_failures(rows, column, label) for column, label in COLUMNS]


def _failures(rows: Sequence[Row], column: str, label: str) -> str:
    """Names the cells in which the token throttle is better by more than `TOLERANCE`."""
    sign = 1.0 if column.endswith("_per_s") else -1.0
    timed = [row for row in rows if row["case"] != "tokens"]
    named = [
        f"{row['workload']} {row['case']} {ratio(rows, row, column) - 1:+.1%}"
        for row in timed
        if sign * (ratio(rows, row, column) - 1.0) < -TOLERANCE
    ]
    found = f": {'; '.join(named)}" if named else ""
    return f"{label} worse by more than {TOLERANCE:.0%} in {len(named)} of {len(timed)}{found}"


FIGURE = Figure(
    name="wrong_forecasts",
    title="The throttle by time with forecasts that are biased, noisy or learned, 14B, PP 4",
    claim="None. Ours to show: with a forecast that is 20 % off, no worse than the token throttle "
    "by more than 2 %, and no swinging of the level with what is learned from its steps.",
    assumptions=f"Poisson arrivals at {LOAD:g} of what the token throttle carries when all come at "
    f"once, and {CLIENTS} clients that ask again when answered. Noise is normal with a deviation "
    f"of {NOISE:.0%}, for each stage and step by itself, the same for both policies. Learned costs "
    f"are fitted first after {FIRST_FIT_STEPS} steps. Speeds are not learned where timings are a "
    "GPU's host's.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
