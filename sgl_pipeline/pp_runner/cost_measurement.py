"""Times the parts of a model on this worker: a layer of each kind, the embedding and the head.

It runs in a stage worker before the worker knows its stage, for `--pp-layer-partition auto`. The
weights are made up: no product's time depends on them. `migration/` decides with the times.
"""

import math
import time
from array import array
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from sgl_pipeline.costs.stage_costs import MadeUpStep, PartCosts, PartSample, PartSizes
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.kv_pool import largest_page_bytes
from sgl_pipeline.pp_runner.base.compute_threads import bind_compute_threads, pin_threads
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs, build_step_inputs
from sgl_pipeline.pp_runner.cuda.kernel_stopwatch import CudaTimeline, KernelStopwatch
from sgl_pipeline.pp_runner.device import open_device, release_memory
from sgl_pipeline.pp_runner.kernel_choice import (
    choose_attention_backend,
    choose_layer_kernels,
    make_layer_kernels,
    make_stage_attention,
    quantization_notice,
)
from sgl_pipeline.pp_runner.kv_capacity import usable_memory_bytes
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import RmsNorm
from sgl_pipeline.pp_runner.made_up_weights import MadeUpWeights
from sgl_pipeline.pp_runner.measured_layers import GenericLayers, MeasuredLayers, NativeLayers
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec
from sgl_pipeline.pp_runner.model.native_stage import OutputHead
from sgl_pipeline.pp_runner.output.sampler import Sampler
from sgl_pipeline.pp_runner.stage_spec import stage_spec
from sgl_pipeline.pp_runner.stopwatch import HostStopwatch, Stopwatch
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix
from sgl_pipeline.requests import SamplingSpec
from sgl_pipeline.wire.stage_messages import StageAssignment
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

# On a CPU the head of a large vocabulary is timed on a part of its table, which no cache holds
# either, and on a part of that part: the difference is the cost of rows, without the cost of a
# call.
_MOST_TABLE_BYTES = 64 * 2**20
_SMALLER_TABLE_SHARE = 4
# Of the head's norm, whose time does not depend on it.
_NORM_EPSILON = 1e-6


def measure_part_costs(assignment: StageAssignment, steps: Sequence[MadeUpStep]) -> PartCosts:
    """Milliseconds of each of `steps` in each part of the model of `assignment`, whose stage and
    plan do not matter except for the device, and the parts' bytes.

    Raises ConfigurationError as loading the stage would.
    """
    pin_threads(assignment.cpu_threads, assignment.cpu_cores)
    device = open_device(assignment.args.device, assignment.gpu)
    stopwatch, most_table_bytes = _stopwatch(assignment, device), _most_table_bytes(device)
    costs = _measure(assignment, device, stopwatch, most_table_bytes, steps)
    release_memory(device)  # of the made-up tensors; the weights need the room
    return costs


def _stopwatch(assignment: StageAssignment, device: torch.device) -> Stopwatch:
    if device.type == "cuda":
        return KernelStopwatch(CudaTimeline(device))
    # CPU time, where available: other work on the same core does not count.
    return HostStopwatch(time.thread_time if assignment.cpu_threads == 1 else time.perf_counter)


def _most_table_bytes(device: torch.device) -> int | None:
    """See `_measure`. A GPU has room for the whole table."""
    return None if device.type == "cuda" else _MOST_TABLE_BYTES


