"""Checks and times the stages of a pipeline on NVIDIA GPUs; needs no model files and no SGLang.

    python -m benchmark.gpu.bench_gpu --parts pipelines stages --models Qwen3-8B --budget-s 540

Five parts, run in the order in which they are named: `checks` (is what the card computes right?),
`stages` (single stages), `pipelines` (real stage processes), `kernels` (attention by kernel),
`host` (what the host does in a step). They end within `--budget-s`: what does not fit, or raises an
error, is named. Everything is saved after each piece of work, beside predictions made before the
first run (`predictions.py`), so that a run which is cut short loses nothing. `README.md` says what
to run first on a card, and `--device cpu` rehearses it.

Exits with 1 after a check that failed or had no kernel, and after an unforeseen error.
"""

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil
import torch

from benchmark.gpu import (
    packed_kernels,
    part_checks,
    part_host,
    part_kernels,
    part_pipelines,
    part_stages,
    prediction_table,
)
from benchmark.gpu.expected_cards import ExpectedCard, expected_card
from benchmark.gpu.limits import measure_limits
from benchmark.gpu.prediction_table import Found
from benchmark.gpu.predictions import SOURCES, predictions_for
from benchmark.gpu.session import Budget, Session
from benchmark.gpu.shapes import MODELS
from benchmark.support.dated_result import DatedResult, markdown_table
from benchmark.support.paths import RESULTS

PARTS: dict[str, Callable[[Session], None]] = {
    "checks": part_checks.run,
    "stages": part_stages.run,
    "pipelines": part_pipelines.run,
    "kernels": part_kernels.run,
    "host": part_host.run,
}
# Past the budget by so much, something hangs: the program says where, and ends.
_GRACE_S = 30.0
_CPU_SIZES = {"num_bytes": 2**22, "size": 128}
# What changes the kernels that are measured.
_ENVIRONMENT = ("FLASHINFER_DISABLE_JIT", "FLASHINFER_USE_CUDA_NORM")


def main(argv: list[str] | None = None, started_s: float | None = None) -> int:
    """Checks, measures, prints and saves.

    Args:
        started_s: when the budget began, monotonic; now, if None.
    """
    options = _parse(argv)
    torch.set_grad_enabled(False)
    # A device of a stage has its index.
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_gpu needs an NVIDIA GPU; --device cpu rehearses the benchmark")
        return 2
    started_s = time.monotonic() if started_s is None else started_s
    session = Session(
        device=device,
        models=options.models,
        depths=options.depths,
        extra_steps=options.extra_steps,
        budget=Budget(started_s + options.budget_s),
    )
    result = DatedResult(__spec__.name, "gpu", options.folder)
    if options.save:
        session.save = partial(_save, result=result, started_s=started_s)
    run_parts(session, options.parts)
    print("\n" + "\n\n".join(texts_of(session)))
    if options.save:
        print(f"\nsaved {result.stem}.md and .json, after {time.monotonic() - started_s:.0f} s")
    return 0 if session.is_sound else 1


def run_parts(session: Session, names: Sequence[str]) -> None:
    """The prebuilt kernels and the card's limits, then the parts by name; without limits nothing
    can be compared."""
    session.part, session.parts_left = packed_kernels.PART, tuple(names)
    session.attempt("looking for kernels", partial(packed_kernels.name_missing, session))
    session.part = "the card's limits"
    session.attempt("measuring the card", partial(_measure_card, session))
    is_card_useless = any(
        piece.is_failure for piece in session.not_measured if piece.part == session.part
    )
    for number, name in enumerate(names):
        session.part, session.parts_left = name, tuple(names[number + 1 :])
        if is_card_useless:
            session.skip("all of it", "the card's limits cannot be measured")
        else:
            PARTS[name](session)
    session.part, session.parts_left = "", ()
    session.save(session)


def texts_of(session: Session) -> list[str]:
    """The tables, each with its heading."""
    found, card = Found(session.rows), _expected_card(session)
    texts = [
        prediction_table.text(predictions_for(card), found, card.name),
        part_checks.text(session),
        part_pipelines.text(session),
        part_stages.text(session),
        part_kernels.text(session),
        part_host.text(session),
    ]
    if session.not_measured:
        lines = [[each.part, each.what, each.why] for each in session.not_measured]
        table = markdown_table(["part", "what", "why"], lines)
        texts.append(f"## Not measured\n\n{table}")
    return [text for text in texts if text]


def _measure_card(session: Session) -> None:
    sizes = {} if session.device.type == "cuda" else _CPU_SIZES
    session.limits = limits = measure_limits(session.device, **sizes)
    session.book_row(
        "card",
        {
            "name": limits.name,
            "tb_per_s": limits.bytes_per_ms / 1e9,
            "tflop_per_s": limits.flops_per_ms / 1e9,
        },
    )
    session.say(limits.facts()["measured"])


def _expected_card(session: Session) -> ExpectedCard:
    return expected_card(session.limits.name if session.limits else "")


def _save(session: Session, result: DatedResult, started_s: float) -> None:
    found, card = Found(session.rows), _expected_card(session)
    state = "finished"
    if session.part:
        state = f"cut short in: {', '.join((session.part, *session.parts_left))}"
    facts = {
        "card": session.limits.facts() if session.limits else {},
        "flags": {name: os.environ.get(name, "-") for name in _ENVIRONMENT},
        "predictions": {
            "card": card.name,
            "files": " ".join(path.name for path in SOURCES),
            "sha256": prediction_table.digest(SOURCES),
        },
        "run": {"state": state, "seconds": f"{time.monotonic() - started_s:.0f}"},
    }
    record = {
        "predictions_held": prediction_table.record(predictions_for(card), found),
        "checks": [asdict(check) for check in session.checks],
        "rows": session.rows,
        "not_measured": [asdict(each) for each in session.not_measured],
    }
    result.write(facts, record, texts_of(session))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        metavar="MODEL",
        help=f"of {', '.join(MODELS)} (default: all Qwen3 on a GPU, tiny on a CPU)",
    )
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 4], metavar="STAGES")
    parser.add_argument(
        "--extra-steps",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        metavar="STEPS",
        help="in flight beyond the number of stages, in the part pipelines (default: 0 1 2)",
    )
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="seconds, Python's start included (540)"
    )
    parser.add_argument("--no-save", dest="save", action="store_false", help="print only")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where results are saved")
    options = parser.parse_args(argv)
    on_cpu = options.device == "cpu"
    options.models = options.models or [name for name in MODELS if (name == "tiny") == on_cpu]
    return options


def _run_as_program() -> int:
    """Counts the budget from the start of the process, and names what hangs past it."""
    started_s = time.monotonic() - (time.time() - psutil.Process().create_time())
    left_s = started_s + _parse(None).budget_s + _GRACE_S - time.monotonic()
    faulthandler.dump_traceback_later(max(1.0, left_s), exit=True)
    faulthandler.register(signal.SIGTERM, chain=True)
    return main(started_s=started_s)


if __name__ == "__main__":
    sys.exit(_run_as_program())
