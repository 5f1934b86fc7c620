"""Part `kernels`: attention with each kernel that the card has for it, for every model's heads.

FA2 against FA3 for chunks of prompts, tensor cores against CUDA cores for decodes, and vLLM's FA3
against all of them where its pack is. `of limit` is the larger of two times, moving each key,
value, query and result once and the arithmetic, over the measured one. All kernels must agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmark.gpu.attention_times import (
    CUDA_CORES,
    VLLM,
    MakeAttention,
    decode_choices,
    prefill_choices,
    rival_choices,
    time_attention,
)
from benchmark.gpu.checks import ATTENTION_BOUND, Check, row_error
from benchmark.gpu.device_times import release_memory
from benchmark.gpu.session import Row, Session
from benchmark.gpu.shapes import (
    PAGE_SIZE,
    Step,
    attention_work,
    decode_step,
    heads_of,
    prefill_step,
    spec_of,
)
from benchmark.gpu.vllm_attention import why_not_there
from benchmark.support.dated_result import markdown_table
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec

# Kind of step: the steps that stand for it.
_STEPS = {
    "short fresh prompt": (prefill_step(256),),
    "long fresh prompt": (prefill_step(2048), prefill_step(8192)),
    "short chunk on a long context": (prefill_step(512, 4096), prefill_step(128, 16_384)),
    "decodes": (
        *(decode_step(count, 1024) for count in (1, 8, 64, 256)),
        *(decode_step(count, 8192) for count in (1, 16)),
    ),
}
_SMALL_STEPS = {
    "short fresh prompt": (prefill_step(16),),
    "long fresh prompt": (prefill_step(128),),
    "short chunk on a long context": (prefill_step(16, 256),),
    "decodes": (decode_step(4, 64),),
}
_NEEDS_GPU = ("prefill kernels fa2 and fa3", "decodes with and without tensor cores", VLLM)


def run(session: Session) -> None:
    """The heads of each model in turn."""
    if session.is_rehearsal:
        for what in _NEEDS_GPU:
            session.skip(what, "needs a GPU")
    for model in session.models:
        release_memory()
        spec = spec_of(model)
        shape = spec.attention_shapes(PAGE_SIZE, torch.bfloat16, session.device)[0]
        heads = heads_of(spec)
        _name_what_is_not_there(session, shape, heads)
        for kind, steps in (_SMALL_STEPS if session.is_rehearsal else _STEPS).items():
            is_decode = kind == "decodes"
            ours = decode_choices(shape) if is_decode else prefill_choices(session.device)
            choices = {**ours, **rival_choices(session.device)}
            for step in steps:
                race = _Race(session, spec, shape, {"model": model, "heads": heads, "kind": kind})
                for name, make in choices.items():
                    what = f"timing attention, {heads}, {step.name}, {name}"
                    work = partial(race.time, step, name, make)
                    session.attempt(what, work, kind="attention", guess_s=5.0)


def _name_what_is_not_there(session: Session, shape: AttentionShape, heads: str) -> None:
    if session.is_rehearsal:
        return
    if "fa3" not in prefill_choices(session.device):
        session.skip(f"prefill kernels fa3, {heads}", "needs compute capability 9 (Hopper)")
    if CUDA_CORES not in decode_choices(shape):
        session.skip(f"decodes without tensor cores, {heads}", "FlashInfer has no such kernel")
    if reason := why_not_there(session.device):
        session.skip(f"{VLLM}, {heads}", reason)


@dataclass(slots=True)
class _Race:
    """The kernels of one step. `labels` begin each row; `first` is the name and the output of the
    first kernel, with which the others must agree."""

    session: Session
    spec: DecoderSpec
    shape: AttentionShape
    labels: Row
    first: tuple[str, torch.Tensor] | None = None

    def time(self, step: Step, name: str, make: MakeAttention) -> None:
        """Books what `name` takes for `step`, and whether it computes what the first one did."""
        assert self.session.limits is not None
        found = time_attention(self.shape, step, make)
        work = attention_work(self.spec, step.chunks)
        times = {"plan_ms": found.plan_ms, "layer_ms": found.layer_ms}
        limits = {"limit_ms": self.session.limits.limit_ms(work)}
        row = {**self.labels, "step": step.name, "kernels": name, **times, **limits}
        self.session.book_row("attention", row)
        self.session.say(f"{_milliseconds(found.layer_ms)} ms a layer")
        if self.first is None:
            self.first = (name, found.output)
            return
        other, expected = self.first
        what = f"attention of {name} against {other}, {self.labels['heads']}, {step.name}"
        error = row_error(found.output, expected)
        self.session.book_checks(Check(what, error, ATTENTION_BOUND))


def text(session: Session) -> str:
    """A line for each step and kernel; the fastest kernel of a step in bold."""
    rows = session.table("attention")
    if not rows:
        return ""
    heads = ["heads", "kind", "step", "kernels", "ms a layer", "of limit", "plan ms"]
    return "## Attention by kernel\n\n" + markdown_table(
        heads,
        [
            [
                row["heads"],
                row["kind"],
                row["step"],
                _fastest_in_bold(row, rows),
                _milliseconds(row["layer_ms"]),
                "-" if row["layer_ms"] is None else f"{row['limit_ms'] / row['layer_ms']:.0%}",
                f"{row['plan_ms']:.3f}",
            ]
            for row in rows
        ],
    )


def _fastest_in_bold(row: Row, rows: Sequence[Row]) -> str:
    rivals = [one for one in rows if (one["heads"], one["step"]) == (row["heads"], row["step"])]
    times = [one["layer_ms"] for one in rivals if one["layer_ms"] is not None]
    is_fastest = len(times) > 1 and row["layer_ms"] == min(times)
    return f"**{row['kernels']}**" if is_fastest else str(row["kernels"])


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
