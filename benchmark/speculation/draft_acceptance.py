"""Replays greedy outputs of SmolLM2 through the n-gram drafter: how many draft tokens are right?

    python -m benchmark.speculation.draft_acceptance
    python -m benchmark.speculation.draft_acceptance --row-times 1:9.0,2:9.3,4:9.8,8:12.1

The outputs are generated once, a minute or two on two cores, and kept under build/; the replay
takes seconds and no model. The speed-up is predicted from the times of steps with one and more
rows, between which it interpolates: by default those of the 0.27b preset in 16 bits at contexts of
128 tokens. A model as small as this one falls into loops, which are easy to draft: the share of
outputs that end in one stands beside each kind.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmark.speculation.prompts import SCHEMAS, chat_ids
from benchmark.speculation.replay import (
    Answer,
    budget_of_one,
    drafted_steps,
    fixed_budget,
    speed_up,
    tokens_per_step,
)
from benchmark.support.command import Command, Options, Report, at_least_one, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.measured_models import NAMES, measured_model
from benchmark.support.paths import BUILD
from sgl_pipeline.scheduling.ngram_drafts import NgramRange
from sgl_pipeline.step_work import StepWork

# ms a layer of the 0.27b preset on two cores; with three and four rows no less than with two.
ROW_TIMES = "1:1.14,2:1.20,3:1.20,4:1.20,5:1.36,8:1.38,12:1.92,16:2.35"
NUM_DRAFTS = range(2, 9)
LENGTHS = [NgramRange(1, longest) for longest in (1, 2, 4, 6)]
LENGTHS += [NgramRange(2, 4), NgramRange(2, 6), NgramRange(3, 6)]
LOOP_TOKENS, LONGEST_LOOP = 32, 24
_COUNTED = ("prompts", "prompt tokens", "output tokens", "end in a loop")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__)
    command.add("--model", default="smollm2", help=f"{NAMES} (default: smollm2)")
    command.add("--output-tokens", type=at_least_one, default=256)
    command.add("--row-times", default=ROW_TIMES, help=f"ROWS:TIME,... (default: {ROW_TIMES})")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    answers = _answers(options.model, options.output_tokens)
    times = relative_times(options.row_times)
    rows = [
        [kind, f"{lengths.shortest}..{lengths.longest}", *_cells(lengths, of_kind, times)]
        for kind, of_kind in answers.items()
        for lengths in LENGTHS
    ]
    kinds = [[kind, *_counts(of_kind)] for kind, of_kind in answers.items()]
    note = (
        "Each cell: tokens a step / predicted speed-up. By budget: as many drafts as the server "
        "gives a lone request whose steps take these times."
    )
    return Report(
        name="draft_acceptance",
        texts=[
            markdown_table(("kind", *_COUNTED), kinds),
            note,
            markdown_table(
                ("kind", "n", *(f"k = {count}" for count in NUM_DRAFTS), "by budget"), rows
            ),
        ],
        facts={"Steps": {"relative time by rows": options.row_times}},
    )


def relative_times(text: str) -> dict[int, float]:
    """The times of steps by their rows over that of one row, from `ROWS:TIME,...`."""
    pairs = [one.split(":") for one in text.split(",")]
    known_rows = [int(count) for count, _ in pairs]
    known_times = [float(time) for _, time in pairs]
    times = np.interp(range(1, known_rows[-1] + 1), known_rows, known_times)
    return {rows: float(time / times[0]) for rows, time in enumerate(times, start=1)}


@dataclass(frozen=True, slots=True)
class RowTimes:
    """`StepTimes` by rows alone; infinite beyond those in `times`."""

    times: Mapping[int, float]

    def step_ms(self, work: StepWork) -> float:
        return self.times.get(work.tokens, math.inf)


def ends_in_loop(output_ids: Sequence[int]) -> bool:
    """True if the last LOOP_TOKENS tokens repeat a run of at most LONGEST_LOOP tokens."""
    if len(output_ids) < LOOP_TOKENS + LONGEST_LOOP:
        return False
    last = output_ids[-LOOP_TOKENS:]
    return any(
        last == output_ids[-LOOP_TOKENS - period : -period] for period in range(1, LONGEST_LOOP + 1)
    )


def _counts(answers: Sequence[Answer]) -> list[str]:
    counts = (
        len(answers),
        sum(len(one.prompt_ids) for one in answers),
        sum(len(one.output_ids) for one in answers),
        sum(ends_in_loop(one.output_ids) for one in answers),
    )
    return [f"{count:,}" for count in counts]


def _cells(
    lengths: NgramRange, answers: Sequence[Answer], times: Mapping[int, float]
) -> Iterator[str]:
    for budget in [*map(fixed_budget, NUM_DRAFTS), budget_of_one(RowTimes(times), max(times) - 1)]:
        steps = [step for answer in answers for step in drafted_steps(answer, lengths, budget)]
        yield f"{tokens_per_step(steps):.2f} / {speed_up(steps, times):.2f}"


def _answers(model: str, output_tokens: int) -> dict[str, list[Answer]]:
    """The answers to the prompts of each kind, generated unless they were before."""
    path = BUILD / "speculation" / f"{Path(model).name}_{output_tokens}.json"
    if not path.is_file():
        say(f"generating {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_generated(model, output_tokens)), encoding="utf-8")
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {kind: [Answer(*one) for one in of_kind] for kind, of_kind in kept.items()}


def _generated(name: str, output_tokens: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    # It imports torch, which a replay has no need of.
    import sgl_pipeline

    model = measured_model(name)
    sampling = {"temperature": 0.0, "max_new_tokens": output_tokens}
    answers: dict[str, list[tuple[list[int], list[int]]]] = {}
    with sgl_pipeline.Engine(model_path=str(model.path), pp=1) as engine:
        for kind, prompt_ids in chat_ids(model.directory).items():
            if kind in SCHEMAS:  # the replay has no grammars
                continue
            results = engine.generate(input_ids=prompt_ids, sampling_params=sampling)
            outputs = [result["output_ids"] for result in results]
            answers[kind] = list(zip(prompt_ids, outputs, strict=True))
            say(f"{kind}: {sum(map(len, outputs))} tokens")
    return answers


if __name__ == "__main__":
    sys.exit(main())
