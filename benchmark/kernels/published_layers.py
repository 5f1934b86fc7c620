"""Layers of published shapes with random weights, beside transformers' and the core's limits.

    python -m benchmark.kernels.published_layers
    python -m benchmark.kernels.published_layers --only gpt-oss --without-transformers --rounds 5
    python -m benchmark.kernels.published_layers --without-transformers --llama-rounds 3

A layer of Qwen3.5-4B with a state and one with attention, and two of gpt-oss-20b, one with a
window, with experts in MXFP4 as published; transformers' have them in bf16, which is what it
computes with on a CPU, and take 3.3 GB beside our 1 GB. One thread, CPU time, in huge pages as a
stage's process has them. The limit of a step is the longer of reading what it needs once and its
arithmetic (`OurLayers.limit_ms`), at the rates of the faster of our products and oneDNN's.

With `--llama-rounds` llama.cpp runs the same layers (`llama_layers.py`): some seven minutes a round
on a quiet AMX Xeon, four of them for the prompts of decodes with attention. Its time is that of the
clock, which other work lengthens; its weights have huge pages as well.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmark.kernels.layers_under_test import DTYPE, CoreRates, OurLayers, TransformersLayers
from benchmark.kernels.llama_layers import LlamaLayers
from benchmark.kernels.published_models import PUBLISHED, PublishedLayers
from benchmark.kernels.stage_step import competitors
from benchmark.support.command import Command, Options, Report, progress
from benchmark.support.paths import SCRATCH
from benchmark.support.turns import (
    Row,
    flops_per_ms,
    in_huge_pages,
    median_and_spread,
    read_bytes_per_ms,
    row_table,
    take_turns,
)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=9)
    command.add("--only", default="", metavar="NAME", help="layers whose name has this in it")
    command.add("--without-transformers", action="store_true", help="ours and the limits alone")
    command.add("--llama-rounds", type=_llama_rounds, default=0, help="default: 0, without it")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    in_huge_pages(__spec__.name)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    chosen = [published for published in PUBLISHED if options.only in published.name]
    rates = CoreRates(
        read_bytes_per_ms(options.rounds), _rate(DTYPE, options), _rate(torch.float32, options)
    )
    table: list[Row] = []
    num_steps = sum(len(published.steps) for published in chosen)
    with progress(num_steps * (1 + options.llama_rounds), "steps") as bar:
        for published in chosen:
            table += _rows(published, rates, options, bar.update)
    text = (
        f"One core reads {rates.bytes_per_ms / 1e6:.3g} GB/s and multiplies "
        f"{rates.flops_per_ms / 1e6:.4g} GFLOP/s in bf16, {rates.fp32_flops_per_ms / 1e6:.4g} in "
        "fp32."
    )
    return Report(
        name="published_layers",
        texts=[row_table(table), text],
        facts={
            "model": {published.name: "random weights" for published in chosen},
            "measured": _conditions(options),
        },
        record={"table": table},
    )


def _conditions(options: Options) -> dict[str, str]:
    """The kinds of time and memory, which are not the same for all engines."""
    time, weights = "of the CPU, one thread", "in huge pages as far as the system gives them"
    if options.llama_rounds:
        time += "; llama.cpp's of the clock, one thread"
        weights += "; llama.cpp's read into memory, not mapped"
    return {"time": time, "weights": weights}


def _rate(dtype: torch.dtype, options: Options) -> float:
    """Floating-point operations of one core in a millisecond."""
    return max(flops_per_ms(kernels, dtype, options.rounds) for kernels in competitors().values())


def _rows(
    published: PublishedLayers, rates: CoreRates, options: Options, done: Callable[[], object]
) -> list[Row]:
    """One for each step; the layers are dropped after the last."""
    llama = _llama_times(published, options.llama_rounds, done)
    ours = OurLayers(published)
    theirs = None if options.without_transformers else TransformersLayers(published)
    rows = []
    for name, chunks in published.steps.items():
        inputs = ours.inputs(chunks)
        hidden = torch.randn(inputs.num_tokens, published.config["hidden_size"]).to(DTYPE)
        turns: dict[str, Callable[[], object]] = {"ours": partial(ours.step, inputs, hidden)}
        if theirs is not None:
            turns["transformers"] = theirs.step(chunks)
        with torch.inference_mode():
            row = take_turns(turns, options.rounds)
        row["limit_ms"] = ours.limit_ms(chunks, rates)
        row["limit_to_ours"] = row["limit_ms"] / row["ours_ms"]
        if theirs is not None:
            row["transformers_to_ours"] = row["transformers_ms"] / row["ours_ms"]
        if llama:
            row |= median_and_spread("llama", llama[name])
            row["llama_to_ours"] = row["llama_ms"] / row["ours_ms"]
        rows.append({"layers": published.name, "step": name, **row})
        done()
    return rows


def _llama_times(
    published: PublishedLayers, rounds: int, done: Callable[[], object]
) -> dict[str, list[float]]:
    """Milliseconds by step, one of each round; empty without rounds."""
    if not rounds:
        return {}
    times: dict[str, list[float]] = {name: [] for name in published.steps}
    with TemporaryDirectory(dir=SCRATCH) as folder:
        layers = LlamaLayers(published, Path(folder))
        for _ in range(rounds):
            for name, chunks in published.steps.items():
                times[name].append(layers.step_ms(chunks))
                done()
    return times


def _llama_rounds(text: str) -> int:
    """None, or so many that they have quartiles."""
    number = int(text)
    if number < 0 or number == 1:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or at least 2")
    return number


if __name__ == "__main__":
    sys.exit(main())
