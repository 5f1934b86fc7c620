"""The layers that a stage holds, by model-wide id: their weights, their KV pages, their kernels.

Owned by the `StageRunner`. What a stage holds changes one layer at a time (`hold`, `drop`); what a
step runs is the range that the plan of its epoch gives the stage, in the model's order, whenever
its layers came. Never decides which layers to hold, and moves no keys or values: the pages of a
layer that comes are zeros.
"""

from collections.abc import Callable, Iterable

import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.attention.backend import AttentionBackend
from sgl_pipeline.pp_runner.kv_pool import KvPool
from sgl_pipeline.pp_runner.model.stage_model import StageModel
from sgl_pipeline.pp_runner.step_inputs import StepInputs


class HeldLayers:
    """The layers of `model` with their pages in `kv_pool`; both must have the same ones."""

    def __init__(self, model: StageModel, kv_pool: KvPool) -> None:
        assert sorted(model.layers) == sorted(kv_pool.layers)
        self.model = model
        self.kv_pool = kv_pool
        self._before_drop: list[Callable[[int], None]] = []

    @property
    def held(self) -> tuple[int, ...]:
        """Model-wide ids, ascending."""
        return tuple(sorted(self.model.layers))

    def hold(self, layer: int) -> None:
        """Loads the weights of `layer` and gives it pages, which are zeros.

        Takes as long as reading the weights does. Whatever it raises, nothing of the layer stays.

        Raises ProtocolError when the layer is held already or the model does not have it, and
        CheckpointError as at the start.
        """
        num_layers = self.model.spec.num_layers
        if layer in self.model.layers:
            raise ProtocolError(f"layer {layer} cannot be loaded: this stage holds it already")
        if not 0 <= layer < num_layers:
            raise ProtocolError(
                f"layer {layer} cannot be loaded: the model has layers 0 to {num_layers - 1}"
            )
        self.kv_pool.add_layer(layer)
        try:
            self.model.load_layer(layer)
        except BaseException:
            self.kv_pool.remove_layer(layer)
            raise

    def drop(self, layer: int) -> None:
        """Frees the weights and the pages of `layer`, with the keys and values in them.

        Raises ProtocolError when the layer is not held.
        """
        if layer not in self.model.layers:
            raise ProtocolError(f"layer {layer} cannot be dropped: {self._holdings()}")
        for let_go in self._before_drop:
            let_go(layer)
        self.model.unload_layer(layer)
        self.kv_pool.remove_layer(layer)

    def before_drop(self, let_go: Callable[[int], None]) -> None:
        """Has `let_go` called with each layer that is about to be dropped, for who keeps references
        to its weights or pages, or their addresses."""
        self._before_drop.append(let_go)

    def require(self, layers: Iterable[int], what: str) -> None:
        """Raises ProtocolError that names the first of `layers` that is not held; `what` runs
        them."""
        for layer in layers:
            if layer not in self.model.layers:
                raise ProtocolError(f"{what} runs layer {layer}, but {self._holdings()}")

    def forward(
        self,
        layers: range,
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Runs `layers`, all of them held. See `StageModel.forward`."""
        return self.model.forward(layers, inputs, hidden, self.kv_pool, attention)

    def _holdings(self) -> str:
        ids = ", ".join(map(str, self.held))
        return f"this stage holds layers {ids}" if ids else "this stage holds no layer"