@torch.inference_mode()
def _measure(
    assignment: StageAssignment,
    device: torch.device,
    stopwatch: Stopwatch,
    most_table_bytes: int | None,
    steps: Sequence[MadeUpStep],
) -> PartCosts:
    """See `measure_part_costs`.

    Args:
        most_table_bytes: of the head's table, to be timed at once; None: all of it.
    """
    args = assignment.args
    dtype = getattr(torch, args.dtype)
    spec = stage_spec(args)
    shapes = spec.attention_shapes(assignment.page_size, dtype, device, args.kv_cache_dtype)
    model = _MadeUpModel(assignment, spec, shapes, most_table_bytes)
    return PartCosts(
        kinds=model.kinds,
        samples=tuple(model.sample(step.within(spec.context_length), stopwatch) for step in steps),
        sizes=PartSizes(
            layers_bytes=tuple(model.kind_bytes[kind] for kind in model.kinds),
            embedding_bytes=spec.vocab_size * spec.hidden_size * dtype.itemsize,
            head_bytes=model.head_bytes,
            page_layer_bytes=largest_page_bytes(shapes),
            page_size=assignment.page_size,
            state_layers=tuple(layer for layer in range(spec.num_layers) if spec.state_of(layer)),
            state_bytes=_state_bytes(assignment, spec),
        ),
        memory_bytes=usable_memory_bytes(assignment, device),
    )


def _state_bytes(assignment: StageAssignment, spec: ModelSpec) -> int:
    """Bytes of the states of all slots in one layer."""
    slot_bytes = 0 if spec.state is None else spec.state.bytes_per_slot(assignment.args.dtype)
    return assignment.args.num_state_slots * slot_bytes


class _MadeUpModel:
    """A layer of each kind, the embedding and the head, ready to be timed.

    `kinds[l]` is the kind of layer `l`, in order of appearance; a layer of each kind has
    `kind_bytes` of weights, the head with its norm `head_bytes`.
    """

    def __init__(
        self,
        assignment: StageAssignment,
        spec: ModelSpec,
        shapes: Sequence[AttentionShape],
        most_table_bytes: int | None,
    ) -> None:
        args, shape = assignment.args, shapes[0]
        self._spec, self._shapes, device = spec, shapes, shape.device
        self._attention = make_stage_attention(
            choose_attention_backend(args.attention_backend, shape), shapes, args.prefill_kernels
        )
        choice = choose_layer_kernels(args.layer_kernels, shape.dtype, device, spec.quantization)
        if not quantization_notice(choice, spec.quantization, shape.dtype):
            bind_compute_threads(
                choice.name, shape.dtype, assignment.cpu_threads, assignment.cpu_cores
            )
        self._kernels = make_layer_kernels(choice, shape, spec)
        self._weights = MadeUpWeights(shape.dtype, device)
        kinds = [spec.layer_kind(layer) for layer in range(spec.num_layers)]
        firsts = sorted({kinds.index(own) for own in kinds})
        self.kinds = tuple(firsts.index(kinds.index(own)) for own in kinds)
        self._layers = self._layers_of(args.model_path, firsts)
        self.kind_bytes = self._layers.kind_bytes
        self._table_sizes = _table_sizes(spec, shape.dtype.itemsize, most_table_bytes)
        self._table = self._weights.read("", (self._table_sizes[-1], spec.hidden_size))
        norm = RmsNorm(self._weights.read("", (spec.hidden_size,)), _NORM_EPSILON)
        matrices = [self._head_matrix(num_rows) for num_rows in self._table_sizes]
        table_bytes = spec.vocab_size * matrices[-1].nbytes // self._table_sizes[-1]
        self.head_bytes = norm.weight.nbytes + table_bytes
        self._heads = [OutputHead(norm, matrix, self._kernels) for matrix in matrices]

    def _layers_of(self, path: str, firsts: Sequence[int]) -> MeasuredLayers:
        parts = (firsts, self._shapes, self._attention, self._kernels, self._weights)
        if isinstance(self._spec, GenericSpec):
            return GenericLayers(self._spec, path, *parts)
        assert isinstance(self._spec, DecoderSpec)
        return NativeLayers(self._spec, *parts)

    def _head_matrix(self, num_rows: int) -> Matrix:
        """The head's first `num_rows` rows, quantized if the model's are."""
        table, quantization = self._table[:num_rows], self._spec.quantization
        scheme = quantization.scheme_of(_head_name(self._spec)) if quantization else None
        return table if scheme is None else scheme.quantize(table)

    def sample(self, step: MadeUpStep, stopwatch: Stopwatch) -> PartSample:
        """Times a step whose requests are within the model's context length."""
        inputs = _step_inputs(step, self._spec, self._shapes[0])
        self._attention.plan(inputs.layout)
        calls: dict[object, Callable[[], object]] = {**dict(enumerate(self._layers.calls(inputs)))}
        calls["embedding"] = lambda: F.embedding(inputs.token_ids % len(self._table), self._table)
        heads = [("head", number) for number in range(len(self._heads) if step.decodes else 0)]
        for name, head in zip(heads, self._heads, strict=False):
            calls[name] = self._head_call(head, inputs)
        times_ms = stopwatch.least_ms(calls)
        heads_ms = [times_ms[name] for name in heads]
        return PartSample(
            work=step.work,
            kinds_ms=tuple(times_ms[kind] for kind in range(len(self.kind_bytes))),
            embedding_ms=times_ms["embedding"],
            tail_ms=_head_ms(self._table_sizes, heads_ms, self._spec.vocab_size) if heads else 0.0,
        )

    def _head_call(self, head: OutputHead, inputs: StepInputs) -> Callable[[], object]:
        sampler = Sampler()
        rows = self._weights.read("", (len(inputs.sampling), self._spec.hidden_size))
        # Without the copy of the token ids to the host, which takes no GPU time.
        return lambda: sampler.draw(head(rows), inputs.sampling, inputs.sample_positions)


