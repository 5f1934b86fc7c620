"""Chooses the kernels that a stage computes with: attention, layers, CUDA graphs.

A flag that names a kernel gets that kernel or an error; `auto` issues a notice if it had to take a
slower one. The choice never changes what the model computes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.attention.attention_backend import (
    AttentionBackend,
    AttentionShape,
    StageAttention,
)
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.base.kv_format import FP8
from sgl_pipeline.pp_runner.cpu_kernels.library import CPU_DTYPES, load_cpu_kernels
from sgl_pipeline.pp_runner.cuda.first_calls import (
    ONE_HEAD,
    call_layer_kernels,
    plan_decode_and_prefill,
)
from sgl_pipeline.pp_runner.cuda.graph_recorder import CudaGraphRecorder
from sgl_pipeline.pp_runner.cuda.graphed_layers import (
    GraphedLayers,
    graph_rows_of,
    mixed_rows_of,
)
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import FlashInferAttention
from sgl_pipeline.pp_runner.flashinfer.flashinfer_kernels import (
    FLASHINFER_DTYPES,
    FlashInferKernels,
)
from sgl_pipeline.pp_runner.flashinfer.kernel_builds import building_kernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.gpu_quantized import why_without_kernel
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec
from sgl_pipeline.pp_runner.model.moe import groups_stay_on_device
from sgl_pipeline.pp_runner.recorded_layers import RecordedLayers
from sgl_pipeline.pp_runner.step_layers import EagerLayers, StepLayers
from sgl_pipeline.pp_runner.weights.schemes import (
    Int4Scheme,
    Int8Scheme,
    Quantization,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Kernels by name; `notice` explains to the user why they are not the fast ones, if so."""

    name: str
    notice: str = ""


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """The decision to run steps from CUDA graphs or not; `notice` explains why not, if they might
    be expected."""

    is_on: bool
    notice: str = ""


def choose_attention_backend(name: str, shape: AttentionShape) -> BackendChoice:
    """The backend of `--stage-attention-backend name` for `shape`.

    `auto` is flashinfer on a GPU, and on a CPU the compiled kernels, or with a notice `torch` if
    they cannot be built. Raises ConfigurationError for a backend that cannot run there.
    """
    device, dtype = shape.device.type, shape.dtype
    if device == "cuda" and shape.coded_dtype not in (None, FP8):
        raise ConfigurationError(
            f"keys and values in {shape.coded_dtype} are for CPUs only; use --kv-cache-dtype "
            "fp8_e4m3, or leave it at auto"
        )
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


def make_attention_backend(
    choice: BackendChoice,
    shape: AttentionShape,
    prefill_kernels: str = "auto",
    num_threads: int | None = None,
) -> AttentionBackend:
    """The backend that `choose_attention_backend` chose for `shape`.

    Args:
        prefill_kernels: as `--stage-prefill-kernels`.
        num_threads: of the `cpu` backend; None: those of the stage's steps.

    Raises ConfigurationError when this machine does not have the backend or the prefill kernels.
    """
    if prefill_kernels != "auto" and choice.name != "flashinfer":
        raise ConfigurationError(
            f"--stage-prefill-kernels {prefill_kernels} chooses between FlashInfer's kernels, and "
            f"attention is {choice.name}; leave it at auto"
        )
    if choice.name == "cpu":
        return CpuAttention(shape, load_cpu_kernels(), num_threads=num_threads)
    if choice.name == "torch":
        return TorchAttention(shape)
    with building_kernels():
        attention = FlashInferAttention(shape, prefill_kernels)
        plan_decode_and_prefill(attention, shape)
    return attention


def make_stage_attention(
    choice: BackendChoice,
    shapes: Sequence[AttentionShape],
    prefill_kernels: str = "auto",
    num_threads: int | None = None,
) -> StageAttention:
    """The attention of a model's layers, of these `shapes`; see `make_attention_backend`."""
    return StageAttention(
        shapes, lambda shape: make_attention_backend(choice, shape, prefill_kernels, num_threads)
    )


def choose_graphs(
    name: str,
    attention: BackendChoice,
    shapes: Sequence[AttentionShape],
    has_experts: bool,
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
) -> GraphChoice:
    """The graphs of `--stage-graphs name` for a stage with this attention.

    A graph can hold only FlashInfer's attention, of one shape, and no copy to the host, which
    experts make on some GPUs: for them `auto` is off, with a notice.

    Args:
        shapes: of all layers of the model.
        has_experts: whether the stage has mixture-of-experts layers.
        capability_of: gives the compute capability of a GPU.
    """
    if name != "auto" or attention.name != "flashinfer":
        return GraphChoice(False)
    if len({*shapes}) > 1:
        return GraphChoice(
            False,
            "no CUDA graphs: the layers attend in more than one way; steps run kernel by kernel, "
            "which is slower",
        )
    if has_experts:
        device, dtype = shapes[0].device, shapes[0].dtype
        capability = capability_of(device)
        if not groups_stay_on_device(dtype, capability):
            major, minor = capability
            return GraphChoice(
                False,
                f"no CUDA graphs: torch multiplies {dtype} by experts without the host only "
                f"for bfloat16 on compute capability 9 or 10, and this GPU has {major}.{minor}; "
                "steps run kernel by kernel, which is slower",
            )
    return GraphChoice(True)


