"""A step from graphs is the step run kernel by kernel, and touches no page that is not its own.

On CPU graphs are emulated and FlashInfer stood in for (see test/support); on a GPU both are real.
"""

import gc
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from support.emulated_graphs import EmulatedCuda, EmulatedRecorder
from support.fake_flashinfer import FakeFlashInferFunctions, Fakes
from support.real_flashinfer import EmulatedCard, emulated_card
from support.scaled_products import require_scaled_products

from benchmark.gpu.shapes import spec_of
from sgl_pipeline.pp_runner.attention.attention_backend import SameAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs, build_step_inputs
from sgl_pipeline.pp_runner.cuda.captured_step import StepBuffers
from sgl_pipeline.pp_runner.cuda.gpu_memory import layer_row_bytes
from sgl_pipeline.pp_runner.cuda.graph_recorder import CudaGraphRecorder, GraphRecorder
from sgl_pipeline.pp_runner.cuda.graphed_layers import (
    DECODE_ROWS,
    MIXED_ROWS,
    GraphedLayers,
    graph_memory_bytes,
    graph_rows_of,
    mixed_rows_of,
)
from sgl_pipeline.pp_runner.cuda.input_staging import CopyBetweenKernels, InputStaging
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import (
    FlashInferAttention,
    workspace_bytes,
)
from sgl_pipeline.pp_runner.flashinfer.flashinfer_kernels import FlashInferKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels
from sgl_pipeline.pp_runner.layer_kernels.row_rounding import TorchRowRounding
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ExpertSpec, model_spec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.step_layers import EagerLayers
from sgl_pipeline.pp_runner.weights.checkpoint import DummyWeights
from sgl_pipeline.pp_runner.weights.quantization_config import choose_quantization
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.wire.step_order import INT32, MirroredChunk, MirroredRequest

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 4, 24, 3
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


@dataclass
class Stage:
    """The same stage twice."""

    eager: EagerLayers
    eager_held: HeldLayers
    graphed: GraphedLayers
    graphed_held: HeldLayers
    recorder: GraphRecorder
    device: torch.device
    upload: InputStaging

    @property
    def eager_pool(self) -> KvPool:
        return self.eager_held.kv_pool

    @property
    def graphed_pool(self) -> KvPool:
        return self.graphed_held.kv_pool

    def step(
        self, chunks: Sequence[MirroredChunk], epoch: int = 0, layers: range = range(NUM_LAYERS)
    ) -> torch.Tensor:
        """Runs a step both ways; the rows, and what is in the pools, must agree."""
        inputs = build_step_inputs(chunks, PAGE_SIZE, self.device, self.upload)
        hidden = self.upstream(inputs)
        outputs = []
        for way in (self.eager, self.graphed):
            way.plan(epoch, layers, inputs)
            outputs.append(way.run(inputs, hidden))
        expected, found = outputs
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        for layer in self.eager_pool.layers:
            for mine, theirs in zip(
                self.graphed_pool.pages(layer), self.eager_pool.pages(layer), strict=True
            ):
                torch.testing.assert_close(
                    mine[:NUM_PAGES].float(), theirs[:NUM_PAGES].float(), rtol=2e-2, atol=2e-2
                )
        return found

    def record_all(self, epoch: int = 0, layers: range = range(NUM_LAYERS)) -> None:
        """As a stage does when it starts."""
        self.graphed.prepare(epoch, layers)
        self.graphed.record_all()

    def upstream(self, inputs: StepInputs) -> torch.Tensor | None:
        if self.eager_held.model.is_first:
            return None
        rows = torch.randn(inputs.num_tokens, 64, generator=torch.Generator().manual_seed(1))
        return rows.to(self.device, torch.bfloat16)


def make_stage(
    is_first: bool = True,
    device: torch.device = CPU,
    kernels: LayerKernels | None = None,
    card: EmulatedCard | None = None,
    *,
    cuda: EmulatedCuda | None = None,
    spec: DecoderSpec = SPEC,
    kv_cache_dtype: str = "auto",
) -> Stage:
    shapes = spec.attention_shapes(PAGE_SIZE, torch.bfloat16, device, kv_cache_dtype)
    shape = shapes[0]
    held = [
        HeldLayers(
            NativeStageModel.build(
                spec,
                DummyWeights(torch.bfloat16, device),
                device=device,
                kernels=kernels or TorchKernels(),
                layers=range(NUM_LAYERS),
                is_first=is_first,
                is_last=False,
            ),
            KvPool(range(NUM_LAYERS), shapes, NUM_PAGES, has_padding_page=True),
        )
        for _ in range(2)
    ]
    recorder: GraphRecorder
    if device.type == "cuda":
        attentions = [FlashInferAttention(shape) for _ in range(2)]
        recorder = CudaGraphRecorder(device)
    elif card is not None:
        attentions = [FlashInferAttention(shape) for _ in range(2)]
        recorder = card.graphs = EmulatedRecorder()
    elif cuda is not None:
        recorder = CudaGraphRecorder(device)
        attentions = [Fakes(shape).attention, Fakes(shape, cuda).attention]
    else:
        recorder = EmulatedRecorder()
        attentions = [Fakes(shape).attention, Fakes(shape, recorder).attention]
    graphed = GraphedLayers(
        held[1],
        attentions[1],
        shape,
        recorder,
        decode_rows=(1, 2, 4),
        mixed_rows=(8, 16),
    )
    eager = EagerLayers(held[0], SameAttention(attentions[0]))
    upload = InputStaging(CopyBetweenKernels(device) if device.type == "cuda" else torch.clone)
    return Stage(eager, held[0], graphed, held[1], recorder, device, upload)


