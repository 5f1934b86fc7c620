"""Rows come back as they were kept, in no more memory than was asked for."""

from array import array
from random import Random

import pytest
import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.step_inputs import build_step_inputs
from sgl_pipeline.pp_runner.boundary_log import BoundaryLog
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.requests import GREEDY, Lease
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

SHAPE = ActivationShape(3, torch.float32, torch.device("cpu"))
PAGE_SIZE, NUM_PAGES = 4, 30


def chunk_of(pages: list[int], start: int, length: int) -> MirroredChunk:
    tokens = array("i", range(start + length))
    request = MirroredRequest(0, GREEDY, start + length, tokens, array("i", pages))
    return MirroredChunk(request, start, length, samples=False)


def slots_of(chunks: list[MirroredChunk]) -> torch.Tensor:
    return build_step_inputs(chunks, PAGE_SIZE, SHAPE.device).slots


@pytest.mark.parametrize("capacity", [1, 7, NUM_PAGES])
def test_random_steps_within_the_bound(capacity: int) -> None:
    rng = Random(capacity)
    log = BoundaryLog(capacity, NUM_PAGES, PAGE_SIZE, SHAPE)
    num_bytes = log.num_bytes
    assert num_bytes == capacity * PAGE_SIZE * 3 * 4
    kept: dict[int, dict[int, float]] = {}  # page -> offset -> value, those entered first first
    for _ in range(300):
        pages = rng.sample(range(NUM_PAGES), 3)
        start = rng.randrange(11)
        length = rng.randint(1, 12 - start)
        values = [rng.random() for _ in range(length)]
        chunk = chunk_of(pages, start, length)
        log.begin([chunk])
        log.write(slots_of([chunk]), torch.tensor(values).unsqueeze(1).expand(-1, 3))
        for page in pages[-(-start // PAGE_SIZE) : -(-(start + length) // PAGE_SIZE)]:
            kept.pop(page, None)
            kept[page] = {}
            if len(kept) > capacity:
                del kept[next(iter(kept))]
        for position, value in enumerate(values, start):
            page, offset = pages[position // PAGE_SIZE], position % PAGE_SIZE
            if page in kept:
                kept[page][offset] = value
        for page, rows in kept.items():
            for offset, value in rows.items():
                slot = torch.tensor([page * PAGE_SIZE + offset])
                assert torch.equal(log.read(slot)[0], torch.full((3,), value))
        assert log.num_bytes == num_bytes
    gone = next(page for page in range(NUM_PAGES + 1) if page not in kept)
    if gone < NUM_PAGES:
        with pytest.raises(ProtocolError, match=f"page {gone} "):
            log.read(torch.tensor([gone * PAGE_SIZE]))


def test_rows_stay_where_they_are_when_the_contents_are_told_anew() -> None:
    log = BoundaryLog(2, NUM_PAGES, PAGE_SIZE, SHAPE)
    other = BoundaryLog(2, NUM_PAGES, PAGE_SIZE, SHAPE)
    chunk = chunk_of([8, 9], 0, 8)
    log.begin([chunk])
    log.write(slots_of([chunk]), torch.arange(24.0).view(8, 3))
    log.restore(log._pages.contents())
    assert torch.equal(log.read(slots_of([chunk])), torch.arange(24.0).view(8, 3))
    # A newcomer has the room for the rows, which are computed again.
    other.restore(log._pages.contents())
    other.write(slots_of([chunk]), torch.ones(8, 3))
    assert torch.equal(other.read(slots_of([chunk])), torch.ones(8, 3))


def test_the_page_of_a_lease_is_not_in_the_log() -> None:
    log = BoundaryLog(2, NUM_PAGES, PAGE_SIZE, SHAPE)
    kept, leased = chunk_of([8], 0, 4), chunk_of([9], 4, 4)
    leased.request.lease = Lease("P", 1)
    log.begin([kept, leased])
    log.write(slots_of([kept, leased]), torch.arange(24.0).view(8, 3))
    assert torch.equal(log.read(slots_of([kept])), torch.arange(12.0).view(4, 3))
    with pytest.raises(ProtocolError, match="page 9 "):
        log.read(slots_of([leased]))
