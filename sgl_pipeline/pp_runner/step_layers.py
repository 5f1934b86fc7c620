"""How a stage's layers are run on a step: one kernel after the other, or from recorded graphs.

Chosen in `kernel_choice.py`, driven by `StageRunner`; the graphs are in `cuda/graphed_layers.py`.
What is computed is `StageModel.forward` either way.
"""

from typing import Protocol

import torch

from sgl_pipeline.pp_runner.attention.backend import AttentionBackend
from sgl_pipeline.pp_runner.kv_pool import KvPool
from sgl_pipeline.pp_runner.stage_model import StageModel
from sgl_pipeline.pp_runner.step_inputs import StepInputs


class StepLayers(Protocol):
    """`plan` once a step, before its activations have arrived, then `run`."""

    def plan(self, epoch: int, inputs: StepInputs) -> None:
        """Prepares for the step, whose stage plan is that of `epoch`."""

    def run(self, inputs: StepInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        """The residual stream [T, H] after the layers, for the caller to keep; see
        `StageModel.forward`."""


class EagerLayers:
    """The layers as they are."""

    def __init__(self, model: StageModel, kv_pool: KvPool, attention: AttentionBackend) -> None:
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention

    def plan(self, epoch: int, inputs: StepInputs) -> None:
        self._attention.plan(inputs.layout)

    def run(self, inputs: StepInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        return self._model.forward(inputs, hidden, self._kv_pool, self._attention)
