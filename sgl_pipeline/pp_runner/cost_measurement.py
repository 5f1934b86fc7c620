"""Times the parts of a model on this worker: a layer of each kind, the embedding and the head.

Called by the stage worker before it knows its stage, for `--pp-layer-partition auto`. The weights
are made up: no product's time depends on them. Decides nothing: `migration/` does.
"""

import math
import time
from array import array
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.nn.functional as F

from sgl_pipeline.messages import StageAssignment
from sgl_pipeline.pp_runner.attention.backend import AttentionBackend
from sgl_pipeline.pp_runner.decoder import DecoderLayer
from sgl_pipeline.pp_runner.device import open_device, pin_threads, release_memory, wait_for_device
from sgl_pipeline.pp_runner.kernel_choice import (
    choose_attention_backend,
    choose_layer_kernels,
    make_attention_backend,
    make_layer_kernels,
)
from sgl_pipeline.pp_runner.kv_pool import KvPool
from sgl_pipeline.pp_runner.layer_kernels.backend import LayerKernels, RmsNorm
from sgl_pipeline.pp_runner.model_spec import ModelSpec, read_model_spec
from sgl_pipeline.pp_runner.rotary import RotaryEmbedding
from sgl_pipeline.pp_runner.sampler import Sampler
from sgl_pipeline.pp_runner.stage_model import OutputHead
from sgl_pipeline.pp_runner.step_inputs import StepInputs, build_step_inputs
from sgl_pipeline.requests import SamplingSpec
from sgl_pipeline.stage_costs import TYPICAL_STEP, StageCosts
from sgl_pipeline.step_plan import MirroredChunk, MirroredRequest

# Head and embedding of a large vocabulary are timed on a part of it, which no cache holds either.
_MOST_TABLE_BYTES = 64 * 2**20
# Read before each call: a stage's other layers would have put this one's weights out of the caches.
_CACHE_BYTES = 64 * 2**20
_MOST_ROUNDS, _FEWEST_ROUNDS = 7, 3
_TIME_LIMIT_S = 0.3
# Odd, so that the rows of a matrix (of a router, say) differ although they repeat it.
_PATTERN_LENGTH = 1_000_003


def measure_stage_costs(assignment: StageAssignment) -> StageCosts:
    """Milliseconds of a `TYPICAL_STEP` in each part of the model of `assignment`, whose stage and
    plan do not matter but for the device.

    Raises ConfigurationError as loading the stage would.
    """
    pin_threads(assignment.cpu_threads, assignment.cpu_cores)
    device = open_device(assignment.device, assignment.gpu)
    costs = _measure(assignment, device)
    release_memory(device)  # of what was made up; the weights need the room
    return costs


@torch.inference_mode()
def _measure(assignment: StageAssignment, device: torch.device) -> StageCosts:
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
        kind: _layer_call(
            spec, kinds.index(kind), inputs, attention, weights, kernels, assignment.page_size
        )
        for kind in set(kinds)
    }
    num_table_rows = min(
        spec.vocab_size, max(1, _MOST_TABLE_BYTES // (spec.hidden_size * dtype.itemsize))
    )
    table = weights.read("", (num_table_rows, spec.hidden_size))
    calls["embedding"] = lambda: F.embedding(inputs.token_ids % num_table_rows, table)
    calls["head"] = _head_call(spec, inputs, weights, kernels, table)
    clock = time.thread_time if _runs_on_one_thread(assignment) else time.perf_counter
    times_ms = _median_ms(calls, clock, device)
    return StageCosts(
        layers_ms=tuple(times_ms[kind] for kind in kinds),
        embedding_ms=times_ms["embedding"],
        head_ms=times_ms["head"] * spec.vocab_size / num_table_rows,
    )


def _layer_call(
    spec: ModelSpec,
    layer: int,
    inputs: StepInputs,
    attention: AttentionBackend,
    weights: "_MadeUpWeights",
    kernels: LayerKernels,
    page_size: int,
) -> Callable[[], object]:
    kv_pool = KvPool(
        [layer],
        num_pages=inputs.layout.page_indices.numel(),
        page_size=page_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=weights.dtype,
        device=weights.device,
    )
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
    return lambda: sampler.sample(head(rows), inputs.sampling, inputs.sample_positions)


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


def _median_ms(
    calls: Mapping[object, Callable[[], object]],
    clock: Callable[[], float],
    device: torch.device,
) -> dict[object, float]:
    """The median time of each call. They take turns, and the first round is not counted."""
    others = torch.ones(_CACHE_BYTES // 4, device=device)
    times_ms: dict[object, list[float]] = {name: [] for name in calls}
    started_s = time.perf_counter()
    for number in range(_MOST_ROUNDS + 1):
        if number > _FEWEST_ROUNDS and time.perf_counter() - started_s > _TIME_LIMIT_S:
            break
        for name, call in calls.items():
            others.sum()
            wait_for_device(device)
            start_s = clock()
            call()
            wait_for_device(device)
            if number > 0:
                times_ms[name].append((clock() - start_s) * 1e3)
    return {name: median(times) for name, times in times_ms.items()}


def _runs_on_one_thread(assignment: StageAssignment) -> bool:
    """Then its CPU time can be taken, from which the neighbours on the same core take nothing."""
    return assignment.device == "cpu" and assignment.cpu_threads == 1


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
