"""Part `checks`: whether what the card computes is right, by `checks.py`."""

from functools import partial

import torch

from benchmark.gpu.attention_times import prefill_kernels
from benchmark.gpu.checks import check_attention, check_sampler, check_stage
from benchmark.gpu.session import Session
from benchmark.gpu.shapes import PAGE_SIZE, heads_of, spec_of
from benchmark.support.dated_result import markdown_table


def run(session: Session) -> None:
    """Attention for every model's heads, the sampler, then few layers of every model."""
    for model in session.models:
        _check_attention(session, model)
    session.attempt("checking the sampler", partial(_check_sampler, session))
    for model in session.models:
        work = partial(_check_stage, session, model)
        session.attempt(f"checking a stage of {model}", work, kind="checked stage", guess_s=15.0)


def _check_attention(session: Session, model: str) -> None:
    spec = spec_of(model)
    shape = spec.attention_shape(PAGE_SIZE, torch.bfloat16, session.device)

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
