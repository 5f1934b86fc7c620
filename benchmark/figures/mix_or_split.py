"""Compares steps that prefill and decodes share with steps in turns, by the tables and the
predictor.

No serving is simulated: each row is one mixed step beside the steps that do the same work apart.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, distinct, select
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.simulator.forecasts import fitted_costs
from sgl_pipeline.simulator.kernel_costs import DEVICES, OperatorCosts, part_seconds
from sgl_pipeline.simulator.models import MODELS
from sgl_pipeline.simulator.pipeline_costs import PartSeconds
from sgl_pipeline.simulator.step_shape import StepShape

MACHINES = (
    ("Qwen2.5-14B", "a100-80g"),
    ("Qwen2.5-32B", "h200"),
    ("Qwen2.5-14B", "l40s"),
    ("Qwen3-32B", "rtxpro6000"),
    ("Llama-3.1-8B", "rtxpro6000"),
)
DECODES = (16, 64, 128, 256)
CHUNKS = (64, 256, 1024, 2048)
CONTEXTS = (512, 2048, 8192)
STARTS = (0, 4096)
# With turns, so many chunks may go into one step of prefill, whose weights are then read once.
MERGED = (1, 4)
# What the tables have: decodes in a step, what each attends to, tokens of a chunk.
MEASURED = {"rtxpro6000": (256, 16384, 2048)}
MEASURED_APART = (128, 4096, 131072)
GAIN = 0.02
SPLIT = "two attention kernels"
# EB+: mixing hurts where decodes are more of a step's tokens than this.
PUBLISHED_SHARES = {"bandwidth-poor": 0.2, "h200": 0.8}


def compute(options: Options) -> list[Row]:
    rows = []
    for model, device in MACHINES:
        parts = part_seconds(DEVICES[device], MODELS[model])
        predictor = StepPredictor(fitted_costs(parts, MODELS[model].num_layers))
        setting = {"model": model, "device": device}
        for source, layer_ms in _sources(parts, predictor).items():
            rows += [setting | {"source": source} | row for row in _cells(device, layer_ms)]
    return rows


def _sources(
    parts: PartSeconds, predictor: StepPredictor
) -> dict[str, Callable[[StepShape], float]]:
    """Ways to know what a layer takes, in milliseconds."""

    def two_kernels_ms(shape: StepShape) -> float:
        """Attention of prefill and of decodes in a kernel each, as measured alone."""
        assert isinstance(parts, OperatorCosts)
        rows_us = parts.layer_tokens_us.at(shape.num_tokens)
        alone = (replace(shape, prefills=()), replace(shape, decode_contexts=()))
        shapes = [one for one in alone if one.num_tokens]
        attention_us = sum(
            1e6 * parts.layer_s(one) - parts.layer_tokens_us.at(one.num_tokens) for one in shapes
        )
        return 1e-3 * (rows_us + attention_us)

    sources: dict[str, Callable[[StepShape], float]] = {
        "tables": lambda shape: 1e3 * parts.layer_s(shape),
        "predictor": lambda shape: predictor.parts_ms(shape.work).layer_ms,
    }
    if isinstance(parts, OperatorCosts):
        sources[SPLIT] = two_kernels_ms
    return sources


def _cells(device: str, layer_ms: Callable[[StepShape], float]) -> Iterator[Row]:
    """The mixed step's time over that of the steps apart, less 1: what taking turns would gain."""
    most_decodes, longest_context, longest_chunk = MEASURED.get(device, MEASURED_APART)
    for decodes, chunk, context, start in product(DECODES, CHUNKS, CONTEXTS, STARTS):
        if decodes > most_decodes or context > longest_context:
            continue
        contexts = (context,) * decodes
        mixed_ms = layer_ms(StepShape(((chunk, start),), contexts, decodes))
        decodes_ms = layer_ms(StepShape((), contexts, decodes))
        for merged in MERGED:
            if merged * chunk > longest_chunk:
                continue
            prefill_ms = layer_ms(StepShape(((merged * chunk, start),), (), 0)) / merged
            yield {
                "decodes": decodes,
                "chunk": chunk,
                "context": context,
                "start": start,
                "merged": merged,
                "decode_share": decodes / (decodes + chunk),
                "mixed_ms": mixed_ms,
                "apart_ms": decodes_ms + prefill_ms,
                "split_gain": mixed_ms / (decodes_ms + prefill_ms) - 1.0,
            }


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    machines = distinct(rows, "model", "device")
    canvas.set_size_inches(3.2 * len(machines), 7)
    panels = canvas.subplots(len(MERGED), len(machines), sharey=True, squeeze=False)
    for line, merged in zip(panels, MERGED, strict=True):
        for panel, (model, device) in zip(line, machines, strict=True):
            for marker, source in (("o", "tables"), ("x", "predictor"), ("+", SPLIT)):
                chosen = select(rows, model=model, device=device, source=source, merged=merged)
                if not chosen:
                    continue
                panel.plot(
                    [row["decode_share"] for row in chosen],
                    [100 * row["split_gain"] for row in chosen],
                    marker,
                    markersize=4,
                    markerfacecolor="none",
                    label=source,
                )
            panel.axhline(0.0, color="black", linewidth=0.8)
            panel.set_yscale("symlog", linthresh=50)
            for share in PUBLISHED_SHARES.values():
                panel.axvline(share, color="#999999", linewidth=0.8, linestyle=":")
            panel.set_title(f"{model}, {device}, {merged} chunk(s) a turn", fontsize=8)
            panel.grid(alpha=0.3)
        line[0].set_ylabel("gain by taking turns (%)")
    for panel in panels[-1]:
        panel.set_xlabel("decodes / tokens of the mixed step")
    panels[1][-1].legend(fontsize=7)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for model, device, source, merged in distinct(rows, "model", "device", "source", "merged"):
        chosen = select(rows, model=model, device=device, source=source, merged=merged)
        gains = sorted(row["split_gain"] for row in chosen)
        paying = [row for row in chosen if row["split_gain"] > GAIN]
        best = max(chosen, key=lambda row: row["split_gain"])
        lines.append(
            f"{model}, {device}, {source}, {merged} chunk(s) a turn: taking turns gains "
            f"{gains[len(gains) // 2]:+.1%} ({gains[0]:+.1%} to {gains[-1]:+.1%}); more than "
            f"{GAIN:.0%} in {len(paying)} of {len(chosen)}, {_shares(chosen)}; most with "
            f"{best['decodes']} decodes of {best['context']} beside {best['chunk']} tokens after "
            f"{best['start']}"
        )
    return lines


