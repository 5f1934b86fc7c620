"""The numbers of KV pages and state slots that a stage has room for beside its weights."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.host_memory import available_memory_bytes
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.kv_pool import kv_page_bytes, largest_page_bytes
from sgl_pipeline.pp_runner.base.layer_counts import most_layers
from sgl_pipeline.pp_runner.cuda.gpu_memory import (
    CardMemory,
    KvRoom,
    StageNeeds,
    kv_room,
    stage_needs,
)
from sgl_pipeline.pp_runner.cuda.graphed_layers import graph_memory_bytes
from sgl_pipeline.pp_runner.device import release_memory
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import workspace_bytes
from sgl_pipeline.pp_runner.kernel_choice import choose_attention_backend, choose_graphs
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec
from sgl_pipeline.wire.stage_messages import StageAssignment

logger = logging.getLogger(__name__)

# The KV pool on a CPU, unless --max-total-tokens says otherwise: a fixed size and not a share of
# memory, so that two servers fit side by side.
DEFAULT_CPU_KV_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Number of pages that a stage can hold, and the bytes of one (all layers of the stage; 0 where
    all of them have states); and number of state slots that it can hold beside them."""

    num_pages: int
    page_bytes: int
    num_state_slots: int = 0


def measure_card(device: torch.device) -> CardMemory:
    """The memory of a GPU.

    First gives back memory that torch keeps for tensors that are gone: loading leaves such memory.
    """
    release_memory(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return CardMemory(total_bytes, free_bytes, torch.cuda.memory_reserved(device))


def usable_memory_bytes(assignment: StageAssignment, device: torch.device) -> int:
    """Bytes that a stage may fill with weights and pages, before it has any: on a GPU its share, on
    a CPU all available memory, from which all of the host's stages take."""
    if device.type == "cuda":
        card = measure_card(device)
        share_bytes = int(card.total_bytes * assignment.args.memory_fraction)
        return min(share_bytes, card.free_bytes) // assignment.stages_on_gpu
    return available_memory_bytes()


def kv_page_capacity(
    assignment: StageAssignment,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    measure: Callable[[torch.device], CardMemory] = measure_card,
    *,
    layer_bytes: int = 0,
) -> KvCapacity:
    """Number of KV pages that this stage can hold, with as many layers as it may ever hold at once.
    To be called when its weights are loaded.

    With `max_total_tokens` they hold this many tokens, rounded down to pages; without it their
    number is fixed on a CPU, and on a GPU they fill the room of `gpu_memory.kv_room`. The states of
    all slots take their memory first. Where fewer pages do and memory does not hold both, slots and
    pages get the same share of what they ask for, one slot and one page at least.

    Args:
        layer_bytes: bytes of the weights of a layer that may come.

    Raises ConfigurationError when memory does not hold that, or not a single page.
    """
    args = assignment.args
    shapes = spec.attention_shapes(assignment.page_size, dtype, device, args.kv_cache_dtype)
    num_layers = assignment.max_layers or len(assignment.plan.layers_of(assignment.stage))
    page_bytes, slot_bytes = _bytes_of_one(assignment, spec, shapes)
    room = _room(assignment, spec, shapes, measure, num_layers, layer_bytes)
    tokens = args.max_total_tokens
    if tokens is None and device.type == "cpu":
        tokens = DEFAULT_CPU_KV_TOKENS
    num_slots = args.num_state_slots if spec.has_states else 0
    if slot_bytes:
        assert tokens is not None, "StageArgs refuse states on a GPU"
        if assignment.fewer_pages_do:
            wanted_bytes = num_slots * slot_bytes + tokens // assignment.page_size * page_bytes
            share = min(1.0, room.num_bytes / wanted_bytes)
            num_slots = max(1, int(num_slots * share))
        room = KvRoom(room.num_bytes - num_slots * slot_bytes, has_more=False)
    if page_bytes:
        pages_that_fit = room.num_bytes // page_bytes
    else:  # of layers with states alone, which fit or do not
        assert tokens is not None, "StageArgs refuse states on a GPU"
        pages_that_fit = tokens // assignment.page_size if room.num_bytes >= 0 else 0
    num_pages = pages_that_fit if tokens is None else tokens // assignment.page_size
    if assignment.fewer_pages_do:
        num_pages = min(num_pages, max(1, pages_that_fit))
    if num_pages < 1 and pages_that_fit >= 1:
        raise ConfigurationError(
            f"--max-total-tokens {tokens} is less than one page of {assignment.page_size} tokens; "
            "raise it or lower --page-size"
        )
    if num_pages > pages_that_fit or num_pages < 1:
        message = _no_room_message(assignment, page_bytes, num_pages, room)
        if slot_bytes:
            message += (
                f". Beside it {num_slots} state slots take {num_slots * slot_bytes / 2**20:.0f} "
                "MiB; lower --max-mamba-cache-size"
            )
        raise ConfigurationError(message)
    return KvCapacity(num_pages, page_bytes, num_slots)


def _bytes_of_one(
    assignment: StageAssignment, spec: ModelSpec, shapes: Sequence[AttentionShape]
) -> tuple[int, int]:
    """Bytes of a page and of a state slot in all of the stage's layers, with those that may
    come."""
    layers = assignment.plan.layers_of(assignment.stage)
    have_states = [one is not None for one in spec.states]
    num_states = sum(have_states[layer] for layer in layers)
    page_bytes = kv_page_bytes(shapes, layers)
    if assignment.max_layers:
        most = most_layers(have_states, assignment.max_layers)
        num_states = most.with_states
        page_bytes = most.with_pages * largest_page_bytes(shapes)
    state_bytes = 0 if spec.state is None else spec.state.bytes_per_slot(assignment.args.dtype)
    return page_bytes, num_states * state_bytes


def _room(
    assignment: StageAssignment,
    spec: ModelSpec,
    shapes: Sequence[AttentionShape],
    measure: Callable[[torch.device], CardMemory],
    num_layers: int,
    layer_bytes: int,
) -> KvRoom:
    """The room for the pages and states of `num_layers` layers, beside the weights of those that
    may come, of `layer_bytes` each."""
    plan = assignment.plan
    if shapes[0].device.type == "cuda":
        assert isinstance(spec, DecoderSpec), "StageArgs refuse the others on a GPU"
        weights_here = len(plan.layers_of(assignment.stage)) + len(assignment.spare_layers)
        reserved_bytes = max(0, num_layers - weights_here) * layer_bytes
        return _gpu_room(assignment, spec, shapes, measure, num_layers, reserved_bytes)
    # All stages measure before any allocates, and all take from the same memory. Pages of a layer
    # take the same memory on any stage.
    share_bytes = available_memory_bytes() * num_layers // plan.num_layers
    return KvRoom(share_bytes, has_more=False)


def _no_room_message(
    assignment: StageAssignment, page_bytes: int, num_pages: int, room: KvRoom
) -> str:
    wanted_pages = max(1, num_pages)
    on_gpu = assignment.args.device == "cuda"
    knobs = []
    if assignment.args.max_total_tokens is not None or not on_gpu:
        knobs.append("lower --max-total-tokens")
    if room.has_more:
        knobs.append("raise --mem-fraction-static")
    if on_gpu:
        knobs.append("spread the model over more GPUs (--pp)")
    return (
        f"stage {assignment.stage} has room for {max(0, room.num_bytes) / 2**20:.0f} MiB of KV "
        f"cache, {wanted_pages * assignment.page_size} tokens need "
        f"{wanted_pages * page_bytes / 2**20:.0f} MiB; {', or '.join(knobs)}"
    )


def _gpu_room(
    assignment: StageAssignment,
    spec: DecoderSpec,
    shapes: Sequence[AttentionShape],
    measure: Callable[[torch.device], CardMemory],
    num_layers: int,
    reserved_bytes: int,
) -> KvRoom:
    """The room for the pages of `num_layers` layers, beside `reserved_bytes` of future weights."""
    stage, plan = assignment.stage, assignment.plan
    layers, shape = plan.layers_of(stage), shapes[0]
    attention = choose_attention_backend(assignment.args.attention_backend, shape)
    has_experts = any(spec.layer_has_experts(layer) for layer in layers)
    has_graphs = choose_graphs(assignment.args.graphs, attention, shapes, has_experts).is_on
    if has_graphs:
        attention_bytes = graph_memory_bytes(shape, spec, num_layers)
        attention_bytes += num_layers * shape.page_bytes
    else:
        attention_bytes = workspace_bytes(shape) if attention.name == "flashinfer" else 0
    needs = stage_needs(
        spec,
        shape.dtype.itemsize,
        attention_bytes=attention_bytes,
        stage=stage,
        num_stages=plan.num_stages,
        has_nccl=any(link.startswith("nccl:") for link in assignment.links),
    )
    card, num_sharing = measure(shape.device), assignment.stages_on_gpu
    # As if the layers that may come had been loaded.
    card = card._replace(
        free_bytes=card.free_bytes - reserved_bytes,
        reserved_bytes=card.reserved_bytes + reserved_bytes,
    )
    room = kv_room(card, needs, assignment.args.memory_fraction, num_sharing)
    _log(card, needs, room, num_sharing)
    return room


def _log(card: CardMemory, needs: StageNeeds, room: KvRoom, num_sharing: int) -> None:
    numbers = (
        card.total_bytes,
        card.free_bytes,
        card.reserved_bytes,
        needs.attention_bytes,
        needs.link_bytes,
        needs.layer_bytes,
        needs.head_bytes,
        room.num_bytes,
    )
    logger.info(
        "GPU memory in MiB: %d, %d of it free; this stage has %d of weights, keeps %d for "
        "attention and graphs, %d for links, %d for layers, %d for head and sampler, and has room "
        "for %d of KV cache; stages on this GPU: %d",
        *(number / 2**20 for number in numbers),
        num_sharing,
    )
