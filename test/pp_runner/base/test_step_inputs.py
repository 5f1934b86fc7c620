"""What attention, layers and sampler are fed, against a walk over single tokens and pages."""

from array import array

import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.pp_runner.base.step_inputs import build_step_inputs
from sgl_pipeline.requests import GREEDY, SamplingSpec
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
