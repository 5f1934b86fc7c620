"""What runs on several streams at once waits for what it must, and no memory is used again early.

The real classes run over emulated streams, which find a read or a reuse that nothing puts in order
(`support/emulated_streams.py`). Each way of forgetting a wait is a race in its test.
"""

import gc
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.emulated_streams import EmulatedStreams, Event, RaceError, Stream
from support.numberless_stage import META, WeightsWithoutNumbers

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.step_inputs import build_step_inputs
from sgl_pipeline.pp_runner.cuda.graph_recorder import CudaGraphRecorder
from sgl_pipeline.pp_runner.cuda.graphed_layers import GraphedLayers
from sgl_pipeline.pp_runner.cuda.input_staging import (
    CopyBesideKernels,
    CopyBetweenKernels,
    InputStaging,
)
from sgl_pipeline.pp_runner.cuda.output_staging import DownloadBesideKernels
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import FlashInferAttention
from sgl_pipeline.pp_runner.flashinfer.flashinfer_parts import FlashInferParts
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.layer_moves.page_rows import CELL_BYTES, PageRows
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.distributed_link import DistributedLink
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import model_spec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes, PageCopies
from sgl_pipeline.pp_runner.page_store.staged_pages import LOAD_BUFFERS, StagedPool
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.wire.step_order import INT32, MirroredChunk, MirroredRequest

PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 4, 24, 2
SPEC = model_spec(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
    }
)
SHAPES = SPEC.attention_shapes(PAGE_SIZE, torch.bfloat16, META)
SHAPE = SHAPES[0]
Work = Callable[[EmulatedStreams], None]


