"""Reads drafts out of the traces of `draft_speed`'s servers: whose loads, and how often they were
right.

Functions of step records. A server serves each load once, of which nothing counts, and then each as
often as there are rounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from sgl_pipeline.draft_runs import DraftRuns
from sgl_pipeline.records.trace import StepRecord


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that decoded alone. Of its steps after the prompt's: the draft tokens, and how many
    of them were right."""

    prompt_tokens: int
    output_tokens: int
    drafts: tuple[tuple[int, int], ...]

    @property
    def runs(self) -> DraftRuns:
        """Counts of how often its drafts were right; a decode without one is a lookup in vain."""
        runs = DraftRuns()
        for num_drafted, num_right in self.drafts:
            runs.note(num_drafted, num_right)
        return runs


def drafts_apart(record: StepRecord) -> StepRecord:
    """The step with its draft tokens apart, which traces before 2026-11-27 count as prompt tokens:
    each is sampled, and a prompt's are not."""
    extra = record.prefill_tokens
    are_drafts = record.decodes > 0 and extra > 0 and record.samples == extra + record.decodes
    if record.draft_tokens or not are_drafts:
        return record
    return msgspec.structs.replace(record, prefill_tokens=0, draft_tokens=extra)


def runs_by_load(
    records: Sequence[StepRecord], sizes: Mapping[str, int], rounds: int
) -> dict[str, list[list[StepRecord]]]:
    """The steps of each counted run, by load.

    Args:
        sizes: of each load the number of its requests, in the order in which they were served.
    """
    order = [*sizes, *(load for load in sizes for _ in range(rounds))]
    runs: list[list[StepRecord]] = [[] for _ in order]
    number = num_ended = 0
    for record in records:
        runs[number].append(record)
        num_ended += len(record.ended)
        if num_ended == sizes[order[number]]:
            number, num_ended = number + 1, 0
            if number == len(order):
                break
    found: dict[str, list[list[StepRecord]]] = {load: [] for load in sizes}
    for load, run in zip(order[len(sizes) :], runs[len(sizes) :], strict=True):
        found[load].append(run)
    return found


def lone_requests(records: Sequence[StepRecord]) -> Iterator[TracedRequest]:
    """The requests of a run of one client. A decode attends to one token more than are known
    before it: what it gave is how much later the next one starts."""
    steps: list[StepRecord] = []
    for record in records:
        steps += [record] if record.decodes else []
        if record.ended:
            (ended,) = record.ended
            last = ended.prompt_tokens + ended.output_tokens
            starts = [step.decode_attended_tokens for step in steps]
            given = [b - a for a, b in zip(starts, [*starts[1:], last], strict=True)]
            drafts = [(step.draft_tokens, n - 1) for step, n in zip(steps, given, strict=True)]
            yield TracedRequest(ended.prompt_tokens, ended.output_tokens, tuple(drafts))
            steps = []


def by_text(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """The steps of each request of a run of one client."""
    found: list[list[StepRecord]] = [[]]
    for record in records:
        found[-1].append(record)
        if record.ended:
            found.append([])
    return found[:-1]


def elapsed_s(text: Sequence[StepRecord]) -> float:
    """Seconds from the first step of a lone request to the end of its last."""
    return text[-1].finished_s - text[0].scheduled_s


def mean_gap_s(records: Sequence[StepRecord]) -> float:
    """Mean seconds of one client from an answer to the first step of the next request."""
    gaps = [
        after.scheduled_s - before.finished_s for before, after in pairwise(records) if before.ended
    ]
    return sum(gaps) / len(gaps)
