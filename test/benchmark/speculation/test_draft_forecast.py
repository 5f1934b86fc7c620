"""The simulator predicts, from acceptance, what drafts gained on SmolLM2: within a tenth, by the
figures of the result that is kept."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import msgspec
import pytest
from support.step_records import step_record

from benchmark.speculation.draft_forecast import MOST_ERROR, alike, newest_result, prediction
from benchmark.speculation.draft_gains import (
    Half,
    Measured,
    Text,
    lone_and_shared,
    measured_from,
    recorded,
    texts_of_half,
)
from benchmark.speculation.draft_report import WANTED_ERROR, errors, texts_needed
from benchmark.speculation.traced_drafts import (
    TracedRequest,
    drafts_apart,
    lone_requests,
    runs_by_load,
)
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.simulator.virtual_drafts import NEVER_RIGHT, acceptance_of


@pytest.fixture(scope="module")
def measured() -> Measured:
    return recorded(newest_result())


def test_gains_are_predicted_within_a_tenth(measured: Measured) -> None:
    found = errors(measured, prediction(measured, 4, own_acceptance=True))
    assert len(found) == 5
    assert all(abs(error) < MOST_ERROR for error in found.values()), found


def test_no_half_is_predicted_from_itself(measured: Measured) -> None:
    """Nothing but the lengths of its texts is looked at."""
    first, second = map(shortened, measured.halves)
    measured = msgspec.structs.replace(measured, halves=(first, second))
    blank = msgspec.structs.replace(
        first,
        costs=second.costs,
        host=second.host,
        texts={
            load: [msgspec.structs.replace(one, acceptance=NEVER_RIGHT) for one in texts]
            for load, texts in first.texts.items()
        },
    )
    changed = msgspec.structs.replace(measured, halves=(blank, second))
    before, after = (prediction(one, 1, own_acceptance=False).halves for one in (measured, changed))
    assert before[0] == after[0]
    assert before[1] != after[1]


def shortened(half: Half) -> Half:
    """With two texts of each load."""
    return msgspec.structs.replace(
        half, texts={load: texts[:2] for load, texts in half.texts.items()}
    )


def test_halves_have_as_many_texts_of_each_form() -> None:
    texts = "aAbBcCdD"
    assert texts_of_half(0, texts) == list("aBcD") and texts_of_half(1, texts) == list("AbCd")


CHAT, SAME, ALL = "chat, 1 client", "JSON, same prompts, 1 client", "all kinds, 16 clients"


def test_loads_are_those_of_one_client_and_of_several() -> None:
    assert lone_and_shared([CHAT, SAME, ALL]) == ([CHAT, SAME], ALL)


@pytest.mark.parametrize(
    "loads",
    [
        [CHAT, SAME],
        [ALL],
        [ALL, CHAT, SAME],
        [CHAT, SAME, ALL, "all kinds, 8 clients"],
        [CHAT, ALL],  # eight prompts of 16 clients: some would be asked twice
    ],
)
def test_other_loads_have_no_forecast(loads: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="--clients 1,8"):
        lone_and_shared(loads)


def test_one_round_has_no_forecast() -> None:
    runs = [[drafts, CHAT, 1, 1.0, 9] for drafts in ("off", "on")]
    with pytest.raises(ConfigurationError, match="measured one round"):
        measured_from(Path("none"), Path("none"), {"runs": runs})


def text_of(output_tokens: int) -> Text:
    return Text(5, output_tokens, NEVER_RIGHT)


def test_a_new_text_is_like_known_ones_of_its_length() -> None:
    """A loop runs to the limit, and others end before it: lengths tell them apart."""
    cut, others = text_of(128), [text_of(128), text_of(79), text_of(128), text_of(50)]
    assert alike(cut, others) == [others[0], others[2]]
    assert alike(text_of(72), others) == [others[1]]
    assert alike(text_of(64), [others[1], others[3]]) == [others[3]]


def test_the_number_of_texts_that_tell_a_gain_is_that_of_which_the_gain_errs_by_a_tenth() -> None:
    """Held against gains of as many texts, drawn at random."""
    seconds = [(1.6, 0.7), (1.5, 0.4), (0.9, 0.8), (1.6, 0.5), (1.5, 1.0)]
    count, random = texts_needed(seconds), Random(1)
    drawn = [random.choices(seconds, k=count) for _ in range(2000)]
    gains = [sum(off for off, _ in one) / sum(on for _, on in one) for one in drawn]
    assert stdev(gains) / fmean(gains) == pytest.approx(WANTED_ERROR, rel=0.15)
    assert texts_needed([(2.0, 1.0), (4.0, 2.0)]) == 1


def step(
    drafts: int = 0, attended: int = 0, prefill: int = 0, ended: tuple[int, int] | None = None
) -> StepRecord:
    """A prompt's step, or a decode with drafts in the form of old traces; `ended`: with so many
    tokens of prompt and output."""
    record, decodes = step_record(0), int(attended > 0)
    ends = () if ended is None else (record.ended[0],)
    if ended is not None:
        sizes = {"prompt_tokens": ended[0], "output_tokens": ended[1]}
        ends = (msgspec.structs.replace(record.ended[0], **sizes),)
    return msgspec.structs.replace(
        record,
        prefill_tokens=prefill + drafts,
        decodes=decodes,
        samples=drafts + decodes,
        decode_attended_tokens=attended,
        ended=ends,
    )


def test_drafts_are_told_from_prompts_in_old_traces() -> None:
    old, prompt = step(drafts=3, attended=9), step(prefill=5)
    assert (drafts_apart(old).prefill_tokens, drafts_apart(old).draft_tokens) == (0, 3)
    assert drafts_apart(old).work.tokens == old.work.tokens == 4
    assert drafts_apart(prompt) is prompt
    new = msgspec.structs.replace(old, prefill_tokens=0, draft_tokens=3)
    assert drafts_apart(new) is new


def test_what_a_decode_gave_is_how_much_later_the_next_one_starts() -> None:
    # A prompt of 4 draws a token; then 2 tokens of a draft of 3 and one more, 1, and the last 2.
    steps = [step(prefill=4), step(3, 5), step(0, 8), step(1, 9, ended=(4, 7))]
    (request,) = lone_requests([drafts_apart(one) for one in steps])
    assert request == TracedRequest(4, 7, ((3, 2), (0, 0), (1, 1)))


@pytest.mark.parametrize(
    ("drafts", "chances", "found"),
    [
        # Each lookup of three finds a draft; of four tokens after none, three are right.
        ([(2, 0), (2, 1), (2, 2), (1, 1)], (2 / 3, 0.5, 1.0), 1.0),
        ([(0, 0), (1, 0), (0, 0), (1, 0)], (0.0,), 0.5),
        ([], (0.0,), 0.0),
    ],
)
def test_chances_are_counted_by_the_run_before_a_token(
    drafts: Sequence[tuple[int, int]], chances: tuple[float, ...], found: float
) -> None:
    acceptance = acceptance_of([TracedRequest(4, 9, tuple(drafts)).runs])
    assert acceptance.found == found
    assert acceptance.chances[: len(chances)] == pytest.approx(chances)


def test_runs_are_told_by_the_requests_that_ended() -> None:
    def of_run(number: int) -> list[StepRecord]:
        return [step(prefill=number), step(attended=5, ended=(1, 1))]

    sizes = {"one": 1, "two": 2}
    warm_up, first, second = of_run(1), of_run(2), of_run(3)
    records = [*warm_up, *of_run(1), *of_run(1), *first, *second, *of_run(4), *of_run(4)]
    records += [*of_run(5), *of_run(5)]
    runs = runs_by_load(records, sizes, rounds=2)
    assert runs["one"] == [first, second]
    assert [len(run) for run in runs["two"]] == [4, 4]
