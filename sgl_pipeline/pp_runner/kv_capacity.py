"""How many KV pages a stage has room for.

Called by the stage worker when the stage's weights are loaded.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.messages import StageAssignment
from sgl_pipeline.pp_runner.cuda.graphed_layers import graph_memory_bytes
from sgl_pipeline.pp_runner.kernel_choice import choose_attention_backend, uses_graphs
from sgl_pipeline.pp_runner.kv_pool import kv_page_bytes
from sgl_pipeline.pp_runner.model_spec import ModelSpec

# The KV pool on a CPU, unless --max-total-tokens says otherwise: a fixed size and not a share of
# memory, so that two servers fit side by side.
DEFAULT_CPU_KV_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """How many pages a stage can hold, and the bytes of one (all layers of the stage)."""

    num_pages: int
    page_bytes: int


def kv_page_capacity(
    assignment: StageAssignment, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> KvCapacity:
    """How many KV pages this stage can hold. To be called when its weights are loaded.

    With `max_total_tokens` it is that many tokens, rounded down to pages; without it is a fixed
    number on a CPU, and on a GPU what `memory_fraction` of its memory leaves beside the weights,
    shared by the stages on it.

    Raises ConfigurationError when memory does not hold that, or not a single page.
    """
    shape = spec.attention_shape(assignment.page_size, dtype, device)
    num_layers = len(assignment.plan.layers_of(assignment.stage))
    page_bytes = kv_page_bytes(shape, num_layers)
    if device.type == "cuda":
        room_bytes = _cuda_room_bytes(assignment, device)
        if uses_graphs(
            assignment.graphs, choose_attention_backend(assignment.attention_backend, shape)
        ):
            room_bytes -= graph_memory_bytes(shape, spec, num_layers) + page_bytes
    else:
        # All stages measure before any allocates, and all take from the same memory.
        room_bytes = _cpu_room_bytes() * num_layers // assignment.plan.num_layers
    pages_that_fit = room_bytes // page_bytes
    tokens = assignment.max_total_tokens
    if tokens is None and device.type == "cpu":
        tokens = DEFAULT_CPU_KV_TOKENS
    num_pages = pages_that_fit if tokens is None else tokens // assignment.page_size
    if num_pages < 1 and pages_that_fit >= 1:
        raise ConfigurationError(
            f"--max-total-tokens {tokens} is less than one page of {assignment.page_size} tokens; "
            "raise it or lower --page-size"
        )
    if num_pages > pages_that_fit or num_pages < 1:
        raise ConfigurationError(_no_room_message(assignment, page_bytes, num_pages, room_bytes))
    return KvCapacity(num_pages, page_bytes)


def _no_room_message(
    assignment: StageAssignment, page_bytes: int, num_pages: int, room_bytes: int
) -> str:
    wanted_pages = max(1, num_pages)
    knob = "lower --max-total-tokens"
    if assignment.device == "cuda":
        knob += ", raise --mem-fraction-static or use more stages (--pp)"
    return (
        f"stage {assignment.stage} has room for {max(0, room_bytes) / 2**20:.0f} MiB of KV cache, "
        f"{wanted_pages * assignment.page_size} tokens need "
        f"{wanted_pages * page_bytes / 2**20:.0f} MiB; {knob}"
    )


def _cuda_room_bytes(assignment: StageAssignment, device: torch.device) -> int:
    """This stage's share of the GPU memory that may be used, less its weights."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    share_bytes = int(total_bytes * assignment.memory_fraction) // assignment.stages_on_gpu
    own_bytes = torch.cuda.memory_allocated(device)
    return min(share_bytes - own_bytes, int(free_bytes * assignment.memory_fraction))


def _cpu_room_bytes() -> int:
    """What the kernel says is available without swapping (MemAvailable, proc(5))."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise ConfigurationError("/proc/meminfo does not tell MemAvailable: Linux 3.14 or later needed")
