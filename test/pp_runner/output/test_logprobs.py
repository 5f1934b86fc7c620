"""Rows of log-probabilities against a walk over single rows in Python."""

import math
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_pipeline.pp_runner.output import logprobs
from sgl_pipeline.pp_runner.output.logprobs import plan_logprobs
from sgl_pipeline.requests import GREEDY, LogprobRows, LogprobSpec, SamplingSpec
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

VOCAB_SIZE = 11
LOWEST = torch.finfo(torch.float32).min


def chunk_of(
    spec: LogprobSpec | None,
    start: int,
    length: int,
    *,
    samples: bool = True,
    sampling: SamplingSpec = GREEDY,
) -> MirroredChunk:
    """The tokens of a request are 0, 1, 2, ... modulo the vocabulary, one more than its chunks."""
    tokens = array("i", (position % VOCAB_SIZE for position in range(start + length)))
    if not samples:
        tokens.append((start + length) % VOCAB_SIZE)
    request = MirroredRequest(0, sampling, len(tokens), tokens, array("i"), spec)
    return MirroredChunk(request, start, length, samples)


def compute(
    chunks: list[MirroredChunk], logits: torch.Tensor, drawn: list[int]
) -> tuple[LogprobRows, ...]:
    """The residual stream stands for the logits: the head changes nothing."""
    rows = torch.tensor([chunk.length for chunk in chunks]).cumsum(0) - 1
    sampled = rows[torch.tensor([chunk.samples for chunk in chunks])]
    plan = plan_logprobs(chunks)
    assert plan is not None
    numbers = plan.compute(lambda hidden: hidden, logits, logits[sampled], torch.tensor(drawn))
    return numbers.rows_of_chunks(numbers.tensors)


def numbers(field: bytes, typecode: str = "f") -> list[float]:
    return array(typecode, field).tolist()


specs = st.none() | st.builds(
    LogprobSpec,
    prompt_start=st.integers(0, 12),
    num_top=st.integers(0, VOCAB_SIZE),
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(specs, st.integers(0, 9), st.integers(1, 6), st.booleans()), min_size=1
    ),
    rows_at_once=st.integers(1, 4),
)
def test_rows_equal_a_walk_over_single_rows(shapes, rows_at_once):
    chunks = [
        # As the scheduler has it: the row that is drawn from is always wanted.
        chunk_of(
            spec and LogprobSpec(min(spec.prompt_start, end - 1), spec.num_top, spec.token_ids)
            if samples
            else spec,
            start,
            end - start,
            samples=samples,
            sampling=SamplingSpec(temperature=0.5 * number),
        )
        for number, (spec, start, length, samples) in enumerate(shapes)
        for end in [start + length]
    ]
    if all(chunk.request.logprobs is None for chunk in chunks):
        assert plan_logprobs(chunks) is None
        return
    num_tokens = sum(chunk.length for chunk in chunks)
    logits = torch.randn((num_tokens, VOCAB_SIZE), generator=torch.Generator().manual_seed(3))
    drawn = [(7 * number) % VOCAB_SIZE for number in range(sum(c.samples for c in chunks))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "MAX_LOGITS_BYTES", rows_at_once * VOCAB_SIZE * 4)
        found = compute(chunks, logits, drawn)

    first_row, num_sampled, expected = 0, 0, iter(found)
    for chunk in chunks:
        spec, request = chunk.request.logprobs, chunk.request
        chosen, top, of_token_ids = [], [], []
        for position in range(chunk.start, chunk.start + chunk.length):
            if spec is None or position < spec.prompt_start:
                continue
            row = logits[first_row + position - chunk.start]
            is_last = position == chunk.start + chunk.length - 1
            if is_last and chunk.samples:
                next_id = drawn[num_sampled]
                row = row / (request.sampling.temperature or 1.0)
            else:
                next_id = request.tokens[position + 1]
            row = row.log_softmax(dim=0).tolist()
            chosen.append(row[next_id])
            top += sorted(row, reverse=True)[: spec.num_top]
            of_token_ids += [row[token] for token in spec.token_ids]
        first_row += chunk.length
        num_sampled += chunk.samples
        if spec is None:
            continue
        rows = next(expected)
        assert rows.num_rows == len(chosen)
        assert numbers(rows.chosen) == pytest.approx(chosen, abs=1e-6)
        assert numbers(rows.top) == pytest.approx(top, abs=1e-6)
        assert numbers(rows.of_token_ids) == pytest.approx(of_token_ids, abs=1e-6)
        assert len(numbers(rows.top_ids, "i")) == len(top)
    assert next(expected, None) is None


def test_no_row_is_planned_where_none_is_wanted():
    assert plan_logprobs([chunk_of(None, 0, 3), chunk_of(None, 5, 1)]) is None


def test_equal_numbers_come_with_the_lowest_ids_first_in_any_company():
    logits = torch.zeros((2, VOCAB_SIZE))
    logits[:, 7] = 1.0
    alone = compute([chunk_of(LogprobSpec(0, 3), 0, 1)], logits[:1], [7])
    both = compute([chunk_of(LogprobSpec(0, n), 0, 1) for n in (3, VOCAB_SIZE)], logits, [7, 7])
    assert numbers(alone[0].top_ids, "i") == [7, 0, 1]
    assert both[0] == alone[0]
    assert numbers(both[1].top_ids, "i") == [7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10]


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("samples", [True, False])
def test_a_row_that_is_not_finite_gives_finite_numbers_and_harms_no_other(fault, samples):
    logits = torch.randn((3, VOCAB_SIZE), generator=torch.Generator().manual_seed(1))
    spec = LogprobSpec(0, 4, (2, 3))
    chunks = [chunk_of(spec, 0, 1, samples=samples), chunk_of(spec, 0, 2)]
    healthy = compute(chunks, logits, [1] * (1 + samples))
    for faulty_row in (torch.full((VOCAB_SIZE,), fault), logits[0].clone()):
        faulty_row[3] = fault
        logits[0] = faulty_row
        faulty = compute(chunks, logits, [1] * (1 + samples))
        assert faulty[1] == healthy[1]
        for field in (faulty[0].chosen, faulty[0].top, faulty[0].of_token_ids):
            assert all(math.isfinite(number) for number in numbers(field))
        assert all(0 <= token < VOCAB_SIZE for token in numbers(faulty[0].top_ids, "i"))
    if fault != math.inf:
        assert numbers(faulty[0].of_token_ids)[1] == LOWEST


def test_the_logits_that_were_sampled_from_stay_as_they_are():
    logits = torch.randn((1, VOCAB_SIZE))
    before = logits.clone()
    compute([chunk_of(LogprobSpec(0, 2), 0, 1, sampling=SamplingSpec())], logits, [1])
    assert torch.equal(logits, before)


def test_a_planned_chunk_leaves_its_request_free_to_grow():
    chunk = chunk_of(LogprobSpec(0), 0, 4)
    plan = plan_logprobs([chunk])
    assert plan is not None
    chunk.request.tokens.extend([1, 2, 3])
    assert plan.next_ids.tolist() == [1, 2, 3]
