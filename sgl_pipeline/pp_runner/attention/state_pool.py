"""The states of a stage's layers that keep some in place of keys and values, in slots that all
stages number alike.

As with pages (`kv_pool.py`), only the scheduler knows which request has a slot, and which slot
holds the state behind a shared prefix (a snapshot).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.state_rows import StateRows
from sgl_pipeline.pp_runner.base.state_shape import StateShape
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.layer_kernels.gated_delta import LayerStates


class StatePool:
    """States for each layer that has any, by the model-wide layer id; layers may come and go. The
    states of one that comes have no meaning: numbers, from zeros or of another layer.

    Args:
        layers: model-wide ids of the stage's layers.
        shapes: of the states of all layers of the model; None for those that have none.
        num_slots: states of each layer, the same for all.
        dtype: the model's.
        max_layers: memory for the states of this many layers is taken now and kept.
    """

    def __init__(
        self,
        layers: Iterable[int],
        shapes: Sequence[StateShape | None],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        max_layers: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._max_layers = max_layers
        self._states: dict[int, LayerStates] = {}
        self._spare: list[LayerStates] = []
        for layer in layers:
            self.add_layer(layer)
        shape = next((one for one in shapes if one is not None), None)
        if shape is not None:
            num_spare = max(0, max_layers - len(self._states))
            self._spare = [self._zeros(shape) for _ in range(num_spare)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all states, and of those of layers that may come."""
        every = (*self._states.values(), *self._spare)
        return sum(one.recurrent.nbytes + one.conv.nbytes for one in every)

    def shape(self, layer: int) -> StateShape | None:
        """The shape of the states of `layer`, whether it is here or not; None if it has none."""
        return self._shapes[layer]

    def add_layer(self, layer: int) -> None:
        """Gives `layer` states, if it has any: spare ones, else new ones. All have one shape."""
        shape = self._shapes[layer]
        if shape is not None:
            assert layer not in self._states, f"layer {layer} has its states already"
            self._states[layer] = self._spare.pop() if self._spare else self._zeros(shape)

    def remove_layer(self, layer: int) -> None:
        """Takes the states of `layer`, if it has any, and keeps or frees their memory."""
        states = self._states.pop(layer, None)
        if states is not None and len(self._states) + len(self._spare) < self._max_layers:
            self._spare.append(states)

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of `states` (uint8), one slot in a row: recurrent states and inputs of the
        convolution, each [num_slots, bytes]."""
        states = self._states[layer]
        recurrent, conv = (
            part.flatten(1).view(torch.uint8) for part in (states.recurrent, states.conv)
        )
        return recurrent, conv

    def states(self, layer: int) -> LayerStates:
        """The states of `layer`, by slot."""
        return self._states[layer]

    def _zeros(self, shape: StateShape) -> LayerStates:
        heads = (self.num_slots, shape.num_value_heads, shape.key_dim, shape.value_dim)
        inputs = (self.num_slots, shape.conv_width - 1, shape.num_channels)
        return LayerStates(
            recurrent=torch.zeros(heads, dtype=torch.float32, device=self._device),
            conv=torch.zeros(inputs, dtype=self._dtype, device=self._device),
        )

    def check(self, inputs: StepInputs) -> None:
        """Raises ProtocolError for a step whose chunks do not have slots of this pool."""
        if inputs.states is None:
            raise ProtocolError("a step of a model with states names no state slots")
        rows = inputs.states
        slots = sorted({*rows.read_slots.tolist(), *rows.write_slots.tolist()})
        if slots[0] < 0 or slots[-1] >= self.num_slots:
            raise ProtocolError(f"a step names the state slots {slots}, of {self.num_slots}")


def state_pool_of(
    layers: Iterable[int],
    shapes: Sequence[StateShape | None],
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    max_layers: int = 0,
) -> "StatePool | None":
    """The pool of a model with these `shapes`; None for one without states."""
    if all(shape is None for shape in shapes):
        return None
    return StatePool(layers, shapes, num_slots, dtype, device, max_layers)


class StepStates(NamedTuple):
    """The states that a step reads and replaces: `rows` says in which slots of `pool`."""

    rows: StateRows
    pool: StatePool

    @classmethod
    def of(cls, inputs: StepInputs, pool: StatePool) -> "StepStates":
        """The states of a step that `pool` has checked."""
        assert inputs.states is not None
        return cls(inputs.states, pool)
