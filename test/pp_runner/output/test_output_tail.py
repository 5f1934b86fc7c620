"""What the last stage draws is the same whether it comes at once or late, drawn again or not."""

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sgl_pipeline.pp_runner.base.download import NoDownload
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs, build_step_inputs
from sgl_pipeline.pp_runner.output.output_tail import Outputs, OutputTail
from sgl_pipeline.pp_runner.output.sampler import UNDECIDED, Sampler
from sgl_pipeline.requests import GREEDY, LogprobSpec, SamplingSpec
from sgl_pipeline.wire.step_order import INT32, MirroredChunk, MirroredRequest

CPU = torch.device("cpu")
VOCAB_SIZE = 3000  # more than the sampler's candidates
FLAT = SamplingSpec(top_p=0.99, temperature=2.0)


class LateDownload:
    """A `Download` and its `HostCopy`: arrived when a test says so."""

    def __init__(self) -> None:
        self.has_arrived = False
        self.is_beside = False
        self.read: tuple[torch.Tensor, ...] = ()
        self._copies: tuple[torch.Tensor, ...] = ()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> "LateDownload":
        self._copies = tuple(tensor.clone() for tensor in tensors)
        return self

    def is_ready(self) -> bool:
        return self.has_arrived

    def tensors(self) -> tuple[torch.Tensor, ...]:
        self.has_arrived = True
        return self._copies

    @contextlib.contextmanager
    def beside_kernels(self, *read: torch.Tensor) -> Iterator[None]:
        self.read += read
        self.is_beside = True
        yield
        self.is_beside = False


class RowsStayBeside(TorchDispatchMode):
    """Fails where a whole row of the vocabulary is read behind the steps that came since."""

    def __init__(self, download: LateDownload) -> None:
        super().__init__()
        self._download = download
        self.num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (VOCAB_SIZE,):
                assert self._download.is_beside, func
                self.num_reads += 1
        return func(*args, **(kwargs or {}))


def chunks_of(
    specs: Sequence[SamplingSpec], logprobs: Sequence[LogprobSpec | None]
) -> list[MirroredChunk]:
    """A chunk of three tokens for each, of a prompt of five; all sample."""
    return [
        MirroredChunk(
            MirroredRequest(
                handle, spec, 5, array(INT32, range(5)), array(INT32, [handle]), wanted
            ),
            start=2,
            length=3,
            samples=True,
        )
        for handle, (spec, wanted) in enumerate(zip(specs, logprobs, strict=True))
    ]


def inputs_of(chunks: Sequence[MirroredChunk]) -> StepInputs:
    return build_step_inputs(chunks, 16, CPU)


def rows_for(chunks: Sequence[MirroredChunk]) -> torch.Tensor:
    """Logits of every row of the step, some flat and some steep."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(3 * len(chunks), VOCAB_SIZE, generator=generator)
    return rows * torch.tensor([0.1, 3.0, 0.5])[torch.arange(len(rows)) // 3 % 3][:, None]


def draw_with(download: Any, chunks: Sequence[MirroredChunk], rows: torch.Tensor) -> Any:
    """What is pending. The residual stream stands for the logits: the head changes nothing."""
    tail = OutputTail(lambda hidden: hidden, CPU, download)
    tail.plan(chunks, inputs_of(chunks))
    return tail.draw(rows)


@pytest.mark.parametrize(
    "logprobs",
    [
        [None] * 6,
        [LogprobSpec(4, 3, (1, 7))] * 6,
        [LogprobSpec(2, 2), None, LogprobSpec(4, 0, (5,)), None, LogprobSpec(3, 4), None],
    ],
    ids=["none", "all", "some, of prompts too"],
)
def test_rows_that_are_drawn_again_get_their_tokens_and_numbers(
    logprobs: list[LogprobSpec | None],
) -> None:
    specs = [FLAT, GREEDY, SamplingSpec(), SamplingSpec(top_p=0.9, seed=4), FLAT, GREEDY]
    chunks = chunks_of(specs, logprobs)
    rows, inputs = rows_for(chunks), inputs_of(chunks)
    logits = rows[inputs.sample_rows]
    expected_ids = Sampler().sample(logits, specs, inputs.sample_positions)
    download = LateDownload()
    pending = draw_with(download, chunks, rows.clone())
    assert not pending.is_ready()
    drawn_ids = download._copies[0].tolist()
    assert UNDECIDED in drawn_ids and set(drawn_ids) != {UNDECIDED}
    with RowsStayBeside(download) as reads:
        token_ids, numbers = pending.result()
    assert reads.num_reads > 0
    assert any(torch.equal(tensor, logits) for tensor in download.read)
    assert list(token_ids) == expected_ids
    wanted = [row for row, spec in enumerate(logprobs) if spec is not None]
    assert len(numbers) == len(wanted)
    for row, found in zip(wanted, numbers, strict=True):
        temperature = 1.0 if specs[row].is_greedy else specs[row].temperature
        expected = (logits[row] / temperature).log_softmax(-1)[token_ids[row]]
        assert array("f", found.chosen)[-1] == pytest.approx(float(expected), rel=1e-5)


def test_what_comes_late_is_what_comes_at_once() -> None:
    """Decided rows, undecided ones, and those of prompts, to the last bit."""
    specs = [FLAT, GREEDY, SamplingSpec(temperature=0.5), SamplingSpec(top_k=3), FLAT]
    logprobs = [LogprobSpec(2, 3, (9, 2)), None, LogprobSpec(3, 1), LogprobSpec(4), None]
    chunks = chunks_of(specs, logprobs)
    rows = rows_for(chunks)
    at_once: Outputs = draw_with(NoDownload(), chunks, rows.clone()).result()
    late: Outputs = draw_with(LateDownload(), chunks, rows.clone()).result()
    assert at_once == late
    assert [numbers.num_rows for numbers in late[1]] == [3, 2, 1]


def test_decided_rows_look_at_no_logits_again() -> None:
    chunks = chunks_of([GREEDY, SamplingSpec()], [LogprobSpec(2, 1)] * 2)
    download = LateDownload()
    pending = draw_with(download, chunks, rows_for(chunks))
    assert pending.logits is None, "a pending step keeps logits that nothing needs"
    with RowsStayBeside(download) as reads:
        pending.result()
    assert reads.num_reads == 0


def test_on_a_cpu_tokens_are_there_when_they_are_drawn() -> None:
    chunks = chunks_of([FLAT], [None])
    assert draw_with(NoDownload(), chunks, rows_for(chunks)).is_ready()


def test_a_step_that_samples_nothing_gives_nothing() -> None:
    (chunk,) = chunks_of([GREEDY], [LogprobSpec(9, 1)])
    unfinished = MirroredChunk(chunk.request, 2, 2, samples=False)
    assert draw_with(NoDownload(), [unfinished], torch.zeros(2, VOCAB_SIZE)).result()[0] == ()
