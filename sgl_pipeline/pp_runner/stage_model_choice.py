"""Chooses the code that computes a stage's layers, by the spec of the model.

The generic backend is imported only where it is chosen: it needs transformers, whose import takes
seconds and hundreds of MiB.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.model.stage_model import StageModel
from sgl_pipeline.pp_runner.weights.checkpoint import weight_opener


def load_stage_model(
    spec: ModelSpec,
    path: str | Path,
    *,
    layers: Iterable[int],
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LayerKernels,
    load_format: str = "safetensors",
    on_read: Callable[[], None] = lambda: None,
) -> StageModel:
    """Reads the tensors of `layers`, and of embedding or head if the stage has them; `on_read` is
    called before each.

    Raises CheckpointError, which names file and tensor, when one does not fit the spec, and
    UnsupportedModelError when transformers' code of the model fails a probe.
    """
    open_source = weight_opener(path, load_format, dtype, device)
    if isinstance(spec, GenericSpec):
        from sgl_pipeline.pp_runner.model.generic.generic_stage import GenericStageModel

        return GenericStageModel(
            spec,
            path,
            open_source,
            dtype=dtype,
            device=device,
            kernels=kernels,
            layers=layers,
            is_first=is_first,
            is_last=is_last,
            on_read=on_read,
        )
    assert isinstance(spec, DecoderSpec)
    return NativeStageModel(
        spec,
        open_source,
        device=device,
        kernels=kernels,
        layers=layers,
        is_first=is_first,
        is_last=is_last,
        on_read=on_read,
    )
