"""The layers of a step as graphs, and the buffers that they read and write.

A step of decodes is one graph. In a step with prefill the graphs end where attention begins: its
split of the work depends on the step's layout, all else only on the number of rows.

Shapes: R rows of the graph, of which the step uses the first T; H hidden size, Hq query heads, D
head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout, StepInputs
from sgl_pipeline.pp_runner.cuda.graph_recorder import Graph, GraphRecorder

Pages = tuple[torch.Tensor, torch.Tensor]
_INDEX_BYTES = 8  # of an int64


class Forward(Protocol):
    """`HeldLayers.forward` of the layers to record."""

    def __call__(
        self, inputs: StepInputs, hidden: torch.Tensor | None, attention: AttentionBackend
    ) -> torch.Tensor: ...


class AttendInto(Protocol):
    """`AttentionBackend.attend`, with the result written to `out`."""

    def __call__(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        out: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """One set for all graphs, which never run at the same time, as long as the largest of them.

    `hidden` is the previous stage's output; None on the first. `query` goes into attention and
    `attended` comes out of it, if it is not in the graph.
    """

    token_ids: torch.Tensor  # [R] int64, like the two below
    positions: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor | None  # [R, H]
    query: torch.Tensor  # [R, Hq, D]
    attended: torch.Tensor  # [R, Hq, D]

    @classmethod
    def allocate(
        cls, num_rows: int, shape: AttentionShape, hidden_size: int, is_first: bool
    ) -> "StepBuffers":
        def zeros(dtype: torch.dtype, *row: int) -> torch.Tensor:
            return torch.zeros(num_rows, *row, dtype=dtype, device=shape.device)

        heads = (shape.num_query_heads, shape.head_dim)
        return cls(
            token_ids=zeros(torch.int64),
            positions=zeros(torch.int64),
            slots=zeros(torch.int64),
            hidden=None if is_first else zeros(shape.dtype, hidden_size),
            query=zeros(shape.dtype, *heads),
            attended=zeros(shape.dtype, *heads),
        )

    @staticmethod
    def row_bytes(shape: AttentionShape, hidden_size: int) -> int:
        """Bytes of a row of all buffers, on a stage that is not the first."""
        numbers = hidden_size + 2 * shape.num_query_heads * shape.head_dim
        return 3 * _INDEX_BYTES + numbers * shape.dtype.itemsize

    def fill(
        self, inputs: StepInputs, hidden: torch.Tensor | None, num_rows: int, padding_slot: int
    ) -> None:
        """Copies the step's rows; rows from T to `num_rows` write to `padding_slot`. Their other
        contents are of an earlier step, harmless and never read."""
        used = inputs.num_tokens
        self.token_ids[:used].copy_(inputs.token_ids)
        self.positions[:used].copy_(inputs.positions)
        self.slots[:used].copy_(inputs.slots)
        self.slots[used:num_rows].fill_(padding_slot)
        if self.hidden is not None:
            assert hidden is not None, "a stage after the first needs the residual stream"
            self.hidden[:used].copy_(hidden)

    def step_inputs(self, num_rows: int, layout: PagedLayout) -> StepInputs:
        """The inputs of `HeldLayers.forward`, as views of the buffers."""
        return StepInputs(
            token_ids=self.token_ids[:num_rows],
            positions=self.positions[:num_rows],
            slots=self.slots[:num_rows],
            layout=layout,
            sample_rows=self.slots[:0],
            sample_positions=torch.empty(0, dtype=torch.int64),
            sampling=(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStep:
    """`graphs` with attention over `pages[i]` between graphs i and i + 1. The last one writes
    `output` [R, H]."""

    num_rows: int
    graphs: tuple[Graph, ...]
    pages: tuple[Pages, ...]
    output: torch.Tensor

    def replay(self, buffers: StepBuffers, num_tokens: int, attend_into: AttendInto) -> None:
        """Runs the layers on the contents of `buffers`; `attend_into` serves the step's T rows."""
        self.graphs[0].replay()
        query, attended = buffers.query[:num_tokens], buffers.attended[:num_tokens]
        for pages, graph in zip(self.pages, self.graphs[1:], strict=True):
            attend_into(query, *pages, attended)
            graph.replay()


@dataclass(slots=True, eq=False)
class _CuttingAttention:
    """Replaces attention while a step is recorded: ends a graph and begins the next.

    Before the recording, `recorder` is None and it does nothing but move the rows.
    """

    buffers: StepBuffers
    recorder: GraphRecorder | None
    graphs: list[Graph] = field(default_factory=list)
    pages: list[Pages] = field(default_factory=list)

    def plan(self, layout: PagedLayout) -> None:
        raise AssertionError("attention outside the graph is planned for itself")

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_rows = len(query)
        self.buffers.query[:num_rows].copy_(query)
        if self.recorder is not None:
            self.graphs.append(self.recorder.end())
            self.pages.append((key_pages, value_pages))
            self.recorder.begin()
        return self.buffers.attended[:num_rows]


def capture_whole(
    forward: Forward,
    attention: AttentionBackend,
    inputs: StepInputs,
    hidden: torch.Tensor | None,
    recorder: GraphRecorder,
) -> CapturedStep:
    """One graph of the layers and their attention, which must be able to run in one and be planned
    for the rows of `inputs`. To be called in the recorder's session."""

    def call() -> torch.Tensor:
        return forward(inputs, hidden, attention)

    graph, output = _record(call, call, recorder)
    return CapturedStep(inputs.num_tokens, (graph,), (), output)


def capture_cut(
    forward: Forward,
    buffers: StepBuffers,
    inputs: StepInputs,
    hidden: torch.Tensor | None,
    recorder: GraphRecorder,
) -> CapturedStep:
    """Graphs of all between the layers' attention. To be called in the recorder's session."""
    idle = _CuttingAttention(buffers, None)
    cutting = _CuttingAttention(buffers, recorder)
    last, output = _record(
        lambda: forward(inputs, hidden, idle),
        lambda: forward(inputs, hidden, cutting),
        recorder,
    )
    graphs = (*cutting.graphs, last)
    return CapturedStep(inputs.num_tokens, graphs, tuple(cutting.pages), output)


def _record(
    warm_up: Callable[[], torch.Tensor], call: Callable[[], torch.Tensor], recorder: GraphRecorder
) -> tuple[Graph, torch.Tensor]:
    """The last graph of `call` and its result. `warm_up` runs first: libraries load their kernels
    and take their workspaces when they first see a shape, which must not be recorded."""
    warm_up()
    recorder.begin()
    output = call()
    return recorder.end(), output