def request(handle: int, pages: Sequence[int], num_tokens: int = 40) -> MirroredRequest:
    tokens = array(INT32, [(handle * 31 + position * 7) % 300 for position in range(num_tokens)])
    return MirroredRequest(handle, GREEDY, num_tokens, tokens, array(INT32, pages))


def serve(stage: Stage) -> None:
    """Prefills, decodes, both in a step, and what fits no graph."""
    first, second, third = (request(i, range(6 * i, 6 * i + 6)) for i in range(3))

    def chunk(one: MirroredRequest, start: int, length: int = 1) -> MirroredChunk:
        return MirroredChunk(one, start, length, True)

    stage.step([chunk(first, 0, 10)])
    stage.step([chunk(first, 10), chunk(second, 0, 5)])
    stage.step([chunk(first, 11), chunk(second, 5)])
    stage.step([chunk(first, 12), chunk(second, 6), chunk(third, 0)])
    stage.step([chunk(first, 13)])
    stage.step([chunk(second, 7), chunk(third, 1, 14)])
    stage.step([chunk(third, 15, 3), chunk(second, 8, 2), chunk(first, 14)])
    stage.step([chunk(first, 15, 6), chunk(second, 10, 14)])  # 20 rows: no graph
    stage.step([chunk(one, 21) for one in (third, first, second)])


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("at_once", [True, False], ids=["recorded first", "when needed"])
def test_every_kind_of_step_is_the_same_from_graphs(is_first: bool, at_once: bool) -> None:
    stage = make_stage(is_first)
    if at_once:
        stage.record_all()
    serve(stage)


@pytest.mark.parametrize("quantization", ["fp8", "w8a8_int8"])
def test_weights_and_pages_of_eight_bits_run_from_graphs_too(quantization: str) -> None:
    if quantization == "fp8":
        require_scaled_products()
    chosen = choose_quantization(quantization, None, SPEC.names.head)
    stage = make_stage(
        kernels=FlashInferKernels(FakeFlashInferFunctions, TorchRowRounding, tried_rows=(1, 16)),
        spec=replace(SPEC, quantization=chosen),
        kv_cache_dtype="fp8_e4m3",
    )
    assert stage.graphed_pool.pages(0)[0].dtype == torch.float8_e4m3fn
    serve(stage)


@pytest.mark.parametrize("is_first", [True, False])
def test_flashinfers_layer_kernels_run_from_graphs_too(is_first: bool) -> None:
    """They keep a step's tables from the first layer to the last."""
    serve(make_stage(is_first, kernels=FlashInferKernels(FakeFlashInferFunctions)))


def test_flashinfers_own_python_runs_a_stage_from_graphs() -> None:
    with emulated_card() as card:
        stage = make_stage(False, kernels=FlashInferKernels(), card=card)
        stage.record_all()
        serve(stage)


def test_recording_touches_no_request() -> None:
    stage = make_stage()
    for pool in (stage.eager_pool, stage.graphed_pool):
        for layer in pool.layers:
            for pages in pool.pages(layer):
                pages.copy_(torch.arange(pages.numel()).view_as(pages) % 7)
    stage.record_all()
    for layer in stage.eager_pool.layers:
        for mine, theirs in zip(
            stage.graphed_pool.pages(layer), stage.eager_pool.pages(layer), strict=True
        ):
            assert torch.equal(mine[:NUM_PAGES], theirs[:NUM_PAGES])


def test_decodes_are_one_graph_and_mixed_steps_end_theirs_at_attention() -> None:
    stage = make_stage()
    assert isinstance(stage.recorder, EmulatedRecorder)
    stage.step([MirroredChunk(request(0, range(6)), 5, 1, True)])
    assert len(stage.recorder.graphs) == 1
    stage.step([MirroredChunk(request(0, range(6)), 6, 7, True)])
    assert len(stage.recorder.graphs) == 1 + NUM_LAYERS + 1
    assert all(graph.num_replays == 1 for graph in stage.recorder.graphs)


