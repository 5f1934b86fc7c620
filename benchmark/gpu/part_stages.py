"""Part `stages`: the steps of single stages, beside the sum of their kernels and the card's limits.

`step ms` is the time of a step among many in a row, `kernels` the share of it that the sum of its
kernels takes (the rest the card idles), `limit` the share of the larger of two times: moving each
weight, key and value once at the bandwidth of a copy measured on this card, and the arithmetic at
the rate of a large product.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from benchmark.gpu.device_times import release_memory, total_ms
from benchmark.gpu.lone_stage import LoneStage, StagePlace
from benchmark.gpu.session import Row, Session
from benchmark.gpu.shapes import FEW_STEPS, PAGE_SIZE, SMALL_STEPS, STEPS, Step, spec_of, step_work
from benchmark.support.dated_result import markdown_table
from sgl_pipeline.layer_partition import even_layer_counts
from sgl_pipeline.stage_plan import StagePlan

# Of the card's memory, for weights and pages of a stage under test.
_MEMORY_SHARE = 0.8
_CPU_PAGES = 1024
_TOP_KERNELS = 8


def run(session: Session) -> None:
    """The first model's depths, then the next one's; the whole model once more without graphs."""
    wanted = SMALL_STEPS if session.is_rehearsal else STEPS
    for model in session.models:
        spec = spec_of(model)
        for depth in session.depths:
            plan = StagePlan(0, even_layer_counts(spec.num_layers, depth))
            for stage in sorted({0, depth // 2, depth - 1} if depth > 1 else {0}):
                place = StagePlace(spec, plan, stage)
                work = partial(_time_stage, session, model, place, wanted, "auto")
                what = f"timing stage {stage} of {depth} of {model}"
                session.attempt(what, work, kind=f"a stage of {depth}", guess_s=15.0)
        place = StagePlace(spec, StagePlan(0, (spec.num_layers,)), 0)
        work = partial(_time_stage, session, model, place, FEW_STEPS, "off")
        what = f"timing {model} in one stage without graphs"
        if not session.is_rehearsal:
            session.attempt(what, work, kind="without graphs", guess_s=10.0)
        else:
            session.skip(what, "graphs need a GPU")


def _time_stage(
    session: Session, model: str, place: StagePlace, wanted: Sequence[Step], graphs: str
) -> None:
    release_memory()
    num_pages = _pages_that_fit(place, session.device)
    steps = [step for step in wanted if step.num_pages(PAGE_SIZE) <= num_pages]
    where = f"{model}, stage {place.stage} of {place.plan.num_stages}"
    for step in wanted:
        if step not in steps:
            session.skip(f"{where}: {step.name}", "its pages do not fit the memory")
    if not steps:
        return
    stage = LoneStage(
        place,
        session.device,
        num_pages=max(step.num_pages(PAGE_SIZE) for step in steps),
        max_rows=max(step.num_rows for step in steps),
        graphs=graphs,
    )
    for step in steps:
        if session.budget.left_s <= 0:
            session.skip(f"{where}: {step.name}", "no time")
            continue
        row = _time_step(session, stage, step)
        row = {"model": model, "stages": place.plan.num_stages, "graphs": graphs, **row}
        session.book_row("stages", row)
        session.say(f"{step.name}: {row['step_ms']:.3f} ms")


def _time_step(session: Session, stage: LoneStage, step: Step) -> Row:
    assert session.limits is not None
    place = stage.place
    work = step_work(place.spec, place.num_layers, place.is_last, step.chunks)
    step_ms, kernels = stage.step_ms(step), stage.kernels(step)
    return {
        "stage": place.stage,
        "layers": place.num_layers,
        "kind": step.kind,
        "step": step.name,
        "rows": step.num_rows,
        "step_ms": step_ms,
        "kernels_ms": total_ms(kernels),
        "num_kernels": sum(kernel.count for kernel in kernels) or None,
        "bytes_ms": session.limits.bytes_ms(work),
        "flops_ms": session.limits.flops_ms(work),
        "limit_ms": session.limits.limit_ms(work),
        "num_bytes": work.num_bytes,
        "num_flops": work.num_flops,
        "top_kernels": [asdict(kernel) for kernel in kernels[:_TOP_KERNELS]],
    }


def _pages_that_fit(place: StagePlace, device: torch.device) -> int:
    """Pages beside the stage's weights, of which lm_head and embedding count in full."""
    if device.type != "cuda":
        return _CPU_PAGES
    spec = place.spec
    free_bytes, _ = torch.cuda.mem_get_info(device)
    weights = step_work(spec, place.num_layers, True, ()).num_bytes
    weights += 2 * spec.vocab_size * spec.hidden_size
    token_bytes = 4 * spec.num_kv_heads * spec.head_dim * place.num_layers
    return int(_MEMORY_SHARE * free_bytes - weights) // (token_bytes * PAGE_SIZE)


def text(session: Session) -> str:
    """A table of steps for each model, and which kernels its longest steps are made of."""
    texts = []
    for model in session.models:
        if rows := [row for row in session.table("stages") if row["model"] == model]:
            texts.append(f"## {model}: stages by themselves\n\n{step_table(rows)}")
        whole = [row for row in rows if row["stages"] == 1 and row["graphs"] == "auto"]
        if rows := [row for row in whole if row["step"] in _PROFILED and row["top_kernels"]]:
            texts.append(f"### {model}: the longest kernels of a step\n\n{kernel_table(rows)}")
    return "\n\n".join(texts)


_PROFILED = ("64 decodes at 1024", "prefill 2048")


def step_table(rows: Sequence[Row]) -> str:
    """Step times of one model's stages, as shares of kernels and limits."""
    heads = "stage|layers|graphs|step|step ms|kernels|number|limit|of bytes|of FLOPs".split("|")
    return markdown_table(
        heads,
        [
            [
                f"{row['stage']} of {row['stages']}",
                str(row["layers"]),
                row["graphs"],
                row["step"],
                f"{row['step_ms']:.3f}",
                _share(row["kernels_ms"], row["step_ms"]),
                "-" if row["num_kernels"] is None else f"{row['num_kernels']:.0f}",
                _share(row["limit_ms"], row["step_ms"]),
                _share(row["bytes_ms"], row["step_ms"]),
                _share(row["flops_ms"], row["step_ms"]),
            ]
            for row in rows
        ],
    )


def kernel_table(rows: Sequence[Row]) -> str:
    """The longest kernels of each step, with their share of all its kernels' time."""
    return markdown_table(
        ["step", "kernel", "times", "ms", "of kernels"],
        [
            [
                row["step"],
                f"`{kernel['name'][:70]}`",
                f"{kernel['count']:.0f}",
                f"{kernel['ms']:.3f}",
                _share(kernel["ms"], row["kernels_ms"]),
            ]
            for row in rows
            for kernel in row["top_kernels"]
        ],
    )


def _share(part: float | None, whole: float) -> str:
    return "-" if part is None else f"{part / whole:.0%}"
