"""What attention, layers and sampler are fed, against a walk over single tokens and pages."""

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.step_inputs import build_step_inputs, written_pages
from sgl_pipeline.requests import GREEDY, Lease, SamplingSpec
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

CPU = torch.device("cpu")


def mirrored_request(num_tokens: int, pages: list[int], seed: int = 0) -> MirroredRequest:
    """Token ids are 1000 * seed + position; `pages` may be more than the tokens fill."""
    tokens = array("i", range(1000 * seed, 1000 * seed + num_tokens))
    sampling = SamplingSpec(seed=seed)
    return MirroredRequest(seed, sampling, num_tokens, tokens, array("i", pages))


@st.composite
def steps(draw) -> tuple[int, list[MirroredChunk]]:
    """A page size and the chunks of a step: decodes first, pages in random order. The last tokens
    of a chunk that samples may be drafts, which its request does not have."""
    page_size = draw(st.sampled_from([1, 2, 5, 16]))
    num_decodes = draw(st.integers(0, 3))
    num_chunks = num_decodes + draw(st.integers(0 if num_decodes else 1, 3))
    free_pages = draw(st.permutations(range(400)))
    chunks = []
    for seed in range(num_chunks):
        start = draw(st.integers(0, 40))
        length = 1 if seed < num_decodes else draw(st.integers(1, 40))
        unseen = draw(st.integers(0, 3))
        # A later chunk of the same request may have brought pages already.
        num_pages = -(-(start + length + unseen) // page_size)
        pages, free_pages = free_pages[:num_pages], free_pages[num_pages:]
        num_drafts = draw(st.integers(0, length - 1)) if unseen == 0 else 0
        request = mirrored_request(start + length + unseen - num_drafts, list(pages), seed)
        drafts = tuple(range(-num_drafts, 0))
        chunks.append(MirroredChunk(request, start, length, unseen == 0, draft_ids=drafts))
    return page_size, chunks


@given(steps())
def test_inputs_equal_a_walk_over_single_tokens(step):
    page_size, chunks = step
    inputs = build_step_inputs(chunks, page_size, CPU)
    layout = inputs.layout
    rows, sampled = [], []
    for index, chunk in enumerate(chunks):
        first_row = len(rows)
        tokens = [*chunk.request.tokens, *chunk.draft_ids]
        for position in range(chunk.start, chunk.start + chunk.length):
            page = chunk.request.pages[position // page_size]
            slot = page * page_size + position % page_size
            rows.append((tokens[position], position, slot))
        assert layout.query_indptr[index : index + 2].tolist() == [first_row, len(rows)]

        visible_pages = sorted({position // page_size for position in range(rows[-1][1] + 1)})
        begin, end = layout.page_indptr[index : index + 2].tolist()
        assert layout.page_indices[begin:end].tolist() == [
            chunk.request.pages[number] for number in visible_pages
        ]
        assert layout.last_page_lengths[index] == rows[-1][1] % page_size + 1
        assert layout.kv_lengths[index] == rows[-1][1] + 1
        if chunk.samples:
            last_rows = range(len(rows) - 1 - len(chunk.draft_ids), len(rows))
            sampled += [(row, rows[row][1] + 1, chunk.request.sampling) for row in last_rows]

    assert (
        list(zip(*map(_list, (inputs.token_ids, inputs.positions, inputs.slots)), strict=True))
        == rows
    )
    assert (
        list(
            zip(
                _list(inputs.sample_rows),
                _list(inputs.sample_positions),
                inputs.sampling,
                strict=True,
            )
        )
        == sampled
    )
    assert inputs.num_tokens == len(rows)
    assert layout.num_chunks == len(chunks)
    leading_ones = [chunk.length == 1 for chunk in chunks] + [False]
    assert layout.num_decodes == leading_ones.index(False)


def _list(values: torch.Tensor) -> list[int]:
    return values.tolist()


def test_flashinfer_arrays_of_a_hand_worked_step():
    # One decode at position 16 (its second page has one token) and a chunk that crosses a page:
    # positions 10 to 20 of a prompt, page size 16.
    decode = MirroredChunk(mirrored_request(17, [7, 3]), 16, 1, True)
    prefill = MirroredChunk(mirrored_request(30, [4, 9], seed=1), 10, 11, False)
    inputs = build_step_inputs([decode, prefill], 16, CPU)
    layout = inputs.layout
    assert layout.query_indptr.tolist() == [0, 1, 12]
    assert layout.page_indptr.tolist() == [0, 2, 4]
    assert layout.page_indices.tolist() == [7, 3, 4, 9]
    assert layout.last_page_lengths.tolist() == [1, 5]
    assert layout.kv_lengths.tolist() == [17, 21]
    assert inputs.slots.tolist() == [48, *range(74, 80), *range(144, 149)]
    assert inputs.sample_rows.tolist() == [0]
    assert inputs.sample_positions.tolist() == [17]


def test_planner_arrays_are_int32_on_the_host_and_indices_are_int64():
    inputs = build_step_inputs([MirroredChunk(mirrored_request(3, [0]), 0, 3, True)], 4, CPU)
    layout = inputs.layout
    for planned in (
        layout.query_indptr,
        layout.page_indptr,
        layout.page_indices,
        layout.last_page_lengths,
        layout.kv_lengths,
    ):
        assert planned.dtype == torch.int32 and planned.device == CPU
    for index in (inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_rows):
        assert index.dtype == torch.int64


def test_inputs_do_not_change_when_the_request_grows():
    request = mirrored_request(3, [5])
    request.sampling = GREEDY
    inputs = build_step_inputs([MirroredChunk(request, 0, 3, True)], 4, CPU)
    request.tokens.extend([1, 2, 3])
    request.pages.append(6)
    request.pages[0] = 99
    assert inputs.layout.page_indices.tolist() == [5]
    assert inputs.token_ids.tolist() == [0, 1, 2]


def leased(start: int, length: int, page: int, seed: int) -> MirroredChunk:
    request = mirrored_request(start + length, [page], seed)
    request.lease = Lease("P", 70 + seed)
    return MirroredChunk(request, start, length, samples=True)


@given(steps(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15), st.integers(1, 16))))
def test_rows_of_leases_come_behind_the_others_each_in_its_one_page(step, leases):
    page_size, chunks = step
    lent = []
    for number, (page, offset, length) in enumerate(leases):
        start = page * page_size + offset % page_size
        length = min(length, page_size - offset % page_size)
        lent.append(leased(start, length, 500 + number, 10 + number))
    inputs, alone = (build_step_inputs(part, page_size, CPU) for part in (chunks + lent, chunks))
    assert (inputs.lent is None) == (lent == [])
    num_local = alone.num_tokens
    for name in ("token_ids", "positions", "slots"):
        assert torch.equal(getattr(inputs, name)[:num_local], getattr(alone, name))
    for name in type(alone.layout).__slots__:
        assert str(getattr(inputs.layout, name)) == str(getattr(alone.layout, name))
    if inputs.lent is not None:
        assert (inputs.lent.first_row, list(inputs.lent.chunks)) == (num_local, lent)
    rows = [
        (one.request.tokens[position], position, one.request.pages[0], position % page_size)
        for one in lent
        for position in range(one.start, one.start + one.length)
    ]
    found = zip(inputs.token_ids, inputs.positions, inputs.slots, strict=True)
    assert [
        (int(token), int(position), *divmod(int(slot), page_size))
        for token, position, slot in [*found][num_local:]
    ] == rows
    sampled = [
        num_local + sum(one.length for one in lent[: count + 1]) - 1 for count in range(len(lent))
    ]
    num_sampled = len(alone.sampling)
    assert inputs.sample_rows[num_sampled:].tolist() == sampled
    assert written_pages(chunks + lent, page_size) == written_pages(chunks, page_size)


def test_a_step_may_have_rows_of_leases_only():
    inputs = build_step_inputs([leased(9, 2, 7, 1)], 4, CPU)
    assert inputs.layout.num_chunks == inputs.layout.num_decodes == 0
    assert inputs.layout.query_indptr.tolist() == inputs.layout.page_indptr.tolist() == [0]
    assert inputs.slots.tolist() == [29, 30]
    assert inputs.sample_rows.tolist() == [1]


def test_chunks_of_leases_that_come_first_or_cross_a_page_break_the_protocol():
    local = MirroredChunk(mirrored_request(3, [0]), 0, 3, True)
    with pytest.raises(ProtocolError, match="comes before one of a request without"):
        build_step_inputs([leased(9, 1, 7, 1), local], 4, CPU)
    with pytest.raises(ProtocolError, match="2 rows of a lease from position 7 on"):
        build_step_inputs([local, leased(7, 2, 7, 1)], 4, CPU)


@pytest.mark.parametrize("rows_beside", [0, 3])
def test_a_request_with_too_few_tokens_or_pages_breaks_the_protocol(rows_beside):
    beside = [MirroredChunk(mirrored_request(rows_beside, [9]), 0, rows_beside, True)]
    for num_tokens, pages, what in ((6, [1, 2], "7 tokens"), (7, [1], "2 pages"), (7, [], "2")):
        short = MirroredChunk(mirrored_request(num_tokens, pages, 5), 2, 5, True)
        with pytest.raises(ProtocolError, match=f"request 5 from position 2 on need {what}"):
            build_step_inputs([short, *beside[: rows_beside > 0]], 4, CPU)
        longer = MirroredChunk(mirrored_request(12, [3, 4, 6]), 2, 5, True)
        with pytest.raises(ProtocolError, match=f"request 5 from position 2 on need {what}"):
            build_step_inputs([longer, short, longer], 4, CPU)
    # Drafts count as pages, not as tokens.
    drafted = MirroredChunk(mirrored_request(5, [1, 2]), 2, 5, True, draft_ids=(8, 9))
    assert build_step_inputs([drafted], 4, CPU).token_ids.tolist() == [2, 3, 4, 8, 9]
    short = MirroredChunk(mirrored_request(4, [1, 2], 5), 2, 5, True, draft_ids=(8, 9))
    with pytest.raises(ProtocolError, match="need 5 tokens, and it has 4"):
        build_step_inputs([short], 4, CPU)
    without_page = leased(9, 1, 7, 1)
    without_page.request.pages.pop()
    with pytest.raises(ProtocolError, match="need 1 pages, and it has 0"):
        build_step_inputs([without_page], 4, CPU)
