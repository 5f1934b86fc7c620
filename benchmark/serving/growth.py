"""Measures how the cost of our server's steps grows with context, with concurrency and with the
vocabulary.

    python -m benchmark.serving.growth

Run by hand, some five minutes. One server a vocabulary, at pp 2, gets loads that differ in one
thing only; the times are those of its own trace.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmark.support.command import Command, Options, Report
from benchmark.support.dated_result import markdown_table
from benchmark.support.engines import parse_engine, running
from benchmark.support.loads import Load
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import MeasuredLoad, make_model, measure
from benchmark.support.paths import SCRATCH
from benchmark.support.serving_report import spread
from sgl_pipeline.records.trace import StepRecord

SMALL_VOCABULARY, LARGE_VOCABULARY = "0.27b", "0.52b-152k"
ENGINE = "ours --pp 2 --max-total-tokens 49152"
WARM_UP = Load(seed=7)
OUTPUT_TOKENS = 32


def _load(num_requests: int, input_tokens: int) -> Load:
    """Requests of equal lengths, all at once."""
    return Load(
        num_requests=num_requests,
        input_tokens=input_tokens,
        output_tokens=OUTPUT_TOKENS,
        range_ratio=1.0,
    )


CONTEXT_LOADS = {
    f"context {tokens}": _load(2, tokens) for tokens in (256, 512, 1024, 2048, 4096, 8192)
}
CONCURRENCY_LOADS = {
    f"{count} at a time": _load(count, 128) for count in (1, 2, 4, 8, 16, 32, 64, 128, 256)
}
# What the vocabulary costs shows in a step of one sample, and in one of many.
VOCABULARY_LOADS = {name: CONCURRENCY_LOADS[name] for name in ("1 at a time", "64 at a time")}
LOADS = {
    SMALL_VOCABULARY: CONTEXT_LOADS | CONCURRENCY_LOADS,
    LARGE_VOCABULARY: VOCABULARY_LOADS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One run of one load: medians over its steps of decodes alone, and the whole run's rate.

    `stage_ms[s]` is what stage `s` computed, `head_ms` the part of the last one's that is the
    head's and the sampler's; `scheduler_ms` is deciding, encoding and applying a step.
    `prefill_us_a_token` is of the run's largest prefill, all stages together.
    """

    model: str
    load: str
    decodes_a_step: float
    stage_ms: tuple[float, ...]
    head_ms: float
    scheduler_ms: float
    prefill_us_a_token: float
    total_tokens_per_s: float
    mean_tpot_ms: float


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return Command(__spec__.name, __doc__, rounds=3, port=31900).run(_measure_growth, argv)


def _measure_growth(options: Options) -> Report:
    grown = [one for preset in LOADS for one in _of_model(preset, options.rounds, options.port)]
    return Report(
        name="growth",
        texts=[growth_table(grown)],
        facts={
            "model": {"presets": ", ".join(LOADS), "engine": ENGINE},
            "load": {"tokens out": str(OUTPUT_TOKENS), "prefix caches": "off"},
            "figures": {"medians": f"of {options.rounds} runs (smallest to largest)"},
        },
        record={"runs": [asdict(one) for one in grown]},
    )


def _of_model(preset: str, rounds: int, port: int) -> Iterator[Growth]:
    """Its loads in turns, on a server that stays up."""
    model = make_model(preset)
    engine = parse_engine(ENGINE, model, port, SCRATCH, usable_cores())
    loads = LOADS[preset]
    with running(engine, SCRATCH / "growth.log"):
        measure(engine, model, [WARM_UP], round_number=0)
        for round_number in range(1, rounds + 1):
            measured = measure(engine, model, list(loads.values()), round_number)
            print(f"{preset}, round {round_number} is measured", flush=True)
            for name, one in zip(loads, measured, strict=True):
                yield growth_of(preset, name, one)


def growth_of(model: str, load: str, measured: MeasuredLoad) -> Growth:
    """The numbers of a run with steps of decodes alone and of prefill alone, or nearly so."""
    decoding = [record for record in measured.records if record.prefill_tokens == 0]
    prefilling = max(measured.records, key=lambda record: record.prefill_tokens)

    def compute_ms(record: StepRecord) -> float:
        return sum(stage.compute_ms for stage in record.stages)

    return Growth(
        model=model,
        load=load,
        decodes_a_step=statistics.median(record.decodes for record in decoding),
        stage_ms=tuple(
            statistics.median(record.stages[stage].compute_ms for record in decoding)
            for stage in range(len(decoding[0].stages))
        ),
        head_ms=statistics.median(
            (record.stages[-1].done_s - record.stages[-1].layers_s) * 1e3 for record in decoding
        ),
        scheduler_ms=statistics.median(
            record.schedule_ms + record.result_ms for record in decoding
        ),
        prefill_us_a_token=compute_ms(prefilling) / prefilling.prefill_tokens * 1e3,
        total_tokens_per_s=measured.run.metrics["total_throughput"],
        mean_tpot_ms=measured.run.metrics["mean_tpot_ms"],
    )


def growth_table(grown: Sequence[Growth]) -> str:
    """Markdown: one row a load, medians over its runs with the smallest and the largest."""
    by_load: dict[tuple[str, str], list[Growth]] = {}
    for one in grown:
        by_load.setdefault((one.model, one.load), []).append(one)
    heads = ["model", "load", "decodes a step"]
    heads += [f"stage {stage}, ms a decode step" for stage in range(len(grown[0].stage_ms))]
    heads += ["of it head and sampling", "scheduler, ms a step", "largest prefill, us a token"]
    heads += ["total tok/s", "mean TPOT ms"]
    rows = []
    for (model, load), runs in by_load.items():
        columns = [[one.decodes_a_step for one in runs]]
        columns += [list(stage) for stage in zip(*(one.stage_ms for one in runs), strict=True)]
        columns += [[one.head_ms for one in runs], [one.scheduler_ms for one in runs]]
        columns += [[one.prefill_us_a_token for one in runs]]
        columns += [[one.total_tokens_per_s for one in runs], [one.mean_tpot_ms for one in runs]]
        rows.append([model, load, *(str(spread(column)) for column in columns)])
    return markdown_table(heads, rows)


if __name__ == "__main__":
    sys.exit(main())
