from dataclasses import replace

import msgspec
import pytest

from benchmark.overheads.lone_token import (
    ProcessUse,
    Profile,
    lone_decodes,
    parts_of,
    parts_table,
    use_table,
)
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.trace import RequestRecord, StepRecord

ENDED = RequestRecord(
    request_id="a",
    prompt_tokens=4,
    cached_tokens=0,
    output_tokens=3,
    num_retractions=0,
    queue_ms=0.0,
    first_token_ms=1.0,
    total_ms=2.0,
)


def step(start_s: float) -> StepRecord:
    """A decode that is decided at `start_s` and is back 0.017 s later."""
    moments_s = [start_s + offset for offset in (-0.001, 0.001, 0.002, 0.002, 0.013, 0.016, 0.016)]
    return StepRecord(
        step_id=0,
        epoch=0,
        prefill_tokens=0,
        decodes=1,
        samples=1,
        attended_tokens=5,
        waiting_tokens=0,
        running_decodes=1,
        free_page_share=1.0,
        prefill_budget=0,
        decode_budget=1,
        bound_by="",
        scheduled_s=start_s,
        finished_s=start_s + 0.017,
        schedule_ms=0.25,
        result_ms=0.1,
        stages=(StageTiming(*moments_s),),
    )


def test_parts_fill_the_time_from_one_decision_to_the_next() -> None:
    parts = parts_of(step(10.0), 10.019)
    assert parts.decide == pytest.approx(0.25)
    assert parts.order == pytest.approx(0.75)
    assert parts.inputs == pytest.approx(1.0)
    assert parts.layers == pytest.approx(11.0)
    assert parts.head == pytest.approx(3.0)
    assert parts.report == pytest.approx(1.0)
    assert parts.book == pytest.approx(2.0)
    assert parts.whole == pytest.approx(19.0)


def test_a_stage_that_begins_while_the_order_is_sent_takes_no_negative_time() -> None:
    parts = parts_of(msgspec.structs.replace(step(10.0), schedule_ms=5.0), 10.019)
    assert (parts.order, parts.whole) == (0.0, pytest.approx(19.0))


def test_only_decodes_that_another_follows_count() -> None:
    prompt = msgspec.structs.replace(step(1.0), prefill_tokens=4, decodes=0)
    last = msgspec.structs.replace(step(3.0), ended=(ENDED,))
    steps = [prompt, step(2.0), last, step(9.0), prompt]
    assert [parts.whole for parts in lone_decodes(steps)] == [pytest.approx(1000.0)]


def test_tables_name_what_a_token_took() -> None:
    parts = [parts_of(step(float(start)), start + 0.019) for start in range(3)]
    before = ProcessUse("stage", 1.0, 10)
    used = ProcessUse("stage", 1.04, 12).since(before)
    found = Profile([19.0], [18.5], 2**20, parts, [used])
    assert "| layers | 11.000 | 11.000 | 11.000 | 11.000 |" in parts_table("ours", found)
    assert "Weights with embedding: 1 MiB." in parts_table("ours", found)
    assert "| stage | 10.000 | 0.500 |" in use_table(found)
    assert replace(found, tpot_ms=[19.0, 19.0]).num_tokens == 5
