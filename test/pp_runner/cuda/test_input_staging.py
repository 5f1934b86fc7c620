"""A step's index tensors cross together and come apart as they were."""

from array import array

import numpy as np
import pytest
import torch
from support.fake_flashinfer import Recorder

from sgl_pipeline.pp_runner.base.step_inputs import build_step_inputs
from sgl_pipeline.pp_runner.cuda.input_staging import (
    CopyBesideKernels,
    CopyBetweenKernels,
    InputStaging,
)
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.wire.step_order import INT32, MirroredChunk, MirroredRequest

CPU = torch.device("cpu")


def chunks(seed: int = 0) -> list[MirroredChunk]:
    requests = [
        MirroredRequest(
            handle, GREEDY, 9, array(INT32, range(seed, seed + 9)), array(INT32, [handle, 5])
        )
        for handle in range(3)
    ]
    return [
        MirroredChunk(requests[0], 8, 1, True),
        MirroredChunk(requests[1], 2, 5, False),
        MirroredChunk(requests[2], 0, 3, True),
    ]


def test_one_copy_brings_all_that_was_asked_for() -> None:
    copied: list[torch.Tensor] = []

    def copy(values: torch.Tensor) -> torch.Tensor:
        copied.append(values)
        return values

    staged = build_step_inputs(chunks(), 8, CPU, InputStaging(copy))
    plain = build_step_inputs(chunks(), 8, CPU)
    assert len(copied) == 1
    for name in ("token_ids", "positions", "slots", "sample_rows"):
        assert torch.equal(getattr(staged, name), getattr(plain, name)), name
    pages = staged.layout.page_indices_on(CPU)
    assert pages is staged.layout.uploaded_pages
    assert pages.dtype == torch.int32
    assert torch.equal(pages, plain.layout.page_indices)


@pytest.mark.parametrize("num_pages", range(4))
def test_page_numbers_cross_whole_whether_odd_or_even(num_pages: int) -> None:
    positions, pages = np.arange(5) << 40, np.arange(num_pages, dtype=np.int32) - 2
    arrived = InputStaging(lambda values: values)([positions, pages])
    assert [part.tolist() for part in arrived] == [positions.tolist(), pages.tolist()]
    assert [part.dtype for part in arrived] == [torch.int64, torch.int32]


def test_a_buffer_brings_what_it_is_given_whatever_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in a CPU's memory, whose copies are over at once; for their order see
    `test_stream_order.py`."""
    empty = torch.empty

    def empty_unpinned(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        return empty(size, dtype=dtype)

    monkeypatch.setattr("torch.empty", empty_unpinned)
    monkeypatch.setattr("torch.cuda.Event", Recorder)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    copy = CopyBetweenKernels(CPU)
    for step, count in enumerate((3, 8, 1, 40, 2, 7, 90, 0, 5)):
        values = torch.arange(count) + 1000 * step
        assert torch.equal(copy(values), values)


@pytest.mark.gpu
@pytest.mark.parametrize("copy", [CopyBesideKernels, CopyBetweenKernels])
def test_copies_neither_overtake_kernels_nor_are_overtaken(
    copy: type[CopyBesideKernels] | type[CopyBetweenKernels],
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    device = torch.device("cuda")
    staging = InputStaging(copy(device))
    work = torch.randn(4096, 4096, device=device)
    sums = []
    for step in range(50):
        work = (work @ work).tanh()
        staged = build_step_inputs(chunks(step), 8, device, staging)
        sums.append(staged.token_ids.sum() + 0 * work.sum().nan_to_num().long())
    expected = [int(build_step_inputs(chunks(step), 8, CPU).token_ids.sum()) for step in range(50)]
    assert torch.stack(sums).tolist() == expected
