"""A chunk with drafts is what as many steps without would have been."""

from array import array

from sgl_pipeline.pp_runner.output.drafted_rows import rows_apart
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest


def new_request(*token_ids: int) -> MirroredRequest:
    return MirroredRequest(3, GREEDY, 2, array("i", token_ids), array("i"))


def test_chunks_without_drafts_stay_what_they_are() -> None:
    chunks = [MirroredChunk(new_request(1, 2, 3), 1, 2, samples=True)]
    assert rows_apart(chunks) is chunks


def test_each_draft_token_is_a_chunk_of_its_own() -> None:
    other = MirroredChunk(new_request(1, 2, 3), 1, 2, samples=False)
    request = new_request(4, 5, 6)
    drafted = MirroredChunk(request, 1, 4, True, b"abcdef", (7, 8))
    first, *apart = rows_apart([other, drafted])
    assert first is other
    assert [(one.start, one.length, one.samples) for one in apart] == [
        (1, 2, True),
        (3, 1, True),
        (4, 1, True),
    ]
    assert [one.token_mask for one in apart] == [b"ab", b"cd", b"ef"]
    assert all(list(one.request.tokens) == [4, 5, 6, 7, 8] for one in apart)
    assert all(one.draft_ids == () for one in apart)
    assert list(request.tokens) == [4, 5, 6]


def test_a_chunk_without_a_mask_has_none_for_any_row() -> None:
    apart = rows_apart([MirroredChunk(new_request(4), 0, 2, True, draft_ids=(7,))])
    assert [one.token_mask for one in apart] == [b"", b""]