def _shares(rows: Sequence[Row]) -> str:
    """In how many cells turns pay, by the share of decodes (EB+'s thresholds) and by context."""
    parts = []
    for label, low, high in (("up to 20 %", 0.0, 0.2), ("20 to 80 %", 0.2, 0.8)):
        found = [row for row in rows if low < row["decode_share"] <= high]
        paying = sum(row["split_gain"] > GAIN for row in found)
        parts.append(f"{label} decodes {paying} of {len(found)}")
    for (context,) in distinct(rows, "context"):
        found = select(rows, context=context)
        paying = sum(row["split_gain"] > GAIN for row in found)
        parts.append(f"decodes of {context} {paying} of {len(found)}")
    return ", ".join(parts)


FIGURE = Figure(
    name="mix_or_split",
    title="One mixed step against the same work in turns, by kernel times alone",
    claim="EB+: mixing prefill and decodes hurts where decodes are more than about 20 % of a "
    "step's tokens on devices of little bandwidth, 80 % on an H200.",
    assumptions="Times of a layer; the head, which both ways run once for the decodes, would bring "
    "them closer together. Only RTX PRO 6000 has measured attention of mixed steps, of one kernel "
    "for all rows; for the others mixed attention is the sum of its parts, so that mixing cannot "
    f"hurt by it. `{SPLIT}` assumes the same for this card: one for the prompts of a step and one "
    "for its decodes, as our FlashInfer backend calls them. Points are within what the tables "
    "have. Bubbles of turns, whose steps differ, are not counted, nor is what decodes wait for a "
    "turn of prefill.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