def test_a_graph_is_recorded_once_and_anew_for_another_epoch() -> None:
    stage = make_stage()
    assert isinstance(stage.recorder, EmulatedRecorder)
    chunks = [MirroredChunk(request(0, range(6)), 5, 1, True)]
    counts = []
    for epoch in (0, 0, 1, 1):
        stage.step(chunks, epoch)
        counts.append(len(stage.recorder.graphs))
    assert counts == [1, 1, 2, 2]


def test_graphs_are_those_of_the_newest_plan_and_older_steps_run_without() -> None:
    stage = make_stage(is_first=False)
    assert isinstance(stage.recorder, EmulatedRecorder)
    chunks = [MirroredChunk(request(0, range(6)), 5, 1, True)]
    stage.record_all()
    older = list(stage.recorder.graphs)
    stage.graphed.prepare(1, range(1, 3))
    of_three_layers = stage.step(chunks)
    assert not any(graph.num_replays for graph in older)
    assert stage.recorder.graphs == older, "a switch waits for no recording"
    of_two_layers = stage.step(chunks, 1, range(1, 3))
    (newer,) = stage.recorder.graphs[len(older) :]
    assert newer.num_replays == 1
    assert not torch.equal(of_three_layers, of_two_layers)


def two_epochs(stage: Stage) -> None:
    """The switch of a layer move, whose last step of the old plan had no graph."""
    first, second = (request(i, range(6 * i, 6 * i + 6)) for i in range(2))
    stage.record_all()
    stage.step([MirroredChunk(first, 0, 1, True), MirroredChunk(second, 0, 1, True)])
    stage.step([MirroredChunk(first, 1, 9, True), MirroredChunk(second, 1, 11, True)])  # 20 rows
    layers = range(1, NUM_LAYERS)
    stage.graphed.prepare(1, layers)
    stage.step([MirroredChunk(first, 10, 1, True)], 1, layers)
    stage.step([MirroredChunk(first, 11, 7, True), MirroredChunk(second, 12, 1, True)], 1, layers)


def test_graphs_of_an_epoch_share_a_pool_which_a_later_one_does_not_use() -> None:
    cuda = EmulatedCuda()
    with cuda.installed():
        stage = make_stage(is_first=False, cuda=cuda)
        two_epochs(stage)
    assert cuda.num_pools == 2 < len(cuda.graphs)


def test_a_stage_that_goes_drops_its_graphs_before_their_pool() -> None:
    """The emulation tells a pool that ends first."""
    cuda = EmulatedCuda()
    with cuda.installed():
        stage = make_stage(is_first=False, cuda=cuda)
        stage.record_all()
        is_kept = weakref.ref(stage.recorder)
        del stage
        gc.collect()
        assert is_kept() is None


def test_what_is_planned_keeps_no_graph_that_was_dropped() -> None:
    """It would keep the pages of a layer that has left."""
    stage = make_stage()
    assert isinstance(stage.recorder, EmulatedRecorder)
    stage.step([MirroredChunk(request(0, range(6)), 5, 7, True)])
    stage.recorder.graphs.clear()
    is_kept = weakref.ref(stage.graphed_pool.pages(1)[0])
    stage.graphed_held.drop(1)
    gc.collect()
    assert is_kept() is None


def test_no_graph_outlives_a_layer_that_it_runs() -> None:
    stage = make_stage()
    assert isinstance(stage.recorder, EmulatedRecorder)
    first, second = request(0, range(6)), request(1, range(6, 12))
    stage.step([MirroredChunk(first, 5, 1, True)])
    stage.step([MirroredChunk(first, 6, 7, True)])
    for held in (stage.eager_held, stage.graphed_held):
        held.drop(1)
        held.hold(1)
    num_graphs = len(stage.recorder.graphs)
    stage.step([MirroredChunk(second, 5, 1, True)])
    stage.step([MirroredChunk(second, 6, 7, True)])
    assert len(stage.recorder.graphs) == 2 * num_graphs


def test_a_stage_without_layers_has_graphs_too() -> None:
    for is_first in (True, False):
        stage = make_stage(is_first)
        stage.record_all(1, range(2, 2))
        for length in (1, 6):
            chunk = MirroredChunk(request(0, range(6)), 5, length, True)
            rows = stage.step([chunk], 1, range(2, 2))
            assert len(rows) == length


def test_what_a_step_gave_away_is_not_written_again() -> None:
    """The link may still be sending it."""
    stage = make_stage()
    rows = stage.step([MirroredChunk(request(0, range(6)), 5, 1, True)])
    kept = rows.clone()
    stage.step([MirroredChunk(request(1, range(6, 12)), 9, 1, True)])
    assert torch.equal(rows, kept)


