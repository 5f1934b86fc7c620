"""Part `checks`: whether what the card computes is right, by `checks.py`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmark.gpu.attention_times import prefill_kernels
from benchmark.gpu.checks import Check, check_attention, check_sampler, check_stage
from benchmark.gpu.expert_checks import check_experts
from benchmark.gpu.quantized_checks import (
    SCHEMES,
    capability_of,
    check_product,
    why_not_rehearsed,
)
from benchmark.gpu.session import Session
from benchmark.gpu.shapes import (
    PAGE_SIZE,
    REHEARSED_SPARSE_MODEL,
    SPARSE_MODEL,
    heads_of,
    spec_of,
)
from benchmark.support.dated_result import markdown_table
from sgl_pipeline.pp_runner.base.kv_format import FP8
from sgl_pipeline.pp_runner.layer_kernels.gpu_quantized import why_without_kernel
from sgl_pipeline.pp_runner.weights.quantization_config import choose_quantization


def run(session: Session) -> None:
    """Attention for every model's heads, products in 8 bits, experts, the sampler, then few layers
    of every model in 16 bits and in FP8. Whichever models are named, one with experts is among
    them."""
    sparse = REHEARSED_SPARSE_MODEL if session.is_rehearsal else SPARSE_MODEL
    for model in session.models:
        _check_attention(session, model)
        _check_products(session, model)
    _check_attention(session, sparse)
    session.attempt(f"checking the experts of {sparse}", partial(_check_experts, session, sparse))
    session.attempt("checking the sampler", partial(_check_sampler, session))
    for model in (*session.models, sparse):
        work = partial(_check_stage, session, model)
        session.attempt(f"checking a stage of {model}", work, kind="checked stage", guess_s=15.0)
    for model in (*session.models, sparse):
        what = f"checking a stage of {model} in FP8"
        if session.is_rehearsal:
            session.skip(what, "needs a GPU")
        elif model == sparse:
            session.skip(what, "quantized experts are computed with on CPUs only")
        elif reason := _why_without_kernel(session, "fp8"):
            session.skip(what, reason)
        else:
            work = partial(_check_fp8_stage, session, model)
            session.attempt(what, work, kind="checked stage", guess_s=15.0)


def _check_attention(session: Session, model: str) -> None:
    spec = spec_of(model)
    shape = spec.attention_shapes(PAGE_SIZE, torch.bfloat16, session.device)[0]

    def work(name: str, kernels: str, has_nan: bool) -> None:
        session.book_checks(
            check_attention(
                shape, name, "auto", prefill_kernels=kernels, has_nan_in_unused_slots=has_nan
            )
        )

    for kernels in prefill_kernels(session.device):
        name = f"{heads_of(spec)}, prefill {kernels}"
        session.attempt(f"checking attention, {name}", partial(work, name, kernels, False))
        what = f"checking attention with NaN in unused slots, {name}"
        session.attempt(what, partial(work, name, kernels, True))
    coded = replace(shape, coded_dtype=FP8)
    name = f"{heads_of(spec)}, e4m3 pages"
    session.attempt(
        f"checking attention, {name}",
        lambda: session.book_checks(check_attention(coded, name, "auto")),
    )


def _check_products(session: Session, model: str) -> None:
    """With the widest matrix of a layer and with the one that has the most inputs."""
    spec = spec_of(model)
    shapes = (
        (2 * spec.intermediate_size, spec.hidden_size),
        (spec.hidden_size, spec.intermediate_size),
    )
    for name in SCHEMES:
        what = f"checking products in {name} of {model}"
        reason = _why_without_kernel(session, name)
        if session.is_rehearsal:
            reason = reason or why_not_rehearsed(name)
        if reason:
            session.skip(what, reason)
            continue
        for outputs, inputs in shapes:
            work = partial(check_product, name, outputs, inputs, session.device)
            session.attempt(f"{what}, {outputs} x {inputs}", partial(_book, session, work))


def _book(session: Session, work: Callable[[], Check]) -> None:
    session.book_checks(work())


def _why_without_kernel(session: Session, name: str) -> str:
    return why_without_kernel(SCHEMES[name], torch.bfloat16, capability_of(session.device))


def _check_fp8_stage(session: Session, model: str) -> None:
    plain = spec_of(model)
    spec = replace(plain, quantization=choose_quantization("fp8", None, plain.names.head))
    session.book_checks(*check_stage(spec, f"{model} in FP8", session.device, "auto"))


def _check_experts(session: Session, model: str) -> None:
    session.book_checks(check_experts(spec_of(model), model, session.device))


def _check_sampler(session: Session) -> None:
    session.book_checks(check_sampler(session.device))


def _check_stage(session: Session, model: str) -> None:
    session.book_checks(*check_stage(spec_of(model), model, session.device, "auto"))


def text(session: Session) -> str:
    """The table of checks; those of other parts are in it as well."""
    if not session.checks:
        return ""
    failed = [check.name for check in session.checks if not check.passed]
    table = markdown_table(
        ["check", "error", "bound", ""], [check.cells() for check in session.checks]
    )
    return f"## Checks\n\n{table}" + ("\n\nFAILED: " + "; ".join(failed) if failed else "")