def _head_name(spec: ModelSpec) -> str:
    """The head's name in the checkpoint."""
    if isinstance(spec, GenericSpec):
        return spec.head
    assert isinstance(spec, DecoderSpec)
    return spec.names.head


def _table_sizes(spec: ModelSpec, itemsize: int, most_bytes: int | None) -> list[int]:
    """Row counts at which the head is timed, ascending."""
    row_bytes = spec.hidden_size * itemsize
    if most_bytes is None or spec.vocab_size * row_bytes <= most_bytes:
        return [spec.vocab_size]
    most_rows = max(2, most_bytes // row_bytes)
    return [max(1, most_rows // _SMALLER_TABLE_SHARE), most_rows]


def _head_ms(table_sizes: list[int], times_ms: list[float], vocab_size: int) -> float:
    """The head's time with all rows, by a line through its times with `table_sizes` rows.

    In spite of noise, a row's cost is not negative, and not above the cost without a fixed part.
    """
    most_rows, most_ms = table_sizes[-1], times_ms[-1]
    if most_rows == vocab_size:
        return most_ms
    row_ms = (most_ms - times_ms[0]) / (most_rows - table_sizes[0])
    row_ms = min(max(0.0, row_ms), most_ms / most_rows)
    return most_ms + row_ms * (vocab_size - most_rows)


def _step_inputs(step: MadeUpStep, spec: ModelSpec, shape: AttentionShape) -> StepInputs:
    """Decodes, each at the end of its context, and a chunk of another prompt."""
    prompt_end = step.prompt_start + step.prompt_tokens
    ends = [(step.context_tokens, step.context_tokens + 1, True)] * step.decodes
    if step.prompt_tokens:
        ends.append((step.prompt_start, prompt_end, False))
    chunks, num_pages = [], 0
    for number, (start, end, is_decode) in enumerate(ends):
        # Without gaps: there are as many pages as are used.
        first_page, num_pages = num_pages, num_pages + math.ceil(end / shape.page_size)
        request = MirroredRequest(
            handle=number,
            sampling=SamplingSpec(seed=number),
            prompt_length=end,
            tokens=array("i", [number % spec.vocab_size]) * end,
            pages=array("i", range(first_page, num_pages)),
            state_slot=number if spec.has_states else None,
        )
        chunks.append(MirroredChunk(request, start, end - start, samples=is_decode))
    return build_step_inputs(chunks, shape.page_size, shape.device)