def test_decodes_with_more_page_references_than_fit_run_without_a_graph() -> None:
    stage = make_stage()
    assert isinstance(stage.recorder, EmulatedRecorder)
    long = request(0, list(range(20)) * 7, num_tokens=4 * 140)
    stage.step([MirroredChunk(long, 4 * 140 - 1, 1, True)])
    assert len(stage.recorder.graphs) == NUM_LAYERS + 1  # those of a mixed step of one row


def test_the_memory_estimate_grows_with_the_stage() -> None:
    shape = SPEC.attention_shapes(16, torch.bfloat16, CPU)[0]
    few, many = (graph_memory_bytes(shape, SPEC, layers) for layers in (2, 20))
    assert 128 * 2**20 < few < many < 2**30
    assert list(DECODE_ROWS) == sorted(DECODE_ROWS)
    assert list(MIXED_ROWS) == sorted(MIXED_ROWS)


@pytest.mark.parametrize(
    ("model", "most_rows"), [("Qwen3-0.6B", 2304), ("Qwen3-8B", 768), ("Qwen3-14B", 448)]
)
def test_graphs_end_where_kernels_take_longer_than_their_launching(
    model: str, most_rows: int
) -> None:
    """As on two H200s: without a graph 288 rows of 14B took 19.8 to 26.3 ms, their kernels 15.7 and
    16.4; 1,024 rows of 8B, which have none, 26.9 and 33.8, their kernels 23.9 and 22.2."""
    assert max(mixed_rows_of(spec_of(model))) == most_rows


@pytest.mark.parametrize("num_decodes", [1, 64, 128, 129, 256])
def test_a_whole_chunk_beside_decodes_has_a_graph_and_is_hardly_filled_up(num_decodes: int) -> None:
    """With the defaults of --chunked-prefill-size and --max-running-requests."""
    num_rows = 2048 + num_decodes
    enough = [rows for rows in mixed_rows_of(spec_of("Qwen3-0.6B")) if rows >= num_rows]
    assert enough[0] < 1.07 * num_rows


def with_experts(spec: DecoderSpec, per_token: int, inner: int, shared: int) -> DecoderSpec:
    experts = ExpertSpec(
        num_experts=128,
        experts_per_token=per_token,
        inner_size=inner,
        normalized=True,
        shared_inner_size=shared,
        layers=frozenset(range(spec.num_layers)),
    )
    return replace(spec, experts=experts)


def test_graphs_of_experts_end_by_what_a_row_is_multiplied_with() -> None:
    """Not by all experts, nor by the layers' own MLP, which they replace."""
    dense = spec_of("Qwen3-8B")
    size = dense.intermediate_size
    for per_token, inner, shared in ((1, size, 0), (4, size // 4, 0), (2, size // 4, size // 2)):
        assert mixed_rows_of(with_experts(dense, per_token, inner, shared)) == mixed_rows_of(dense)
    assert max(mixed_rows_of(with_experts(dense, 2, size // 4, 0))) == 1024
    assert max(mixed_rows_of(with_experts(dense, 2, size // 4, 4 * size))) < 512
    assert max(mixed_rows_of(spec_of("Qwen3-30B-A3B"))) == 2304


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"])
def test_the_memory_estimate_holds_buffers_outputs_and_wrappers(model: str) -> None:
    spec = spec_of(model)
    shape = spec.attention_shapes(16, torch.bfloat16, CPU)[0]
    rows = (*DECODE_ROWS, *mixed_rows_of(spec))
    assert graph_rows_of(spec) == rows
    buffers = StepBuffers.allocate(max(rows), shape, spec.hidden_size, is_first=False)
    needed = sum(getattr(buffers, field.name).nbytes for field in fields(buffers))
    needed += sum(torch.empty(count, spec.hidden_size, dtype=shape.dtype).nbytes for count in rows)
    needed += max(rows) * layer_row_bytes(spec, 2)
    needed += workspace_bytes(shape) + (len(DECODE_ROWS) + 3) * 8 * 2**20  # one more on a Hopper
    assert graph_memory_bytes(shape, spec, 0) == needed


@pytest.mark.gpu
@pytest.mark.parametrize("is_first", [True, False])
def test_real_graphs_on_a_gpu(is_first: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    pytest.importorskip("flashinfer")
    stage = make_stage(is_first, torch.device("cuda"), FlashInferKernels())
    stage.record_all()
    serve(stage)


@pytest.mark.gpu
def test_real_graphs_of_a_second_epoch() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    pytest.importorskip("flashinfer")
    two_epochs(make_stage(False, torch.device("cuda"), FlashInferKernels()))
