"""A stage on torch's meta device, where tensors have a shape and a memory size but no numbers.

It takes the branches of a GPU, costs no time at any size, and fails where a number is read.
"""

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import torch

from sgl_pipeline.pp_runner.attention.attention_backend import SameAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.kv_format import FP8
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout, StepInputs, build_step_inputs
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model import moe
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.wire.step_order import MirroredChunk

META = torch.device("meta")
PAGE_SIZE = 4


class QueriesAsTheyAre:
    """Stands in for the attention, whose kernels on a GPU are no operators of torch."""

    def plan(self, layout: PagedLayout) -> None:
        pass

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return query.clone()


class RoundingWithoutNumbers:
    """Stands in for a GPU's rounding: makes what its kernels write to, and nothing else."""

    def to_fp8(
        self, x: torch.Tensor, group_size: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = torch.empty(-(-x.shape[1] // group_size), num_rows, device=x.device).t()
        return torch.empty(num_rows, x.shape[1], dtype=FP8, device=x.device), scales

    def to_int8(self, x: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty(num_rows, x.shape[1], dtype=torch.int8, device=x.device)
        return values, torch.empty(num_rows, device=x.device)

    def append_fp8(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        pass


class WeightsWithoutNumbers:
    """A `WeightSource` of bf16 tensors."""

    def __init__(self) -> None:
        self.loaded: dict[str, int] = {}

    def has(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)


class NumberlessStage:
    """All of a model in one stage, in bf16, as a GPU would have it."""

    def __init__(self, spec: DecoderSpec, num_pages: int = 64) -> None:
        with patch.object(moe, "experts_of", lambda device: moe.StackedExperts):
            self.model = NativeStageModel.build(
                spec,
                WeightsWithoutNumbers(),
                device=META,
                kernels=TorchKernels(),
                layers=range(spec.num_layers),
                is_first=True,
                is_last=True,
            )
        layers = range(spec.num_layers)
        shapes = spec.attention_shapes(PAGE_SIZE, torch.bfloat16, META)
        self._held_layers = HeldLayers(self.model, KvPool(layers, shapes, num_pages))

    def inputs(self, chunks: Sequence[MirroredChunk]) -> StepInputs:
        def upload(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
            return [torch.from_numpy(values).to(META) for values in arrays]

        return build_step_inputs(chunks, PAGE_SIZE, META, upload)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        layers = range(self.model.spec.num_layers)
        return self._held_layers.forward(layers, inputs, None, SameAttention(QueriesAsTheyAre()))
