"""Step records count draft tokens apart, and older traces load."""

from pathlib import Path

import msgspec
from support.pipelines import make_request, new_pipeline
from support.step_records import step_record

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.records.trace import TraceWriter, read_trace

LOOP = [1, 2, 3, 4] * 4


def test_drafts_are_no_prompt_tokens() -> None:
    args = SchedulingArgs(page_size=4, draft_tokens=3)
    pipeline = new_pipeline(args, num_pages=60, num_stages=1)
    for name in "ab":
        pipeline.scheduler.add(make_request(name, LOOP, 60))
    pipeline.drain()
    records, drafts = pipeline.core.history.recent, pipeline.scheduler.drafts
    assert sum(one.draft_tokens for one in records) == drafts.num_drafted > 0
    assert sum(one.accepted_draft_tokens for one in records) == drafts.num_accepted > 0
    assert sum(one.prefill_tokens for one in records) == pipeline.core.history.prefill_tokens
    assert sum(one.prefill_tokens for one in records) <= 2 * len(LOOP)
    works = [one.work for one in pipeline.microbatches]
    assert [one.work for one in records] == works
    assert [one.num_tokens for one in records] == [work.tokens for work in works]


def test_a_trace_of_before_drafts_loads(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    record = step_record(3)
    writer = TraceWriter(path)
    writer.write(record)
    writer.close()
    fields = msgspec.json.decode(path.read_bytes())
    del fields["draft_tokens"], fields["accepted_draft_tokens"]
    path.write_bytes(msgspec.json.encode(fields) + b"\n")
    assert list(read_trace(path)) == [record]
