"""Loads a worker's stage as far as it can before the number of pages is known: weights, a device.

A worker loads when it gets its stage, and again when it is given another one: then weights of
layers that it already has stay in place, and the others come from the checkpoint.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.compute_threads import bind_compute_threads
from sgl_pipeline.pp_runner.device import open_device, release_memory
from sgl_pipeline.pp_runner.kernel_choice import (
    BackendChoice,
    choose_layer_kernels,
    make_layer_kernels,
    quantization_notice,
)
from sgl_pipeline.pp_runner.kv_capacity import (
    KvCapacity,
    kv_page_capacity,
    usable_memory_bytes,
)
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.model.stage_model import LoadedLayer, StageModel
from sgl_pipeline.pp_runner.stage_model_choice import load_stage_model
from sgl_pipeline.pp_runner.stage_spec import stage_spec
from sgl_pipeline.wire.stage_messages import StageAssignment


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """The weights of a stage, with those of `spare` layers, and the pages that fit beside them.
    `rows` is the shape of rows on the links, `shapes` those of all layers' attention; `notice`, if
    any, is for the user."""

    model: StageModel
    spare: Sequence[LoadedLayer[Any]]
    kernels: BackendChoice
    notice: str | None
    rows: ActivationShape
    shapes: Sequence[AttentionShape]
    capacity: KvCapacity

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes + sum(layer.weight_bytes for layer in self.spare)


def load_stage(
    assignment: StageAssignment,
    before: LoadedStage | None = None,
    on_read: Callable[[], None] = lambda: None,
    on_layer: Callable[[], None] = lambda: None,
) -> LoadedStage:
    """Loads the stage of `assignment`.

    Args:
        before: the worker's parts of another stage, whose pages are gone; must not be used
            afterwards.
        on_read: called before each tensor is read.
        on_layer: called when a layer of the stage has been read.

    Raises ConfigurationError when memory does not hold it.
    """
    args = assignment.args
    device = open_device(args.device, assignment.gpu)
    dtype = getattr(torch, args.dtype)
    spec = stage_spec(args)
    stage, plan = assignment.stage, assignment.plan
    kernels = choose_layer_kernels(args.layer_kernels, dtype, device, spec.quantization)
    shapes = spec.attention_shapes(assignment.page_size, dtype, device, args.kv_cache_dtype)
    if not quantization_notice(kernels, spec.quantization, dtype):
        bind_compute_threads(kernels.name, dtype, assignment.cpu_threads, assignment.cpu_cores)
    if before is None:
        # The first layer's size is known after reading it; check that the rest fit.
        model: StageModel = load_stage_model(
            spec,
            args.model_path,
            layers=plan.layers_of(stage)[:1],
            is_first=False,
            is_last=False,
            dtype=dtype,
            device=device,
            kernels=make_layer_kernels(kernels, shapes[0], spec),
            load_format=args.load_format,
            on_read=on_read,
        )
        on_layer()
    else:
        model = before.model
    _take_over(assignment, model, device, dtype, on_read, on_layer, is_fresh=before is None)
    spare = [model.read_layer(layer, on_read) for layer in assignment.spare_layers]
    return LoadedStage(
        model,
        spare,
        kernels,
        quantization_notice(kernels, spec.quantization, dtype),
        ActivationShape(spec.hidden_size, dtype, device),
        shapes,
        kv_page_capacity(assignment, spec, device, dtype, layer_bytes=model.largest_layer_bytes),
    )


def _take_over(
    assignment: StageAssignment,
    model: StageModel,
    device: torch.device,
    dtype: torch.dtype,
    on_read: Callable[[], None],
    on_layer: Callable[[], None],
    *,
    is_fresh: bool,
) -> None:
    """Makes `model` hold the layers of its stage and the ends that go with them, if they fit. On a
    CPU this is checked before each part: other stages of the host may load at the same time.
    """
    stage, plan = assignment.stage, assignment.plan
    layers, is_first, is_last = plan.layers_of(stage), stage == 0, stage == plan.num_stages - 1
    layer_bytes = model.largest_layer_bytes
    end_bytes = model.spec.vocab_size * model.spec.hidden_size * dtype.itemsize

    def require_room() -> None:
        nonlocal layer_bytes
        layer_bytes = max(layer_bytes, model.largest_layer_bytes)
        num_missing = len({*layers} - {*model.layers})
        num_ends = (is_first and not model.is_first) + (is_last and not model.is_last)
        if model.spec.tied_embeddings:
            num_ends = min(num_ends, 1)
        needed_bytes = num_missing * layer_bytes + num_ends * end_bytes
        room_bytes = usable_memory_bytes(assignment, device)
        if needed_bytes > room_bytes:
            what = f"{num_missing} more layers" if num_missing else "embedding or head"
            raise ConfigurationError(
                f"no room for {what} of {needed_bytes / 2**20:.0f} MiB in all: "
                f"{room_bytes / 2**20:.0f} MiB are left on the "
                f"{'host' if is_on_host else 'GPU'} of stage {stage}; use more stages (--pp), or "
                "end what else takes its memory"
            )

    # On a full host a process is killed. A full GPU raises an error, and its share left by other
    # stages does not limit a stage that loads with them.
    is_on_host = device.type == "cpu"
    if not is_fresh:
        gc.collect()  # the runner of before, with its pages
        release_memory(device)
    if not (is_on_host or is_fresh):
        require_room()
    try:
        model.take_over(
            layers,
            is_first=is_first,
            is_last=is_last,
            on_read=on_read,
            on_layer=on_layer,
            before_part=require_room if is_on_host else lambda: None,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(f"no room for the layers of stage {stage}: {error}") from None
