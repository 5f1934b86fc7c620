"""Runs a CPU stage's layers from the recorded calls of an earlier step.

The stage's own pass through its layers is recorded, so the bits are the same.
"""

import logging
from collections.abc import Sequence

import torch
from torch.autograd import _profiler_enabled

from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.cpu_kernels.call_recording import RecordedCalls, record
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Rotation
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.stage_model import pass_plain_layers

logger = logging.getLogger(__name__)

# In longer steps Python's overhead is negligible, and their results would be kept.
MOST_ROWS = 1024


class RecordedLayers:
    """The `StepLayers` of a CPU stage whose model has `plain_steps`.

    The first step of a range of layers is the one that is recorded. A recording holds the addresses
    of the weights and pages of all its layers: there is one at most, and none when one of them has
    gone.
    """

    def __init__(self, held_layers: HeldLayers, attention: LayerwiseAttention) -> None:
        steps = held_layers.model.plain_steps
        assert steps is not None, "torch's own calls leave no record"
        self._held_layers = held_layers
        self._steps = steps
        self._attention = attention
        self._planned = range(0)
        self._recorded_layers: range | None = None
        self._recorded: RecordedCalls | None = None  # None: these layers do more than call kernels
        held_layers.before_drop(self._forget)

    @property
    def is_recorded(self) -> bool:
        """True if steps like the last one run from recorded calls."""
        return self._recorded is not None and self._recorded_layers == self._planned

    def prepare(self, epoch: int, layers: range) -> None:
        """Nothing: the first step of new layers is recorded as it runs."""

    def plan(self, epoch: int, layers: range, inputs: StepInputs) -> None:
        """See `StepLayers.plan`."""
        self._attention.plan(inputs.layout)
        self._planned = layers

    @torch.inference_mode()
    def run(self, inputs: StepInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        """See `StepLayers.run`."""
        held_layers, layers = self._held_layers, self._planned
        # A layer may have to be waited for, and a profile shows kernels.
        is_plain = not held_layers.has_waits and not _profiler_enabled()
        if inputs.num_tokens > MOST_ROWS or not is_plain or not layers:
            return held_layers.forward(layers, inputs, hidden, self._attention)
        stream, rotation = self._steps.enter(inputs, hidden)
        if layers != self._recorded_layers:
            return self._record(inputs, stream, rotation)
        if self._recorded is None:
            return self._pass_layers(inputs, stream, rotation)
        return self._recorded.run(
            step_variables(inputs, stream, rotation),
            inputs.num_tokens,
            inputs.layout.num_chunks,
            torch.get_num_threads(),
        )

    def _record(self, inputs: StepInputs, stream: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        output, self._recorded = record(
            lambda: self._pass_layers(inputs, stream, rotation),
            step_variables(inputs, stream, rotation),
            inputs.num_tokens,
        )
        self._recorded_layers = self._planned
        if self._recorded is None:
            logger.info(
                "layers %d to %d are not recorded, as they do more than call kernels: each step "
                "calls these from Python",
                self._planned[0],
                self._planned[-1],
            )
        return output

    def _pass_layers(
        self, inputs: StepInputs, stream: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        held = self._held_layers
        return pass_plain_layers(
            self._steps,
            self._planned,
            inputs,
            stream,
            rotation,
            held.kv_pool,
            self._attention,
            held.state_pool,
        )

    def _forget(self, layer: int) -> None:
        if self._recorded_layers is not None and layer in self._recorded_layers:
            self._recorded = self._recorded_layers = None


def step_variables(
    inputs: StepInputs, stream: torch.Tensor, rotation: Rotation
) -> Sequence[torch.Tensor]:
    """The values that differ from step to step, in one order."""
    layout, states = inputs.layout, inputs.states
    return (
        *(() if states is None else states.tensors),
        stream,
        rotation.cosine,
        rotation.sine,
        inputs.slots,
        layout.query_indptr,
        layout.page_indptr,
        layout.page_indices,
        layout.kv_lengths,
    )
