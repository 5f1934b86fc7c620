"""Runs a stage's layers on a step: one kernel after the other, or as they were recorded.

Recorded calls of CPUs are in `recorded_layers.py`, graphs of GPUs in `cuda/graphed_layers.py`. Both
compute `HeldLayers.forward`.
"""

from typing import Protocol

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers


class StepLayers(Protocol):
    """`plan` once a step, before its activations have arrived, then `run`."""

    def prepare(self, epoch: int, layers: range) -> None:
        """Makes ready for the steps of `epoch`, which run `layers`, all of them held."""

    def plan(self, epoch: int, layers: range, inputs: StepInputs) -> None:
        """Prepares for a step of `epoch`, which runs `layers`, all of them held."""

    def run(self, inputs: StepInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        """The residual stream [T, H] after the layers, for the caller to keep; see
        `HeldLayers.forward`."""


class EagerLayers:
    """The layers as they are."""

    def __init__(self, held_layers: HeldLayers, attention: LayerwiseAttention) -> None:
        self._held_layers = held_layers
        self._attention = attention
        self._planned = range(0)

    def prepare(self, epoch: int, layers: range) -> None:
        """Nothing to prepare."""

    def plan(self, epoch: int, layers: range, inputs: StepInputs) -> None:
        self._attention.plan(inputs.layout)
        self._planned = layers

    def run(self, inputs: StepInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        return self._held_layers.forward(self._planned, inputs, hidden, self._attention)