def make_step_layers(
    with_graphs: bool,
    epoch: int,
    layers: range,
    held_layers: HeldLayers,
    attention: StageAttention,
    shape: AttentionShape,
) -> StepLayers:
    """The way in which steps run `held_layers`, prepared for steps of `epoch`, which run `layers`.
    With graphs the pool must have a padding page, and all layers have `shape`."""
    backend = attention.any
    if isinstance(backend, CpuAttention) and held_layers.model.plain_steps is not None:
        return RecordedLayers(held_layers, attention)
    if not with_graphs:
        return EagerLayers(held_layers, attention)
    spec = held_layers.model.spec
    assert isinstance(backend, FlashInferAttention) and isinstance(spec, DecoderSpec)
    recorder = CudaGraphRecorder(shape.device)
    step_layers = GraphedLayers(
        held_layers, backend, shape, recorder, mixed_rows=mixed_rows_of(spec)
    )
    free_bytes, _ = torch.cuda.mem_get_info(shape.device)
    step_layers.prepare(epoch, layers)
    step_layers.record_all()
    taken_bytes = free_bytes - torch.cuda.mem_get_info(shape.device)[0]
    logger.info("the graphs took %d MiB of GPU memory", taken_bytes / 2**20)
    return step_layers


def choose_layer_kernels(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
) -> BackendChoice:
    """The layer kernels of `--stage-kernels name` for a model of `dtype` on `device`, with weights
    quantized by `quantization`.

    `auto` is `cpu` on a CPU, or with a notice `torch` if those cannot be built; on a GPU it is
    `flashinfer`, or `torch` for a dtype that has no kernel there. On a GPU quantized weights are
    multiplied in plain torch only where `torch` is named. Raises ConfigurationError for kernels
    that cannot run there.

    Args:
        capability_of: gives the compute capability of a GPU.
    """
    on_cpu = device.type == "cpu"
    if name != "torch" and not on_cpu and quantization is not None:
        _require_gpu_products(quantization, dtype, capability_of(device))
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


def make_layer_kernels(
    choice: BackendChoice,
    shape: AttentionShape | None = None,
    spec: ModelSpec | None = None,
) -> LayerKernels:
    """The kernels that `choose_layer_kernels` chose.

    Args:
        shape: of the keys and values that a GPU's kernels write, if known.
        spec: of the model whose layers may run from graphs; None: no layers do.

    Raises ConfigurationError when this machine does not have them.
    """
    if choice.name == "cpu":
        return CompiledKernels(load_cpu_kernels())
    if choice.name == "torch":
        return TorchKernels()
    with building_kernels():
        kernels = FlashInferKernels(tried_rows=() if spec is None else graph_rows_of(spec))
        call_layer_kernels(kernels, shape or ONE_HEAD)
    return kernels


def quantization_notice(
    choice: BackendChoice, quantization: Quantization | None, dtype: torch.dtype
) -> str:
    """The reason why products with such quantized weights are slow, if they are."""
    if quantization is None:
        return ""
    slow = f"products with weights of {quantization.method} run in plain torch, which is slow: "
    if choice.name == "flashinfer":
        return ""  # `choose_layer_kernels` has refused the slow ones
    if choice.name != "cpu":
        return slow + f"the layer kernels are {choice.name}"
    if dtype != torch.bfloat16:
        return slow + f"the compiled ones are for bfloat16, not {dtype}; use --dtype bfloat16"
    kernels = load_cpu_kernels()
    for _, scheme in quantization.groups:
        rounds_to_int8 = isinstance(scheme, Int8Scheme) or (
            isinstance(scheme, Int4Scheme) and scheme.rounds_rows
        )
        if not (kernels.has_int8_products if rounds_to_int8 else kernels.has_products):
            return slow + "the compiled ones need a CPU with avx2, fma and f16c"
    return ""


def _require_gpu_products(
    quantization: Quantization, dtype: torch.dtype, capability: tuple[int, int]
) -> None:
    for _, scheme in quantization.groups:
        if reason := why_without_kernel(scheme, dtype, capability):
            raise ConfigurationError(
                f"weights of {quantization.method} have no kernel here: {reason}; --stage-kernels "
                "torch multiplies with them in plain torch, which is slow"
            )


def _require_cpu_dtype(dtype: torch.dtype, flag: str) -> None:
    if dtype not in CPU_DTYPES:
        raise ConfigurationError(
            f"there is no compiled CPU kernel for {dtype}; use --dtype float32 or bfloat16, "
            f"or {flag} torch"
        )
