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
    """States for each layer that has any, by the model-wide layer id. They start as zeros.

    Args:
        layers: model-wide ids of the stage's layers.
        shapes: of the states of all layers of the model; None for those that have none.
        num_slots: states of each layer, the same for all.
        dtype: the model's.
    """

    def __init__(
        self,
        layers: Iterable[int],
        shapes: Sequence[StateShape | None],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self._states: dict[int, LayerStates] = {}
        for layer in layers:
            if (shape := shapes[layer]) is not None:
                self._states[layer] = _zeros(shape, num_slots, dtype, device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return sum(one.recurrent.nbytes + one.conv.nbytes for one in self._states.values())

    def states(self, layer: int) -> LayerStates:
        """The states of `layer`, by slot."""
        return self._states[layer]

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
) -> "StatePool | None":
    """The pool of a model with these `shapes`; None for one without states."""
    has_states = any(shape is not None for shape in shapes)
    return StatePool(layers, shapes, num_slots, dtype, device) if has_states else None


class StepStates(NamedTuple):
    """The states that a step reads and replaces: `rows` says in which slots of `pool`."""

    rows: StateRows
    pool: StatePool

    @classmethod
    def of(cls, inputs: StepInputs, pool: StatePool) -> "StepStates":
        """For a step that `pool` has checked."""
        assert inputs.states is not None
        return cls(inputs.states, pool)


def _zeros(
    shape: StateShape, num_slots: int, dtype: torch.dtype, device: torch.device
) -> LayerStates:
    heads = (num_slots, shape.num_value_heads, shape.key_dim, shape.value_dim)
    inputs = (num_slots, shape.conv_width - 1, shape.num_channels)
    return LayerStates(
        recurrent=torch.zeros(heads, dtype=torch.float32, device=device),
        conv=torch.zeros(inputs, dtype=dtype, device=device),
    )
