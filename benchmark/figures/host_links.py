"""Throughput over hosts of one card each: bandwidth and delay of the links, number of hosts.

Prompts and decodes are looked at apart, since the steps of the ones are long and those of the
others short. A run is some rounds of the pipeline and no more: what follows until the last request
ends is another matter, and takes ten times as many steps.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import UNBOUNDED, Figure, Options, Row, run, select
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.host_network import HostNetwork, NetworkLink, PaperHost
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds

MODEL, DEVICE = "Qwen2.5-32B", "a100-40g-pcie"
GBIT_PER_S = (1.0, 10.0, 100.0)
DELAYS_MS = (0.1, 1.0, 10.0)
STAGES = (8, 16, 64)
EXTRA_STEPS = (0, 8)
PHASES = ("prompts", "decodes")
# A run's rounds of the pipeline, and the first of those that count.
ROUNDS, FIRST_ROUND = 20, 8
# As many requests a stage last for all rounds.
PROMPTS_PER_STAGE = 40
DECODES_PER_STEP, PROMPT_TOKENS = 64, 32
_COLORS = {1.0: "#D55E00", 10.0: "#999999", 100.0: "#0072B2"}


def compute(options: Options) -> list[Row]:
    rows = []
    for phase in PHASES:
        for stages in STAGES:
            workload = _workload(phase, options, stages)
            ideal = _tokens_per_s(None, stages, 0, workload)
            for gbit_per_s in GBIT_PER_S:
                for delay_ms in DELAYS_MS:
                    for extra in EXTRA_STEPS:
                        link = NetworkLink(gbit_per_s=gbit_per_s, delay_ms=delay_ms)
                        rate = _tokens_per_s(link, stages, extra, workload)
                        row = {"phase": phase, "stages": stages, "extra_steps": extra}
                        row |= {"gbit_per_s": gbit_per_s, "delay_ms": delay_ms}
                        row |= {"tokens_per_s": rate, "ideal_tokens_per_s": ideal}
                        rows.append(row | {"share_of_ideal": rate / ideal})
    return rows


def _workload(phase: str, options: Options, stages: int) -> list[SimulatedRequest]:
    """All there from the beginning, as many for each stage, so that all depths have equal steps."""
    if phase == "prompts":
        # 1000, the default of `num_requests`, are all.
        count = options.num_requests * PROMPTS_PER_STAGE * stages // 1000
        requests = load_trace(options.trace or "azure_conv", count)
        return [replace(request, arrival_s=0.0) for request in requests]
    ids = TokenIds()
    return [
        SimulatedRequest(
            arrival_s=0.0, prompt=(ids.fresh(PROMPT_TOKENS),), output=ids.fresh(4 * ROUNDS)
        )
        for _ in range(DECODES_PER_STEP * stages)
    ]


def _tokens_per_s(
    link: NetworkLink | None, stages: int, extra: int, workload: Sequence[SimulatedRequest]
) -> float:
    hosts = HostNetwork(
        hosts=tuple(PaperHost(name=f"host{rank}") for rank in range(stages)), link=link
    )
    cluster = Cluster(
        model=MODEL,
        device=DEVICE,
        link="ideal",
        num_stages=stages,
        hosts=None if link is None else hosts,
    )
    scheduling = replace(UNBOUNDED, extra_steps_in_flight=extra)
    simulation = run(
        cluster, ThrottleArgs(policy="throttle"), workload, scheduling, ROUNDS * stages
    )
    return late_tokens_per_s(simulation)


def late_tokens_per_s(simulation: Simulation) -> float:
    """Tokens computed, prompt and output, a second in the last rounds of a run."""
    steps = simulation.steps
    before, *counted = steps[len(steps) * FIRST_ROUND // ROUNDS :]
    tokens = sum(step.shape.num_tokens for step in counted)
    return tokens / (counted[-1].ends_s[-1] - before.ends_s[-1])


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(11, 7)
    panels = canvas.subplots(len(PHASES), len(STAGES), sharey=True)
    for phase, line_of_panels in zip(PHASES, panels, strict=True):
        for stages, panel in zip(STAGES, line_of_panels, strict=True):
            for gbit_per_s in GBIT_PER_S:
                for extra in EXTRA_STEPS:
                    setting = {"phase": phase, "stages": stages, "gbit_per_s": gbit_per_s}
                    points = select(rows, **setting, extra_steps=extra)
                    panel.plot(
                        [row["delay_ms"] for row in points],
                        [row["share_of_ideal"] for row in points],
                        color=_COLORS[gbit_per_s],
                        linestyle="--" if extra else "-",
                        marker="o",
                        label=f"{gbit_per_s:g} Gbit/s" + (f", {extra} more steps" if extra else ""),
                    )
            panel.set_title(f"{phase}, {stages} hosts", fontsize=10)
            panel.set_xscale("log")
            panel.set_ylim(bottom=0)
        line_of_panels[0].set_ylabel("tokens/s, of what ideal links give")
    for panel in panels[-1]:
        panel.set_xlabel("delay between hosts, ms one way")
    handles, labels = panels[0][0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=len(GBIT_PER_S), fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for phase in PHASES:
        for stages in STAGES:
            for extra in EXTRA_STEPS:
                points = select(rows, phase=phase, stages=stages, extra_steps=extra)
                shares = ", ".join(
                    f"{row['gbit_per_s']:g} Gbit/s and {row['delay_ms']:g} ms "
                    f"{row['share_of_ideal']:.0%}"
                    for row in points
                )
                more = f", {extra} steps more in flight" if extra else ""
                lines.append(
                    f"{phase}, {stages} hosts{more}: {shares} of the "
                    f"{points[0]['ideal_tokens_per_s']:.0f} tokens/s over ideal links"
                )
    return lines


FIGURE = Figure(
    name="host_links",
    title=f"{MODEL} on hosts with one card each, against their links",
    claim="gLLM (G8) has nodes joined by 73 Gbit/s; it says nothing of slower links or of delay.",
    assumptions="A100-40G; every request is there from the beginning; each hop between hosts has "
    "the delay, the results' way back too; layers are split evenly (64 layers: one a host at 64 "
    "hosts, and the head beside the last). Prompts: Azure's conversations, steps of 2048 prompt "
    f"tokens and the decodes of those that are through. Decodes: {DECODES_PER_STEP} a step, alone; "
    "they are shared out over all steps in flight, so with more of these each step has fewer. "
    f"Of {ROUNDS} rounds of the pipeline those after the first {FIRST_ROUND} count.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
