"""Runs a stage's layers from CUDA graphs where a step fits one, and one kernel at a time elsewhere.

A graph launches all its kernels at once; one by one, their launching takes longer than their work
in steps of few rows. A step is filled up to the next number of rows that has a graph. Graphs belong
to one epoch, the newest: its plan drops the older ones, and a step of an older epoch runs kernel by
kernel. A graph holds addresses, so none may outlive a layer that it runs. It must never let a row
of padding write where a request's keys are. The inputs of the graphs are tested on a CPU.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import (
    AttentionBackend,
    AttentionShape,
    SameAttention,
)
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout, StepInputs
from sgl_pipeline.pp_runner.cuda.captured_step import (
    CapturedStep,
    StepBuffers,
    capture_cut,
    capture_whole,
)
from sgl_pipeline.pp_runner.cuda.gpu_memory import CHUNK_ROWS, layer_row_bytes
from sgl_pipeline.pp_runner.cuda.graph_recorder import GraphRecorder
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import (
    MAX_GRAPH_DECODES,
    FlashInferAttention,
    workspace_bytes,
)
from sgl_pipeline.pp_runner.flashinfer.flashinfer_graph import GraphDecodeAttention
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec

logger = logging.getLogger(__name__)

# Filling up costs little: a step of this few rows takes as long as reading the weights.
DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, MAX_GRAPH_DECODES)
# Steps with prefill, as far as `mixed_rows_of` the model reaches: of prompts whose last chunk is
# short, and of whole chunks, alone and beside decodes.
MIXED_ROWS = (
    *(64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536),
    *(CHUNK_ROWS, CHUNK_ROWS + 128, CHUNK_ROWS + MAX_GRAPH_DECODES),
)
# Of a layer's products. With more of them its kernels take longer than launching them: 0.34 to 0.88
# ms on the hosts of two H200s (steps of Qwen3-0.6B without graphs in 2026-11-27_1954_2_gpu.md and
# 2026-11-27_2305_gpu.md of benchmark/results), and the card does this much in 0.5. A slower card
# hides its launching sooner: there the last rows with a graph fill steps up for nothing.
_LAUNCHED_FLOPS = 3e11
# Page references of a decode graph, for each page of the pool: requests share pages.
_REFERENCES_PER_PAGE = 4
# For `graph_memory_bytes`. A wrapper's buffer of indices is what FlashInfer allocates.
_WRAPPER_BYTES = 8 * 2**20
_PLAIN_WRAPPERS = 3  # decode and, on a Hopper, two for prefill; others have one
_KERNELS_PER_LAYER = 30
_KERNEL_BYTES = 16 * 2**10


class GraphedLayers:
    """The `StepLayers` of a CUDA stage whose layers all have one shape of attention.

    Args:
        held_layers: whose pool has a padding page. decode_rows, mixed_rows: numbers of rows with
            graphs, ascending.
    """

    def __init__(
        self,
        held_layers: HeldLayers,
        attention: FlashInferAttention,
        shape: AttentionShape,
        recorder: GraphRecorder,
        *,
        decode_rows: Sequence[int] = DECODE_ROWS,
        mixed_rows: Sequence[int],
    ) -> None:
        model, kv_pool = held_layers.model, held_layers.kv_pool
        self._held_layers = held_layers
        self._attention = attention
        self._recorder = recorder
        self._mixed_rows = mixed_rows
        self._padding_slot = kv_pool.padding_page * shape.page_size
        max_rows = max(*decode_rows, *mixed_rows)
        self._buffers = StepBuffers.allocate(
            max_rows, shape, model.spec.hidden_size, model.is_first
        )
        indices = torch.zeros(
            _REFERENCES_PER_PAGE * kv_pool.num_pages + max_rows,
            dtype=torch.int32,
            device=shape.device,
        )
        self._decodes = {
            rows: attention.decode_for_graph(rows, kv_pool.padding_page, indices)
            for rows in decode_rows
        }
        self._empty_layout = _padding_layout(shape.page_size, indices[:0])
        # The epoch of all graphs, and the layers that they run.
        self._epoch = -1
        self._recorded = range(0)
        self._captured: dict[tuple[bool, int], CapturedStep] = {}
        # Of the step that is planned.
        self._planned: CapturedStep | None = None
        self._layers = range(0)
        held_layers.before_drop(self._forget)

    def prepare(self, epoch: int, layers: range) -> None:
        """Drops the graphs of older epochs; graphs of `epoch` are recorded when a step needs one,
        or by `record_all`.

        At the switch of a layer move the pipeline would wait for all of them, and most numbers of
        rows may never come. The memory of the older ones is given back when the first is recorded.
        """
        self._drop_graphs()
        self._epoch, self._recorded = epoch, layers

    def record_all(self) -> None:
        """Records every graph of the epoch that was prepared last."""
        started = time.perf_counter()
        # The largest first: the smaller ones fit into the memory that it has taken.
        for rows in reversed(self._mixed_rows):
            self._mixed_step(rows)
        for rows in reversed(self._decodes):
            self._decode_step(rows)
        logger.info(
            "recorded the graphs of %d numbers of rows in %.1f s",
            len(self._captured),
            time.perf_counter() - started,
        )

    def plan(self, epoch: int, layers: range, inputs: StepInputs) -> None:
        """See `StepLayers.plan`."""
        if epoch > self._epoch:
            self.prepare(epoch, layers)
        self._layers, layout = layers, inputs.layout
        if epoch < self._epoch:
            self._planned = None
            self._attention.plan(layout)
            return
        if (decodes := self._decode_attention(layout)) is not None:
            self._planned = self._decode_step(decodes.num_rows)
            decodes.plan(layout)
            return
        rows = _next(self._mixed_rows, inputs.num_tokens)
        self._planned = None if rows is None else self._mixed_step(rows)
        self._attention.plan(layout)

    def run(self, inputs: StepInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        """See `StepLayers.run`."""
        step = self._planned
        if step is None:
            attention = SameAttention(self._attention)
            return self._held_layers.forward(self._layers, inputs, hidden, attention)
        self._buffers.fill(inputs, hidden, step.num_rows, self._padding_slot)
        step.replay(self._buffers, inputs.num_tokens, self._attention.attend_into)
        # The next step writes there again, and this one's rows may still be on their way.
        return step.output[: inputs.num_tokens].clone()

    def _forget(self, layer: int) -> None:
        if layer in self._recorded:
            self._drop_graphs()

    def _drop_graphs(self) -> None:
        """Drops the graphs when the device runs none of them."""
        self._planned = None
        if self._captured:
            with self._recorder.session():
                self._captured.clear()

    def _decode_attention(self, layout: PagedLayout) -> GraphDecodeAttention | None:
        """The attention of the graph that fits the step of `layout`, if it has decodes only."""
        rows = _next(tuple(self._decodes), layout.num_chunks)
        if rows is None or not self._decodes[rows].fits(layout):
            return None
        return self._decodes[rows]

    def _decode_step(self, rows: int) -> CapturedStep:
        key = (True, rows)
        if key not in self._captured:
            with self._recorder.session():
                self._decodes[rows].plan(self._empty_layout)
                self._captured[key] = capture_whole(
                    self._forward,
                    self._decodes[rows],
                    *self._padding(rows),
                    self._recorder,
                )
        return self._captured[key]

    def _mixed_step(self, rows: int) -> CapturedStep:
        key = (False, rows)
        if key not in self._captured:
            with self._recorder.session():
                self._captured[key] = capture_cut(
                    self._forward,
                    self._buffers,
                    *self._padding(rows),
                    self._recorder,
                )
        return self._captured[key]

    def _forward(
        self, inputs: StepInputs, hidden: torch.Tensor | None, attention: AttentionBackend
    ) -> torch.Tensor:
        return self._held_layers.forward(self._recorded, inputs, hidden, SameAttention(attention))

    def _padding(self, rows: int) -> tuple[StepInputs, torch.Tensor | None]:
        """A step's inputs that are all padding, for warming up."""
        hidden = self._buffers.hidden
        self._buffers.slots.fill_(self._padding_slot)
        inputs = self._buffers.step_inputs(rows, self._empty_layout)
        return inputs, None if hidden is None else hidden[:rows]


