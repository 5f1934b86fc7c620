"""Drawn tokens come to the host beside the kernels that were launched since."""

import pytest
import torch

from sgl_pipeline.pp_runner.cuda.output_staging import DownloadBesideKernels


@pytest.mark.gpu
def test_a_copy_waits_for_its_kernels_and_not_for_later_ones() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    device = torch.device("cuda")
    download = DownloadBesideKernels(device)
    work = torch.randn(8192, 8192, device=device)
    copies, expected = [], []
    for step in range(20):
        for _ in range(10):
            work = (work @ work).tanh()
        # The product has no part in the sum, which must wait for it all the same.
        numbers = (0 * work[0, :64].nan_to_num()).long() + step
        copies.append(download([numbers, numbers[:0]]))
        expected.append(step)
        del numbers
    later = torch.cuda.Event()
    later.record()
    assert not copies[-1].is_ready()
    for copy, step in zip(copies, expected, strict=True):
        numbers, none = copy.tensors()
        assert copy.is_ready()
        assert numbers.tolist() == [step] * 64 and none.tolist() == []
        if step == 0:
            assert not later.query(), "the first copy waited for all steps"


@pytest.mark.gpu
def test_work_beside_the_kernels_does_not_wait_for_them() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    device = torch.device("cuda")
    download = DownloadBesideKernels(device)
    logits = torch.randn(64, 32_000, device=device)
    likeliest = logits.argmax(dim=-1)
    copy = download([likeliest])
    work = torch.randn(8192, 8192, device=device)
    for _ in range(100):
        work = (work @ work).tanh()
    later = torch.cuda.Event()
    later.record()
    with download.beside_kernels(logits):
        again = logits.argmax(dim=-1).tolist()
    assert not later.query(), "it waited for the later kernels"
    assert again == copy.tensors()[0].tolist()
