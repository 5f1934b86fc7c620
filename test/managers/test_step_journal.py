"""A step's record is written when all stages have reported, and a full disk ends only the trace."""

import pytest
from support.step_records import run_step, timing

from sgl_pipeline.managers.step_journal import RECENT_STEPS, StepJournal
from sgl_pipeline.trace import RequestRecord, TraceWriter, read_trace


def test_a_record_holds_what_the_step_carried_and_cost(tmp_path):
    journal = StepJournal(2, [TraceWriter(tmp_path / "trace")])
    run_step(journal, 0)
    run_step(journal, 1)
    journal.close()
    first, second = read_trace(tmp_path / "trace")
    assert (first.step_id, second.step_id) == (0, 1)
    assert (first.prefill_tokens, first.decodes, first.waiting_tokens) == (5, 1, 9)
    assert (first.scheduled_s, first.finished_s) == (10.0, 11.0)
    assert (first.schedule_ms, first.result_ms, first.free_page_share) == (0.25, 0.5, 0.75)
    assert first.stages == (timing(0), timing(1))
    assert (first.prefill_budget, first.decode_budget, first.bound_by) == (9, 1, "MinP")
    assert first.ended == (
        RequestRecord(
            request_id="d",
            prompt_tokens=3,
            cached_tokens=1,
            output_tokens=2,
            num_retractions=0,
            queue_ms=1000.0,
            first_token_ms=1500.0,
            total_ms=3000.0,
        ),
    )
    assert (journal.prefill_tokens, journal.decodes) == (10, 2)
    assert journal.input_wait_ms == pytest.approx([1.0, 3.0])
    assert journal.compute_ms == pytest.approx([4.0, 4.0])
    assert journal.last_steps == {0: 1, 1: 1}


def test_the_newest_steps_are_kept_and_described():
    journal = StepJournal(2)
    assert journal.describe_recent() == {"steps": 0}
    for step_id in range(RECENT_STEPS + 3):
        run_step(journal, step_id)
    assert [step.step_id for step in journal.recent] == list(range(3, RECENT_STEPS + 3))
    facts = journal.describe_recent()
    assert (facts["steps"], facts["bound_by"]) == (RECENT_STEPS, "MinP")
    assert (facts["mean_prefill_tokens"], facts["mean_decodes"]) == (5, 1)
    # All of the wait is for activations: the inputs are there from the beginning.
    assert facts["stages"][1] == pytest.approx(
        {"busy": 2 / 3.5, "activations": 1.5 / 3.5, "metadata": 0, "slot": 0}
    )


def test_a_writer_gets_the_steps_that_end_while_it_is_there(tmp_path):
    journal = StepJournal(2)
    writer = TraceWriter(tmp_path / "trace")
    run_step(journal, 0)
    journal.add_writer(writer)
    run_step(journal, 1)
    journal.remove_writer(writer)
    run_step(journal, 2)
    assert [record.step_id for record in read_trace(tmp_path / "trace")] == [1]


def test_a_full_disk_ends_one_trace_and_neither_the_server_nor_another(tmp_path):
    class FullDisk(TraceWriter):
        def flush(self) -> None:
            raise OSError("no space left on device")

    whole = TraceWriter(tmp_path / "whole")
    journal = StepJournal(2, [FullDisk(tmp_path / "trace"), whole])
    run_step(journal, 0)
    run_step(journal, 1)
    journal.close()
    assert journal.last_steps == {0: 1, 1: 1}
    assert len(list(read_trace(tmp_path / "whole"))) == 2


def test_a_step_that_was_never_scheduled_is_our_own_bug():
    journal = StepJournal(2)
    with pytest.raises(KeyError):
        journal.finished(5, (), now_s=1.0, result_ms=0.0)
