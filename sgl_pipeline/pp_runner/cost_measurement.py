"""Times the parts of a model on this worker: a layer of each kind, the embedding and the head.

Called by the stage worker before it knows its stage, for `--pp-layer-partition auto`. The weights
are made up: no product's time depends on them. Decides nothing: `migration/` does.
"""

import math
import time
from array import array
from collections.abc import Callable

import torch
import torch.nn.functional as F

from sgl_pipeline.messages import StageAssignment
from sgl_pipeline.pp_runner.attention.backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.cuda.kernel_stopwatch import CudaTimeline, KernelStopwatch
from sgl_pipeline.pp_runner.device import open_device, pin_threads, release_memory
from sgl_pipeline.pp_runner.kernel_choice import (
    choose_attention_backend,
    choose_layer_kernels,
    make_attention_backend,
    make_layer_kernels,
)
from sgl_pipeline.pp_runner.kv_pool import KvPool
from sgl_pipeline.pp_runner.layer_kernels.backend import LayerKernels, RmsNorm
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec, read_model_spec
from sgl_pipeline.pp_runner.model.rotary import RotaryEmbedding
from sgl_pipeline.pp_runner.model.stage_model import OutputHead
from sgl_pipeline.pp_runner.output.sampler import Sampler
from sgl_pipeline.pp_runner.step_inputs import StepInputs, build_step_inputs
from sgl_pipeline.pp_runner.stopwatch import HostStopwatch, Stopwatch
from sgl_pipeline.requests import SamplingSpec
from sgl_pipeline.stage_costs import TYPICAL_STEP, StageCosts
from sgl_pipeline.step_plan import MirroredChunk, MirroredRequest

# On a CPU the head of a large vocabulary is timed on a part of its table, which no cache holds
# either, and on a part of that part: the difference is what rows cost, without what a call costs.
_MOST_TABLE_BYTES = 64 * 2**20
_SMALLER_TABLE_SHARE = 4
# Odd, so that the rows of a matrix (of a router, say) differ although they repeat it.
_PATTERN_LENGTH = 1_000_003


def measure_stage_costs(assignment: StageAssignment) -> StageCosts:
    """Milliseconds of a `TYPICAL_STEP` in each part of the model of `assignment`, whose stage and
    plan do not matter but for the device.

    Raises ConfigurationError as loading the stage would.
    """
    pin_threads(assignment.cpu_threads, assignment.cpu_cores)
    device = open_device(assignment.device, assignment.gpu)
    costs = _measure(assignment, device, _stopwatch(assignment, device), _most_table_bytes(device))
    release_memory(device)  # of what was made up; the weights need the room
    return costs


def _stopwatch(assignment: StageAssignment, device: torch.device) -> Stopwatch:
    if device.type == "cuda":
        return KernelStopwatch(CudaTimeline(device))
    # CPU time, where it can be taken: the neighbours on the same core take nothing from it.
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
) -> StageCosts:
    """See `measure_stage_costs`.

    Args:
        most_table_bytes: of the head's table, to be timed at once; None: all of it.
    """
    dtype = getattr(torch, assignment.dtype)
    spec = read_model_spec(assignment.model_path)
    shape = spec.attention_shape(assignment.page_size, dtype, device)
    attention = make_attention_backend(
        choose_attention_backend(assignment.attention_backend, shape),
        shape,
        assignment.prefill_kernels,
    )
    kernels = make_layer_kernels(choose_layer_kernels(assignment.layer_kernels, dtype, device))
    weights = _MadeUpWeights(dtype, device)
    inputs = _typical_inputs(spec, assignment.page_size, device)
    attention.plan(inputs.layout)
    kinds = [spec.layer_experts(layer) for layer in range(spec.num_layers)]
    calls: dict[object, Callable[[], object]] = {
        kind: _layer_call(spec, kinds.index(kind), inputs, attention, weights, kernels, shape)
        for kind in set(kinds)
    }
    table_sizes = _table_sizes(spec, dtype.itemsize, most_table_bytes)
    table = weights.read("", (table_sizes[-1], spec.hidden_size))
    calls["embedding"] = lambda: F.embedding(inputs.token_ids % len(table), table)
    heads = [("head", num_rows) for num_rows in table_sizes]
    for name in heads:
        calls[name] = _head_call(spec, inputs, weights, kernels, table[: name[1]])
    times_ms = stopwatch.least_ms(calls)
    return StageCosts(
        layers_ms=tuple(times_ms[kind] for kind in kinds),
        embedding_ms=times_ms["embedding"],
        head_ms=_head_ms(table_sizes, [times_ms[name] for name in heads], spec.vocab_size),
    )