def forget(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Has a call of torch's do nothing."""
    classes: dict[str, type] = {
        "wait_stream": Stream,
        "wait_event": Stream,
        "synchronize": Event,
        "record": Event,
        "record_stream": torch.Tensor,
    }
    return lambda patch: patch.setattr(classes[name], name, lambda *arguments: None)


def races_of(work: Work, broken: Callable[[pytest.MonkeyPatch], None] | None = None) -> str:
    streams = EmulatedStreams()
    try:
        with streams.watching(), pytest.MonkeyPatch.context() as patch:
            if broken is not None:
                broken(patch)
            work(streams)
            gc.collect()
    except RaceError as error:
        return str(error)
    return ""


def upload_steps(streams: EmulatedStreams) -> None:
    """The index tensors of steps that a kernel reads: more steps than there are buffers, and one
    that outgrows its buffer."""
    staging = InputStaging(CopyBetweenKernels(META))
    for step in range(7):
        tokens, slots = staging([np.arange(8), np.arange(100 if step == 5 else step)])
        streams.launch("a kernel of the step", [tokens, slots])
        del tokens, slots


def download_steps(streams: EmulatedStreams) -> None:
    """Drawn tokens that the host reads a step later; a row is drawn again from its logits."""
    download = DownloadBesideKernels(META)
    pending: list[Any] = []
    for _ in range(4):
        logits = torch.empty(4, 50, device=META)
        streams.launch("the head", (), [logits])
        drawn = logits.argmax(dim=-1)
        pending.append((logits, download([drawn])))
        del drawn, logits
        if len(pending) == 2:
            logits, copy = pending.pop(0)
            assert not copy.is_ready()
            (tokens,) = copy.tensors()
            assert len(tokens.tolist()) == 4
            with download.beside_kernels(logits):
                again = logits.argmax(dim=-1)
            del again, logits


def move_pages(streams: EmulatedStreams) -> None:
    """Pages of a layer leave and come while steps write to the pool."""
    pool = KvPool([0], SHAPES, NUM_PAGES)
    rows = PageRows(pool, None, DownloadBesideKernels(META), CopyBesideKernels(META))
    for _ in range(3):
        streams.launch("a step", (), pool.pages(0))
        leaving = rows.pack(0, [1, 2])
        streams.launch("a step", (), pool.pages(0))
        (read,) = leaving.tensors()
        read.tolist()
        arrived = torch.zeros(2, rows.row_bytes(0), dtype=torch.uint8).view(-1, CELL_BYTES)
        rows.unpack(arrived)
        arrived.fill_(1)  # the link's buffer, used again
        streams.launch("a step", pool.pages(0))


def next_buffer(copies: PageCopies) -> tuple[Bytes, torch.Tensor]:
    """What `PageCopies.buffer` gives, and the tensor of that memory, as which the host uses it."""
    content = copies.buffer()
    memory: torch.Tensor = copies._current.memory  # type: ignore[attr-defined]
    return content, memory


def save_pages(streams: EmulatedStreams) -> None:
    """Pages of layer 0 go to a store beside steps that write elsewhere, and are written anew when
    that is reported."""
    pool = KvPool(range(2), SHAPES, NUM_PAGES)
    pages = StagedPool(pool).pages_of(range(2))
    copies = pages.copies_out(2 * SHAPE.page_bytes)
    for _ in range(2):
        streams.launch("a step", (), pool.pages(0))
        steps = pages.steps_so_far()
        streams.launch("a later step", (), pool.pages(1))
        copies.begin(steps)
        for page in range(3):
            content, memory = next_buffer(copies)
            copies.copy(0, page, content, 0)
            copies.copy(0, page + 1, content, SHAPE.page_bytes)
            copies.wait()
            memory.tolist()


def load_pages(streams: EmulatedStreams) -> None:
    """Pages of layer 0, which steps have used, are filled and then read by steps."""
    pool = KvPool(range(2), SHAPES, NUM_PAGES)
    pages = StagedPool(pool).pages_of(range(2))
    copies = pages.copies_in(2 * SHAPE.page_bytes)
    for _ in range(2):
        streams.launch("a step", pool.pages(0))
        steps = pages.steps_so_far()
        streams.launch("a later step", (), pool.pages(1))
        copies.begin(steps)
        for page in range(2 * LOAD_BUFFERS):
            content, memory = next_buffer(copies)
            memory.fill_(page)
            copies.copy(0, page, content, 0)
            copies.copy(0, page + 1, content, SHAPE.page_bytes)
        copies.wait()
        streams.launch("a step with what was loaded", pool.pages(0))


def end_transfers(streams: EmulatedStreams) -> None:
    """A load and a save are given up, and steps write their pages; then transfers go on."""
    pool = KvPool(range(2), SHAPES, NUM_PAGES)
    staged = StagedPool(pool)
    for _ in range(2):
        pages = staged.pages_of(range(2))
        size = SHAPE.page_bytes
        for copies, layer in ((pages.copies_in(size), 0), (pages.copies_out(size), 1)):
            copies.begin(pages.steps_so_far())
            copies.copy(layer, 1, copies.buffer(), 0)
        pages.let_steps_follow()
        streams.launch("a step", (), [*pool.pages(0), *pool.pages(1)])


class PlanWrapper:
    """As FlashInfer's: a plan is copied out of a page-locked buffer while the host goes on."""

    def __init__(self, streams: EmulatedStreams, buffer: torch.Tensor | None = None) -> None:
        self._streams = streams
        self._host = torch.zeros(64, dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(64, dtype=torch.int32, device=META)
        self._buffer = buffer  # for graphs: where the page indices must be
        self._indices: torch.Tensor | None = None

    def plan(self, *arrays: Any, **options: Any) -> None:
        self._host.fill_(1)
        self._device.copy_(self._host, non_blocking=True)
        (indices,) = (each for each in arrays if getattr(each, "device", None) == META)
        if self._buffer is not None:
            indices = self._buffer[: len(indices)].copy_(indices)
        self._indices = indices

    def run(self, q: torch.Tensor, pages: Any, *, out: torch.Tensor) -> torch.Tensor:
        assert self._indices is not None
        self._streams.launch("attention", [q, *pages, self._device, self._indices], [out])
        return out


def attention_on(streams: EmulatedStreams) -> FlashInferAttention:
    def open_parts(shape: AttentionShape, prefill_kernels: str) -> FlashInferParts:
        return FlashInferParts(
            PlanWrapper(streams),
            PlanWrapper(streams),
            torch.cuda.Event,
            lambda num_rows, indices: PlanWrapper(streams, indices),
        )

    return FlashInferAttention(SHAPE, open_parts=open_parts)


def chunk(handle: int, start: int, length: int = 1) -> MirroredChunk:
    pages = range(6 * handle, 6 * handle + 6)
    tokens = array(INT32, range(24))
    return MirroredChunk(
        MirroredRequest(handle, GREEDY, 24, tokens, array(INT32, pages)), start, length, True
    )


# Prefill, decodes and both, from a graph and too long for one.
STEPS = (
    [chunk(0, 0, 10)],
    [chunk(0, 10), chunk(1, 0)],
    [chunk(0, 11), chunk(1, 1)],
    [chunk(0, 12), chunk(1, 2, 5)],
    [chunk(0, 13), chunk(1, 7, 16)],
    [chunk(0, 14), chunk(1, 23)],
)


class Nccl:
    """torch.distributed as ProcessGroupNCCL has it: each boundary has a stream, which waits for
    what was launched before; a tensor is the caller's to keep until the work has been waited for.
    """

    def __init__(self, streams: EmulatedStreams) -> None:
        self._streams = streams
        self._of_group = {group: streams.stream(f"NCCL's of {group}") for group in ("in", "out")}

    @property
    def module(self) -> Any:
        groups = iter(("in", "out"))
        return SimpleNamespace(
            init_process_group=lambda *given, **options: None,
            new_group=lambda ranks, timeout: next(groups),
            isend=self._isend,
            recv=self._recv,
            FileStore=lambda path, num_stages: None,
            Store=object,
            destroy_process_group=lambda: None,
        )

    def _isend(self, rows: torch.Tensor, rank: int, group: str) -> Any:
        stream, over = self._of_group[group], torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._streams.launch("a send", [rows])
        over.record(stream)
        return SimpleNamespace(
            is_completed=over.query, wait=lambda: torch.cuda.current_stream().wait_event(over)
        )

    def _recv(self, rows: torch.Tensor, rank: int, group: str) -> None:
        stream = self._of_group[group]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._streams.launch("a receive", (), [rows])
        torch.cuda.current_stream().wait_stream(stream)


def run_steps(streams: EmulatedStreams) -> None:
    """A stage between two others: uploads, graphs and eager steps, sends and receives, with a
    switch to another epoch in the middle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed", Nccl(streams).module)
        rows_shape = ActivationShape(SPEC.hidden_size, torch.bfloat16, META)
        link = DistributedLink(rows_shape, "nccl", "a file", 1, 3)
        layers = range(NUM_LAYERS)
        model = NativeStageModel.build(
            SPEC,
            WeightsWithoutNumbers(),
            device=META,
            kernels=TorchKernels(),
            layers=layers,
            is_first=False,
            is_last=False,
        )
        held = HeldLayers(model, KvPool(layers, SHAPES, NUM_PAGES, has_padding_page=True))
        staging = InputStaging(CopyBetweenKernels(META))
        step_layers = GraphedLayers(
            held,
            attention_on(streams),
            SHAPE,
            CudaGraphRecorder(META),
            decode_rows=(1, 2),
            mixed_rows=(8, 16),
        )
        step_layers.prepare(0, layers)
        step_layers.record_all()
        for epoch in (0, 1):
            for number, chunks in enumerate(STEPS):
                inputs = build_step_inputs(chunks, PAGE_SIZE, META, staging)
                step_layers.plan(epoch, layers, inputs)
                hidden = link.receive(number, inputs.num_tokens)
                link.send(number, step_layers.run(inputs, hidden))
                del inputs, hidden
        link.close()


def without_a_copy_of_the_output(patch: pytest.MonkeyPatch) -> None:
    real = GraphedLayers.run

    def run(self: GraphedLayers, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        rows = real(self, inputs, hidden)
        return rows if self._planned is None else self._planned.output[: inputs.num_tokens]

    patch.setattr(GraphedLayers, "run", run)


def with_rows_that_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    real = DistributedLink.send

    def send(self: DistributedLink, step_id: int, hidden: torch.Tensor) -> None:
        real(self, step_id, hidden)
        self._sending.clear()

    patch.setattr(DistributedLink, "send", send)


@pytest.fixture(autouse=True)
def in_inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    "work",
    [
        *(upload_steps, download_steps, move_pages, run_steps),
        *(save_pages, load_pages, end_transfers),
    ],
)
def test_everything_waits_for_what_it_must(work: Work) -> None:
    assert races_of(work) == ""


@pytest.mark.parametrize(
    ("work", "broken", "race"),
    [
        (upload_steps, forget("synchronize"), "copy_ of the host writes host memory"),
        (upload_steps, forget("record"), "copy_ of the host writes host memory"),
        (download_steps, forget("wait_stream"), "copy_ of stream 1 reads"),
        (download_steps, forget("record_stream"), "of the computing stream is free, and stream 1"),
        (download_steps, forget("synchronize"), "tolist of the host reads host memory"),
        (move_pages, forget("wait_stream"), "reads"),
        (move_pages, forget("record_stream"), "is free"),
        (move_pages, forget("synchronize"), "tolist of the host reads"),
        (save_pages, forget("wait_event"), "copy_ of stream 2 reads"),
        (save_pages, forget("synchronize"), "tolist of the host reads host memory"),
        (save_pages, forget("record"), "copy_ of stream 2 reads"),
        (load_pages, forget("wait_event"), "copy_ of stream 1 writes"),
        (load_pages, forget("synchronize"), "fill_ of the host writes host memory"),
        (load_pages, forget("record"), "a step with what was loaded of the computing stream reads"),
        (end_transfers, forget("wait_stream"), "waits for stream 1"),
        (end_transfers, forget("wait_stream"), "waits for stream 2"),
        (run_steps, forget("wait_stream"), "of the computing stream reads"),
        (run_steps, forget("synchronize"), "fill_ of the host writes host memory"),
        (run_steps, without_a_copy_of_the_output, "of the computing stream writes"),
        (run_steps, with_rows_that_are_not_kept, "is free, and NCCL's of out"),
    ],
)
def test_what_is_forgotten_is_a_race(
    work: Work, broken: Callable[[pytest.MonkeyPatch], None], race: str
) -> None:
    assert race in races_of(work, broken)


def test_a_layer_is_copied_to_its_place_in_a_buffer() -> None:
    """In a CPU's memory, where copies are over at once."""
    shapes = SPEC.attention_shapes(PAGE_SIZE, torch.bfloat16, torch.device("cpu"))
    pool, size = KvPool(range(2), shapes, NUM_PAGES), shapes[0].page_bytes
    for layer in range(2):
        for part in pool.rows(layer):
            part.copy_(torch.randint(256, part.shape, dtype=torch.uint8))

    def content_of(layer: int, page: int) -> bytes:
        return b"".join(part[page].numpy().tobytes() for part in pool.rows(layer))

    with EmulatedStreams().watching():
        pages = StagedPool(pool).pages_of(range(2))
        saves, loads = pages.copies_out(2 * size), pages.copies_in(2 * size)
        saved, loaded = saves.buffer(), loads.buffer()
        for layer, start in ((0, size), (1, 0)):
            saves.copy(layer, 3, saved, start)
        loaded[:] = saved
        for layer, start in ((0, size), (1, 0)):
            loads.copy(layer, 5, loaded, start)
    assert saved.tobytes() == content_of(1, 3) + content_of(0, 3)
    for layer in range(2):
        assert content_of(layer, 5) == content_of(layer, 3)


@pytest.mark.parametrize("work", [save_pages, load_pages, end_transfers])
def test_transfers_wait_for_copies_and_never_for_a_stream(work: Work) -> None:
    """Neither for the device, nor in a copy that is not asynchronous."""

    def refuse(patch: pytest.MonkeyPatch) -> None:
        def synchronize(stream: Stream) -> None:
            raise AssertionError(f"the host waits for all of {stream.name}")

        patch.setattr(Stream, "synchronize", synchronize)

    assert races_of(work, refuse) == ""
