"""What a stage worker has of its stage before it knows how many pages there are: weights, a device.

Called by `stage_worker.py`, when the worker gets its stage, and again when it is given another one:
then the weights of the layers that it has already stay where they are, and the others come from the
checkpoint.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.messages import StageAssignment
from sgl_pipeline.pp_runner.attention.backend import AttentionShape
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
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.model.stage_model import LoadedLayer, StageModel


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """The weights of a stage, with those of `spare` layers, and the pages that fit beside them.
    `rows` is what a link to a neighbor carries, `shape` what a page holds; `notice`, if any, is for
    the user."""

    model: StageModel
    spare: Sequence[LoadedLayer]
    kernels: BackendChoice
    notice: str | None
    rows: ActivationShape
    shape: AttentionShape
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
        before: what the worker has of another stage, whose pages are gone; it is not to be used
            any more.
        on_read: called before each tensor is read.
        on_layer: called when a layer that the stage begins with has been read.

    Raises ConfigurationError when memory does not hold it.
    """
    device = open_device(assignment.device, assignment.gpu)
    dtype = getattr(torch, assignment.dtype)
    spec = read_model_spec(assignment.model_path, assignment.quantization)
    stage, plan = assignment.stage, assignment.plan
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    kernels = choose_layer_kernels(assignment.layer_kernels, dtype, device)
    if before is None:
        model = StageModel.load(
            spec,
            assignment.model_path,
            layers=_counted(plan.layers_of(stage), on_layer),
            is_first=is_first,
            is_last=is_last,
            dtype=dtype,
            device=device,
            kernels=make_layer_kernels(kernels),
            load_format=assignment.load_format,
            on_read=on_read,
        )
    else:
        model = before.model
        _take_over(assignment, model, device, on_read)
    spare = [model.read_layer(layer, on_read) for layer in assignment.spare_layers]
    return LoadedStage(
        model,
        spare,
        kernels,
        quantization_notice(kernels, spec.quantization, dtype),
        ActivationShape(spec.hidden_size, dtype, device),
        spec.attention_shape(assignment.page_size, dtype, device),
        kv_page_capacity(assignment, spec, device, dtype, layer_bytes=model.largest_layer_bytes),
    )


def _counted(layers: Iterable[int], on_layer: Callable[[], None]) -> Iterator[int]:
    """Calls `on_layer` when whoever takes `layers` is done with one."""
    for layer in layers:
        yield layer
        on_layer()


def _take_over(
    assignment: StageAssignment,
    model: StageModel,
    device: torch.device,
    on_read: Callable[[], None],
) -> None:
    """Has `model` hold the layers of the new stage, if they fit."""
    stage, plan = assignment.stage, assignment.plan
    layers = plan.layers_of(stage)
    gc.collect()  # the runner of before, with its pages
    release_memory(device)
    num_missing = len({*layers} - {*model.layers})
    needed_bytes = num_missing * model.largest_layer_bytes
    room_bytes = usable_memory_bytes(assignment, device)
    if needed_bytes > room_bytes:
        raise ConfigurationError(
            f"no room for {num_missing} more layers of {needed_bytes / 2**20:.0f} MiB in all: "
            f"{room_bytes / 2**20:.0f} MiB are left"
        )
    try:
        is_last = stage == plan.num_stages - 1
        model.take_over(layers, is_first=stage == 0, is_last=is_last, on_read=on_read)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(f"no room for {num_missing} more layers: {error}") from None
