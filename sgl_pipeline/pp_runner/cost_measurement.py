"""Times the parts of a model on this worker: a layer of each kind, the embedding and the head.

It runs in a stage worker before the worker knows its stage, for `--pp-layer-partition auto`. The
weights are made up: no product's time depends on them. `migration/` decides with the times.
"""

import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from sgl_pipeline.costs.stage_costs import MadeUpStep, PartCosts, PartSample, PartSizes
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool, largest_page_bytes
from sgl_pipeline.pp_runner.base.compute_threads import bind_compute_threads, pin_threads
from sgl_pipeline.pp_runner.base.kv_format import encode, head_dim_of
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs, build_step_inputs
from sgl_pipeline.pp_runner.cpu_kernels.call_recording import record
from sgl_pipeline.pp_runner.cuda.kernel_stopwatch import CudaTimeline, KernelStopwatch
from sgl_pipeline.pp_runner.device import open_device, release_memory
from sgl_pipeline.pp_runner.kernel_choice import (
    choose_attention_backend,
    choose_layer_kernels,
    make_layer_kernels,
    make_stage_attention,
)
from sgl_pipeline.pp_runner.kv_capacity import usable_memory_bytes
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import RmsNorm
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec, read_model_spec
from sgl_pipeline.pp_runner.model.native_stage import OutputHead
from sgl_pipeline.pp_runner.model.rotary import RotaryEmbedding
from sgl_pipeline.pp_runner.output.sampler import Sampler
from sgl_pipeline.pp_runner.recorded_layers import MOST_ROWS, step_variables
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
# Odd, so that the rows of a matrix (of a router, say) differ although they repeat it.
_PATTERN_LENGTH = 1_000_003


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
    spec: ModelSpec = read_model_spec(args.model_path, args.quantization)
    if not isinstance(spec, DecoderSpec):
        raise ConfigurationError(
            "--pp-layer-partition auto times our own layers, and transformers computes those of "
            "this model; leave the flag out, or give the number of layers of each stage"
        )
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
        ),
        memory_bytes=usable_memory_bytes(assignment, device),
    )


