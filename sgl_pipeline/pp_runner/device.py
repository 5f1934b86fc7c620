"""What the machine offers a stage: device, cores, kernels, room for KV pages.

Called once by the stage worker, before and after it loads its weights. The only file that asks
whether there is a GPU; it never changes what the model computes.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.messages import StageAssignment
from sgl_pipeline.pp_runner.attention.backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.flashinfer_attention import FlashInferAttention
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.cpu_kernels.library import CPU_DTYPES, load_cpu_kernels
from sgl_pipeline.pp_runner.cuda.graph_recorder import CudaGraphRecorder
from sgl_pipeline.pp_runner.cuda.graphed_layers import GraphedLayers, graph_memory_bytes
from sgl_pipeline.pp_runner.cuda.input_staging import CopyBesideKernels, InputStaging
from sgl_pipeline.pp_runner.kv_pool import KvPool, kv_page_bytes
from sgl_pipeline.pp_runner.layer_kernels.backend import LayerKernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.flashinfer_kernels import (
    FLASHINFER_DTYPES,
    FlashInferKernels,
)
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model_spec import ModelSpec
from sgl_pipeline.pp_runner.stage_model import StageModel
from sgl_pipeline.pp_runner.step_inputs import Upload
from sgl_pipeline.pp_runner.step_layers import EagerLayers, StepLayers

logger = logging.getLogger(__name__)

# The KV pool on a CPU, unless --max-total-tokens says otherwise: a fixed size and not a share of
# memory, so that two servers fit side by side.
DEFAULT_CPU_KV_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """How many pages a stage can hold, and the bytes of one (all layers of the stage)."""

    num_pages: int
    page_bytes: int


def open_device(name: str, stage: int) -> torch.device:
    """The device of `stage` for `--device cpu|cuda`; stages share GPUs when there are too few.

    Raises ConfigurationError when the name is unknown or there is no such device.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ConfigurationError(f"--device {name!r} is not supported; choose cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "--device cuda: torch finds no NVIDIA GPU here (or is a CPU build); use --device cpu"
        )
    device = torch.device("cuda", stage % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def pin_threads(num_threads: int, cores: tuple[int, ...]) -> None:
    """Keeps this process on `cores` (all when empty) with `num_threads` compute threads."""
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise ConfigurationError(
                f"cannot pin a stage to the CPU cores {list(cores)}: {error.strerror}"
            ) from None
    torch.set_num_threads(num_threads)


def wait_for_device(device: torch.device) -> None:
    """Returns when all that was asked of the device is done; on a CPU it always is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Gives back what torch keeps of a GPU's memory for tensors that are gone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Kernels by name; `notice` tells the user why they are not the fast ones, if so."""

    name: str
    notice: str = ""


def choose_attention_backend(name: str, shape: AttentionShape) -> BackendChoice:
    """The backend that `--stage-attention-backend name` means for `shape`.

    `auto` is flashinfer on a GPU, and on a CPU the compiled kernels, or with a notice `torch` where
    they cannot be built. Raises ConfigurationError for a backend that cannot run there.
    """
    device, dtype = shape.device.type, shape.dtype
    if name == "auto" and device == "cuda":
        return BackendChoice("flashinfer")
    if name == "auto":
        try:
            _require_cpu_dtype(dtype, "--stage-attention-backend")
            load_cpu_kernels()
        except ConfigurationError as error:
            return BackendChoice(
                "torch", f"attention runs in plain torch, which is slower: {error}"
            )
        return BackendChoice("cpu")
    if name == "cpu":
        _require_cpu_dtype(dtype, "--stage-attention-backend")
    needed = {"flashinfer": "cuda", "cpu": "cpu", "torch": device}.get(name)
    if needed is None:
        raise ConfigurationError(
            f"--stage-attention-backend {name!r} is unknown; choose from auto, flashinfer, cpu, "
            "torch"
        )
    if device != needed:
        raise ConfigurationError(
            f"--stage-attention-backend {name} needs --device {needed}, this is {device}"
        )
    return BackendChoice(name)


def make_attention_backend(choice: BackendChoice, shape: AttentionShape) -> AttentionBackend:
    """The backend that `choose_attention_backend` chose for `shape`.

    Raises ConfigurationError when it cannot be had on this machine.
    """
    if choice.name == "cpu":
        return CpuAttention(shape, load_cpu_kernels())
    if choice.name == "torch":
        return TorchAttention(shape)
    return FlashInferAttention(shape)


def uses_graphs(name: str, attention: BackendChoice) -> bool:
    """Whether `--stage-graphs name` means CUDA graphs, which hold no other attention than
    FlashInfer's."""
    return name == "auto" and attention.name == "flashinfer"


def make_step_layers(
    with_graphs: bool,
    epoch: int,
    model: StageModel,
    kv_pool: KvPool,
    attention: AttentionBackend,
    shape: AttentionShape,
) -> StepLayers:
    """The layers of `model` on the pages of `kv_pool`; graphs are those of `epoch` at first."""
    if not with_graphs:
        return EagerLayers(model, kv_pool, attention)
    assert isinstance(attention, FlashInferAttention)
    recorder = CudaGraphRecorder(shape.device)
    layers = GraphedLayers(model, kv_pool, attention, shape, recorder)
    free_bytes, _ = torch.cuda.mem_get_info(shape.device)
    layers.capture_all(epoch)
    taken_bytes = free_bytes - torch.cuda.mem_get_info(shape.device)[0]
    logger.info("the graphs took %d MiB of GPU memory", taken_bytes / 2**20)
    return layers


def choose_layer_kernels(name: str, dtype: torch.dtype, device: torch.device) -> BackendChoice:
    """The layer kernels that `--stage-kernels name` means for a model of `dtype` on `device`.

    `auto` is `cpu` on a CPU, or with a notice `torch` where that cannot be built; on a GPU it is
    `flashinfer`, or `torch` for a dtype that has no kernel there. Raises ConfigurationError for
    kernels that cannot run there.
    """
    on_cpu = device.type == "cpu"
    if name == "auto" and not on_cpu:
        name = "flashinfer" if dtype in FLASHINFER_DTYPES else "torch"
    if name == "torch":
        return BackendChoice("torch")
    if name not in ("auto", "cpu", "flashinfer"):
        raise ConfigurationError(
            f"--stage-kernels {name!r} is unknown; choose from auto, flashinfer, cpu, torch"
        )
    if on_cpu is (name == "flashinfer"):
        needed = "cuda" if on_cpu else "cpu"
        raise ConfigurationError(
            f"--stage-kernels {name} needs --device {needed}, this is {device.type}; choose auto "
            "or torch"
        )
    if name == "flashinfer":
        if dtype not in FLASHINFER_DTYPES:
            raise ConfigurationError(
                f"flashinfer has no layer kernels for {dtype}; use --dtype bfloat16 or float16, or "
                "--stage-kernels torch"
            )
        return BackendChoice("flashinfer")
    try:
        _require_cpu_dtype(dtype, "--stage-kernels")
        load_cpu_kernels()
    except ConfigurationError as error:
        if name == "cpu":
            raise
        return BackendChoice("torch", f"layers run in plain torch, which is slower: {error}")
    return BackendChoice("cpu")


def make_layer_kernels(choice: BackendChoice) -> LayerKernels:
    """The kernels that `choose_layer_kernels` chose.

    Raises ConfigurationError when they cannot be had on this machine.
    """
    if choice.name == "cpu":
        return CompiledKernels(load_cpu_kernels())
    return FlashInferKernels() if choice.name == "flashinfer" else TorchKernels()


def make_upload(device: torch.device) -> Upload | None:
    """How a step's index tensors come to `device`; None where they need not move."""
    return InputStaging(CopyBesideKernels(device)) if device.type == "cuda" else None


def _require_cpu_dtype(dtype: torch.dtype, flag: str) -> None:
    if dtype not in CPU_DTYPES:
        raise ConfigurationError(
            f"there is no compiled CPU kernel for {dtype}; use --dtype float32 or bfloat16, "
            f"or {flag} torch"
        )


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
    num_devices = torch.cuda.device_count()
    own_device = assignment.stage % num_devices
    num_sharing = len(range(own_device, assignment.plan.num_stages, num_devices))
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    share_bytes = int(total_bytes * assignment.memory_fraction) // num_sharing
    own_bytes = torch.cuda.memory_allocated(device)
    return min(share_bytes - own_bytes, int(free_bytes * assignment.memory_fraction))


def _cpu_room_bytes() -> int:
    """What the kernel says is available without swapping (MemAvailable, proc(5))."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise ConfigurationError("/proc/meminfo does not tell MemAvailable: Linux 3.14 or later needed")