def _table_sizes(spec: ModelSpec, itemsize: int, most_bytes: int | None) -> list[int]:
    """How many rows the head has each time that it is timed, ascending."""
    row_bytes = spec.hidden_size * itemsize
    if most_bytes is None or spec.vocab_size * row_bytes <= most_bytes:
        return [spec.vocab_size]
    most_rows = max(2, most_bytes // row_bytes)
    return [max(1, most_rows // _SMALLER_TABLE_SHARE), most_rows]


def _head_ms(table_sizes: list[int], times_ms: list[float], vocab_size: int) -> float:
    """The head's time with all rows, by a line through its times with `table_sizes` rows.

    Noise may not make a row cost less than nothing, nor more than if there were no fixed cost.
    """
    most_rows, most_ms = table_sizes[-1], times_ms[-1]
    if most_rows == vocab_size:
        return most_ms
    row_ms = (most_ms - times_ms[0]) / (most_rows - table_sizes[0])
    row_ms = min(max(0.0, row_ms), most_ms / most_rows)
    return most_ms + row_ms * (vocab_size - most_rows)


def _layer_call(
    spec: ModelSpec,
    layer: int,
    inputs: StepInputs,
    attention: AttentionBackend,
    weights: "_MadeUpWeights",
    kernels: LayerKernels,
    shape: AttentionShape,
) -> Callable[[], object]:
    kv_pool = KvPool([layer], shape, inputs.layout.page_indices.numel())
    for pages in kv_pool.pages(layer):
        pages.fill_(0.5)  # untouched pages would share one page of memory
    decoder_layer = DecoderLayer(spec, layer, weights, kernels)
    rotary = RotaryEmbedding(spec.rope, spec.head_dim, weights.device)
    rotation = rotary.at(inputs.positions)
    stream = weights.read("", (inputs.num_tokens, spec.hidden_size))
    return lambda: decoder_layer.forward(stream, rotation, inputs.slots, kv_pool, attention)


def _head_call(
    spec: ModelSpec,
    inputs: StepInputs,
    weights: "_MadeUpWeights",
    kernels: LayerKernels,
    table: torch.Tensor,
) -> Callable[[], object]:
    norm = RmsNorm(weights.read("", (spec.hidden_size,)), spec.norm_epsilon)
    head = OutputHead(norm, table, kernels)
    sampler = Sampler()
    rows = weights.read("", (len(inputs.sampling), spec.hidden_size))
    # Without the copy of the token ids to the host, which is none of the GPU's time.
    return lambda: sampler.draw(head(rows), inputs.sampling, inputs.sample_positions)


def _typical_inputs(spec: ModelSpec, page_size: int, device: torch.device) -> StepInputs:
    """A `TYPICAL_STEP`: decodes, each at the end of its context, and a chunk of another prompt."""
    context = min(TYPICAL_STEP.context_tokens, spec.context_length - 1)
    prompt = min(TYPICAL_STEP.prompt_tokens, spec.context_length - 1)
    pages_per_request = math.ceil((max(context, prompt) + 1) / page_size)
    chunks = []
    for number in range(TYPICAL_STEP.decodes + 1):
        is_decode = number < TYPICAL_STEP.decodes
        num_tokens = context + 1 if is_decode else prompt
        first_page = number * pages_per_request
        request = MirroredRequest(
            handle=number,
            sampling=SamplingSpec(seed=number),
            prompt_length=num_tokens,
            tokens=array("i", [number % spec.vocab_size]) * num_tokens,
            pages=array("i", range(first_page, first_page + pages_per_request)),
        )
        start = context if is_decode else 0
        chunks.append(MirroredChunk(request, start, num_tokens - start, samples=is_decode))
    return build_step_inputs(chunks, page_size, device)


class _MadeUpWeights:
    """A `WeightSource` whose tensors repeat some random numbers, as fast as memory is written."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.loaded: dict[str, int] = {}
        self.dtype = dtype
        self.device = device
        generator = torch.Generator().manual_seed(0)
        pattern = torch.empty(_PATTERN_LENGTH).normal_(0.0, 0.02, generator=generator)
        self._pattern = pattern.to(device, dtype)

    def has(self, name: str) -> bool:
        return False

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(math.prod(shape), dtype=self.dtype, device=self.device)
        for part in tensor.split(_PATTERN_LENGTH):
            part.copy_(self._pattern[: part.numel()])
        return tensor.view(shape)