def mixed_rows_of(spec: DecoderSpec) -> tuple[int, ...]:
    """The numbers of rows of steps with prefill that gain by a graph, ascending; at least one.

    Where kernels take longer than their launching, rows that fill a step up cost more than a graph
    saves. Quantization is not looked at: products in FP8 are faster, and more rows might gain.
    """
    heads = 2 * spec.num_query_heads + 2 * spec.num_kv_heads
    if spec.experts is None:
        inner_size = spec.intermediate_size
    else:
        each, shared = spec.experts.inner_size, spec.experts.shared_inner_size
        inner_size = spec.experts.experts_per_token * each + shared
    row_weights = spec.hidden_size * (heads * spec.head_dim + 3 * inner_size)
    most_rows = _LAUNCHED_FLOPS / (2 * row_weights)
    return MIXED_ROWS[:1] + tuple(rows for rows in MIXED_ROWS[1:] if rows <= most_rows)


def graph_rows_of(spec: ModelSpec) -> tuple[int, ...]:
    """All numbers of rows that may have a graph; none where a model's layers are not ours."""
    return (*DECODE_ROWS, *mixed_rows_of(spec)) if isinstance(spec, DecoderSpec) else ()


def graph_memory_bytes(shape: AttentionShape, spec: DecoderSpec, num_layers: int) -> int:
    """GPU memory of graphs and FlashInfer's wrappers, to be kept free beside the KV pool.

    An estimate from above, never measured: the wrappers' workspaces, the inputs and the activations
    of the largest graph, the outputs of all, and what the driver keeps for each recorded kernel.
    `make_step_layers` logs the actual size.
    """
    graph_rows = graph_rows_of(spec)
    wrappers = workspace_bytes(shape) + (_PLAIN_WRAPPERS + len(DECODE_ROWS)) * _WRAPPER_BYTES
    row_bytes = StepBuffers.row_bytes(shape, spec.hidden_size)
    row_bytes += layer_row_bytes(spec, shape.dtype.itemsize)
    outputs = sum(graph_rows) * spec.hidden_size * shape.dtype.itemsize
    num_kernels = len(graph_rows) * num_layers * _KERNELS_PER_LAYER
    return wrappers + max(graph_rows) * row_bytes + outputs + num_kernels * _KERNEL_BYTES


def _next(numbers: Sequence[int], least: int) -> int | None:
    """The lowest of the ascending `numbers` that is not below `least`."""
    place = bisect_left(numbers, least)
    return numbers[place] if place < len(numbers) else None


def _padding_layout(page_size: int, no_page: torch.Tensor) -> PagedLayout:
    """The layout of a step without a chunk; `no_page` is on the device."""
    none, zero = (torch.zeros(count, dtype=torch.int32) for count in (0, 1))
    return PagedLayout(page_size, 0, zero, zero, none, none, none, no_page)
