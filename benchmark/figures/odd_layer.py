"""The best stage for the odd layer: the last one for long prompts, another one for decodes."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, closed_loop, distinct, run, select
from benchmark.figures.output_share import PUBLISHED_TAIL, tail_layers
from benchmark.figures.plans import made_up, plan_text
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.summary import summarize

PLANS = ((16, 15, 15, 15), (15, 16, 15, 15), (15, 15, 16, 15), (15, 15, 15, 16))
# Input, output, clients.
LOADS = {
    "one long prompt at a time": (16384, 1, 1),
    "prompts only": (2048, 1, 32),
    "decodes": (128, 256, 128),
}
SAMPLERS = ("none", "tables", "published")


def compute(options: Options) -> list[Row]:
    rows = []
    plain = Cluster(model="Qwen2.5-32B", device="a100-80g", layer_counts=PLANS[0])
    for load, (inputs, outputs, clients) in LOADS.items():
        count = max(8, options.num_requests // (40 if inputs > 2048 else 3))
        workload = closed_loop(made_up(count, inputs, outputs), clients)
        for sampler in SAMPLERS:
            factor = _factor(sampler, plain, options)
            for counts in PLANS:
                cluster = replace(plain, layer_counts=counts, tail_factor=factor)
                policy = ThrottleArgs(policy="sarathi", max_prefill_tokens=2048)
                simulation = run(cluster, policy, workload)
                summary = summarize(simulation)
                rows.append(
                    {
                        "load": load,
                        "sampler": sampler,
                        "plan": plan_text(counts),
                        "tail_layers": tail_layers(simulation, cluster),
                        "e2e_ms": summary.e2e_ms.mean,
                        "total_tokens_per_s": summary.total_tokens_per_s,
                        "bubble_share": summary.bubble_share,
                    }
                )
    return rows


def _factor(sampler: str, cluster: Cluster, options: Options) -> float:
    """By what the tables' tail is multiplied."""
    if sampler != "published":
        return 1.0 if sampler == "tables" else 0.0
    inputs, outputs, clients = LOADS["decodes"]
    workload = closed_loop(made_up(options.num_requests // 3, inputs, outputs), clients)
    return PUBLISHED_TAIL / tail_layers(
        run(cluster, ThrottleArgs(policy="throttle"), workload), cluster
    )


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(12, 4)
    for panel, (load,) in zip(canvas.subplots(1, len(LOADS)), distinct(rows, "load"), strict=True):
        for sampler in SAMPLERS:
            points = select(rows, load=load, sampler=sampler)
            panel.plot(
                [row["plan"] for row in points],
                [100 * (row["e2e_ms"] / points[0]["e2e_ms"] - 1) for row in points],
                marker="o",
                label=f"sampler: {sampler}",
            )
        panel.set_title(load, fontsize=10)
        panel.set_ylabel("mean E2E against 16,15,15,15 (%)")
        panel.tick_params(axis="x", labelsize=7)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for load, sampler in distinct(rows, "load", "sampler"):
        points = select(rows, load=load, sampler=sampler)
        changes = ", ".join(
            f"{row['plan']} {row['e2e_ms'] / points[0]['e2e_ms'] - 1:+.1%}" for row in points[1:]
        )
        lines.append(
            f"{load}, sampler {sampler} (T_sample/T_layer {points[0]['tail_layers']:.2f}): mean "
            f"E2E against 16,15,15,15: {changes}"
        )
    return lines


FIGURE = Figure(
    name="odd_layer",
    title="The stage of the odd layer: 61 layers of Qwen2.5-32B on 4 stages",
    claim="SGLang (blog of 2026-01): 15,15,15,16 beats 16,15,15,15 for long prompts; DynaPipe "
    "(D5): layers leave the last stage where sampling takes 3.09 layers; vLLM's remainder avoids "
    "the last stage.",
    assumptions="61 of Qwen2.5-32B's layers (DeepSeek's number, of which there are no tables) on "
    "A100-80G, chunks of 2048. Sampler none: no norm, head or sampling; published: scaled to 3.09 "
    "layers on average in the load of decodes.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
