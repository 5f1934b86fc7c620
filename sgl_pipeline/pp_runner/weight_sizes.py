"""The bytes of a model's weights, part by part, before any is read.

The parts are made by the code that loads a stage, from tensors of torch's meta device, which have
sizes and no memory: quantized as a stage quantizes them, and without the tensors of a checkpoint
that no stage reads.
"""

from collections.abc import Iterable

import torch

from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.made_up_weights import MadeUpWeights
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel


class WeightSizes:
    """The sizes of the model `spec` with weights of `dtype`, where they are not quantized."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype
        kinds = [spec.layer_kind(layer) for layer in range(spec.num_layers)]
        of_kinds = {kind: self._of_parts((kinds.index(kind),)) for kind in dict.fromkeys(kinds)}
        self._of_layers = [of_kinds[kind] for kind in kinds]

    def of_stage(self, layers: Iterable[int], *, is_first: bool, is_last: bool) -> int:
        """Bytes of a stage with `layers`, and with the model's ends if it has them."""
        ends = self._of_parts((), is_first=is_first, is_last=is_last)
        return sum(self._of_layers[layer] for layer in layers) + ends

    def _of_parts(
        self, layers: Iterable[int], *, is_first: bool = False, is_last: bool = False
    ) -> int:
        device = torch.device("meta")
        model = NativeStageModel.build(
            self._spec,
            MadeUpWeights(self._dtype, device),
            device=device,
            kernels=TorchKernels(),
            layers=layers,
            is_first=is_first,
            is_last=is_last,
        )
        return model.weight_bytes
