"""The interface of a stage's share of the model's weights: its layers, the embedding on the first,
the head on the last.

Layers may come and go (`held_layers.py`). A stage model never schedules, samples or sends, and
keeps no state of a step: two can live in one process. `native_stage.py` computes layers with our
own code, `generic/` with transformers'.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StatePool, StepStates
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Rotation
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec

L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class LoadedLayer(Generic[L]):
    """The weights of one decoder layer; `sizes` maps the names of its tensors to their bytes."""

    layer: int
    weights: L
    sizes: dict[str, int]

    @property
    def weight_bytes(self) -> int:
        return sum(self.sizes.values())


class PlainSteps(Protocol):
    """A step in two parts, of which the second one calls kernels and nothing else."""

    @property
    def layers(self) -> Mapping[int, DecoderLayer]: ...

    @property
    def is_first(self) -> bool: ...

    def enter(
        self, inputs: StepInputs, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, Rotation]:
        """The input of the first layer: the residual stream [T, H], of the token ids or `hidden`,
        and the rows' rotation."""


@torch.inference_mode()
def pass_plain_layers(
    steps: PlainSteps,
    layers: Iterable[int],
    inputs: StepInputs,
    stream: torch.Tensor,
    rotation: Rotation,
    kv_pool: KvPool,
    attention: LayerwiseAttention,
    state_pool: StatePool | None = None,
) -> torch.Tensor:
    """`StageModel.forward` from the result of `PlainSteps.enter`: a tensor that may be written
    over."""
    may_overwrite = steps.is_first  # which made the stream itself
    states = None if state_pool is None else StepStates.of(inputs, state_pool)
    for layer in layers:
        stream = steps.layers[layer].forward(
            stream, rotation, inputs.slots, kv_pool, attention, may_overwrite, states
        )
        may_overwrite = True
    return stream if may_overwrite else stream.clone()


class StageModel(Protocol):
    """The weights of one stage. `layers` holds its decoder layers by model-wide id, `loaded` maps
    the names of the tensors that it holds to their bytes."""

    loaded: dict[str, int]

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def layers(self) -> Mapping[int, Any]: ...

    @property
    def is_first(self) -> bool:
        """True if the stage begins with token ids."""

    @property
    def is_last(self) -> bool:
        """True if the stage ends with logits."""

    @property
    def plain_steps(self) -> PlainSteps | None:
        """Its steps in two parts; None where its layers do more than to call kernels."""

    @property
    def has_experts(self) -> bool:
        """True if any of the stage's layers is a mixture of experts."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as they were read."""

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the tensors of the largest of its layers, as they were read."""

    def read_layer(self, layer: int, pause: Callable[[], None] = lambda: None) -> LoadedLayer[Any]:
        """Reads one layer more, for `add_layer`; changes nothing, so that a thread may call it.

        Args:
            pause: called before each tensor is read.

        Raises CheckpointError as at the start.
        """

    def add_layer(self, loaded: LoadedLayer[Any]) -> None:
        """Adds a layer that was read."""

    def remove_layer(self, layer: int) -> LoadedLayer[Any]:
        """Removes the weights of `layer`, and returns them."""

    def take_over(
        self,
        layers: Iterable[int],
        *,
        is_first: bool,
        is_last: bool,
        on_read: Callable[[], None] = lambda: None,
        on_layer: Callable[[], None] = lambda: None,
        before_part: Callable[[], None] = lambda: None,
    ) -> None:
        """Holds `layers` and no others from now on, and the ends that go with them: present ones
        stay, the others are read. `on_read` is called before each tensor, `before_part` before each
        layer and before the ends, `on_layer` after each layer.

        Raises CheckpointError as at the start.
        """

    def forward(
        self,
        layers: Iterable[int],
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        kv_pool: KvPool,
        attention: LayerwiseAttention,
        state_pool: StatePool | None = None,
    ) -> torch.Tensor:
        """Runs `layers`, in their order, on a step for which `attention.plan` was called before.

        Args:
            hidden: the residual stream [T, H] from the stage before, in the model's dtype; None on
                the first stage. Not written to: it may be a buffer of a graph or of a link.
            state_pool: given if and only if the model has states.

        Returns the residual stream [T, H], a tensor of its own: for the next stage, or on the last
        one for `logits`.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in fp32 of N rows [N, H] of the residual stream; on the last stage only."""