class _MadeUpModel:
    """A layer of each kind, the embedding and the head, ready to be timed.

    `kinds[l]` is the kind of layer `l`, in order of appearance; a layer of each kind has
    `kind_bytes` of weights, the head with its norm `head_bytes`.
    """

    def __init__(
        self,
        assignment: StageAssignment,
        spec: DecoderSpec,
        shapes: Sequence[AttentionShape],
        most_table_bytes: int | None,
    ) -> None:
        args, shape = assignment.args, shapes[0]
        self._spec, self._shapes, device = spec, shapes, shape.device
        self._attention = make_stage_attention(
            choose_attention_backend(args.attention_backend, shape), shapes, args.prefill_kernels
        )
        choice = choose_layer_kernels(args.layer_kernels, shape.dtype, device, spec.quantization)
        bind_compute_threads(choice.name, shape.dtype, assignment.cpu_threads, assignment.cpu_cores)
        self._kernels = make_layer_kernels(choice, shape)
        self._weights = _MadeUpWeights(shape.dtype, device)
        kinds = [spec.layer_kind(layer) for layer in range(spec.num_layers)]
        firsts = sorted({kinds.index(own) for own in kinds})
        self.kinds = tuple(firsts.index(kinds.index(own)) for own in kinds)
        self.kind_bytes: list[int] = []
        self._layers: list[DecoderLayer] = []
        for layer in firsts:
            self._weights.loaded.clear()
            self._layers.append(DecoderLayer(spec, layer, self._weights, self._kernels))
            self.kind_bytes.append(sum(self._weights.loaded.values()))
        self._table_sizes = _table_sizes(spec, shape.dtype.itemsize, most_table_bytes)
        self._table = self._weights.read("", (self._table_sizes[-1], spec.hidden_size))
        norm = RmsNorm(self._weights.read("", (spec.hidden_size,)), spec.norm_epsilon)
        matrices = [self._head_matrix(num_rows) for num_rows in self._table_sizes]
        table_bytes = spec.vocab_size * matrices[-1].nbytes // self._table_sizes[-1]
        self.head_bytes = norm.weight.nbytes + table_bytes
        self._heads = [OutputHead(norm, matrix, self._kernels) for matrix in matrices]

    def _head_matrix(self, num_rows: int) -> Matrix:
        """As many rows of the head's, quantized if the model's is."""
        table, quantization = self._table[:num_rows], self._spec.quantization
        scheme = quantization.scheme_of(self._spec.names.head) if quantization else None
        return table if scheme is None else scheme.quantize(table)

    def sample(self, step: MadeUpStep, stopwatch: Stopwatch) -> PartSample:
        """Times a step whose requests are within the model's context length."""
        inputs = _step_inputs(step, self._spec, self._shapes[0])
        self._attention.plan(inputs.layout)
        calls: dict[object, Callable[[], object]] = {
            kind: self._layer_call(layer, inputs) for kind, layer in enumerate(self._layers)
        }
        calls["embedding"] = lambda: F.embedding(inputs.token_ids % len(self._table), self._table)
        heads = [("head", number) for number in range(len(self._heads) if step.decodes else 0)]
        for name, head in zip(heads, self._heads, strict=False):
            calls[name] = self._head_call(head, inputs)
        times_ms = stopwatch.least_ms(calls)
        heads_ms = [times_ms[name] for name in heads]
        return PartSample(
            work=step.work,
            kinds_ms=tuple(times_ms[kind] for kind in range(len(self._layers))),
            embedding_ms=times_ms["embedding"],
            tail_ms=_head_ms(self._table_sizes, heads_ms, self._spec.vocab_size) if heads else 0.0,
        )

    def _layer_call(self, layer: DecoderLayer, inputs: StepInputs) -> Callable[[], object]:
        kv_pool = KvPool([layer.layer], self._shapes, inputs.layout.page_indices.numel())
        for pages in kv_pool.pages(layer.layer):  # untouched ones would share one page of memory
            pages.copy_(encode(torch.full((head_dim_of(pages),), 0.5), pages.dtype))
        spec = self._spec
        rotary = RotaryEmbedding(spec.rope, spec.head_dim, self._shapes[0].device)
        rotation = rotary.at(inputs.positions)
        stream = self._weights.read("", (inputs.num_tokens, spec.hidden_size))

        def call() -> torch.Tensor:
            return layer.forward(stream, rotation, inputs.slots, kv_pool, self._attention)

        is_compiled = isinstance(self._attention.of(layer.layer), CpuAttention)
        if not is_compiled or inputs.num_tokens > MOST_ROWS:
            return call
        variables = (*step_variables(inputs, stream, rotation), *kv_pool.pages(layer.layer))
        _, calls = record(call, variables, inputs.num_tokens)
        if calls is None:
            return call
        sizes = (inputs.num_tokens, inputs.layout.num_chunks, torch.get_num_threads())
        return partial(calls.run, variables, *sizes)

    def _head_call(self, head: OutputHead, inputs: StepInputs) -> Callable[[], object]:
        sampler = Sampler()
        rows = self._weights.read("", (len(inputs.sampling), self._spec.hidden_size))
        # Without the copy of the token ids to the host, which takes no GPU time.
        return lambda: sampler.draw(head(rows), inputs.sampling, inputs.sample_positions)


def _table_sizes(spec: DecoderSpec, itemsize: int, most_bytes: int | None) -> list[int]:
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


def _step_inputs(step: MadeUpStep, spec: DecoderSpec, shape: AttentionShape) -> StepInputs:
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
        )
        chunks.append(MirroredChunk(request, start, end - start, samples=is_decode))
    return build_step_inputs(chunks, shape.page_size, shape.device)


class _MadeUpWeights:
    """A `WeightSource` whose tensors repeat some random numbers, as fast as memory is written."""

    is_made_up = True

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.loaded: dict[str, int] = {}
        self.dtype = dtype
        self.device = device
        generator = torch.Generator().manual_seed(0)
        pattern = torch.empty(_PATTERN_LENGTH).normal_(0.0, 0.02, generator=generator)
        self._pattern = pattern.to(device, dtype)

    def has(self, name: str) -> bool:
        return False

    def names(self) -> Iterable[str]:
        return ()

    def shape_of(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError("weights that are made up have the shape that is asked for")

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(math.prod(shape), dtype=self.dtype, device=self.device)
        for part in tensor.split(_PATTERN_LENGTH):
            part.copy_(self._pattern[: part.numel()])
        self.loaded[name] = tensor.nbytes
        return tensor.view(shape)

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError("weights that are made up have no tensors of a layout")
