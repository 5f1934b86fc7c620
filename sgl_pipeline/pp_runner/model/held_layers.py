"""The layers that a stage holds, by model-wide id: their weights, their KV pages, their kernels.

The held layers change one at a time (`hold`, `drop`); a step runs the range that the plan of its
epoch gives the stage, in the model's order, whenever its layers came. This class never decides
which layers to hold, and moves no keys or values: the pages of an arriving layer have no meaning
yet.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StatePool
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.model.stage_model import LoadedLayer, StageModel


class HeldLayers:
    """The layers of `model` with their pages in `kv_pool`; both must have the same ones. The states
    of those that have some are in `state_pool`."""

    def __init__(
        self, model: StageModel, kv_pool: KvPool, state_pool: StatePool | None = None
    ) -> None:
        assert sorted(model.layers) == sorted(kv_pool.layers)
        assert (state_pool is not None) == model.spec.has_states
        self.model = model
        self.kv_pool = kv_pool
        self.state_pool = state_pool
        self._spare: dict[int, LoadedLayer[Any]] = {}
        self._before_drop: list[Callable[[int], None]] = []
        self._before_run: dict[int, Callable[[], None]] = {}

    @property
    def held(self) -> tuple[int, ...]:
        """Model-wide ids, ascending."""
        return tuple(sorted(self.model.layers))

    @property
    def spare(self) -> tuple[int, ...]:
        """Model-wide ids of the layers whose weights are here and whose pages are not, oldest
        first."""
        return tuple(self._spare)

    def keep_spare(self, loaded: LoadedLayer[Any]) -> None:
        """Keeps the weights of a layer that is not held, for `hold`."""
        assert loaded.layer not in self.model.layers, f"layer {loaded.layer} is held"
        self._spare[loaded.layer] = loaded

    def drop_spare(self, layer: int) -> None:
        """Frees the weights of a layer that is not held, if they are here."""
        self._spare.pop(layer, None)

    def hold(self, layer: int) -> None:
        """Gives `layer` pages or states, of finite numbers, and its weights: spare ones if present,
        else from the files, which takes as long as reading them.

        If it raises, only spare weights of the layer stay.

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
        self._add_to_pools(layer)
        try:
            loaded = self._spare.get(layer) or self.model.read_layer(layer)
        except BaseException:
            self._remove_from_pools(layer)
            raise
        self._spare.pop(layer, None)
        self.model.add_layer(loaded)

    def drop(self, layer: int, *, keep_weights: bool = False) -> None:
        """Takes the pages or states of `layer`, with what is in them, and its weights, unless they
        are to be kept as spare ones.

        Raises ProtocolError when the layer is not held.
        """
        if layer not in self.model.layers:
            raise ProtocolError(f"layer {layer} cannot be dropped: {self._holdings()}")
        for let_go in self._before_drop:
            let_go(layer)
        self._before_run.pop(layer, None)
        loaded = self.model.remove_layer(layer)
        if keep_weights:
            self._spare[layer] = loaded
        self._remove_from_pools(layer)

    def before_run(self, layer: int, wait: Callable[[], None]) -> None:
        """Makes a step call `wait` once, before it first runs `layer`."""
        self._before_run[layer] = wait

    @property
    def has_waits(self) -> bool:
        """True if a layer is to be waited for."""
        return bool(self._before_run)

    def forget_waits(self) -> None:
        """Drops the waits of `before_run`."""
        self._before_run.clear()

    def before_drop(self, let_go: Callable[[int], None]) -> None:
        """Calls `let_go` with each layer that is about to be dropped, for owners of references to
        its weights or pages, or of their addresses."""
        self._before_drop.append(let_go)

    def require(self, layers: Iterable[int], what: str) -> None:
        """Raises ProtocolError, which names the first of `layers` that is not held; `what` runs
        them."""
        for layer in layers:
            if layer not in self.model.layers:
                raise ProtocolError(f"{what} runs layer {layer}, but {self._holdings()}")

    def forward(
        self,
        layers: range,
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        attention: LayerwiseAttention,
    ) -> torch.Tensor:
        """Runs `layers`, all of them held. See `StageModel.forward`."""
        in_turn = self._awaited(layers) if self._before_run else layers
        return self.model.forward(in_turn, inputs, hidden, self.kv_pool, attention, self.state_pool)

    def await_layers(self, layers: range) -> None:
        """Runs the waits of `layers` now, before a step runs them."""
        if self._before_run:
            for _ in self._awaited(layers):
                pass

    def _awaited(self, layers: range) -> Iterator[int]:
        """`layers`, each when it can be run."""
        for layer in layers:
            if (wait := self._before_run.pop(layer, None)) is not None:
                wait()
            yield layer

    def _add_to_pools(self, layer: int) -> None:
        self.kv_pool.add_layer(layer)
        if self.state_pool is not None:
            self.state_pool.add_layer(layer)

    def _remove_from_pools(self, layer: int) -> None:
        self.kv_pool.remove_layer(layer)
        if self.state_pool is not None:
            self.state_pool.remove_layer(layer)

    def _holdings(self) -> str:
        ids = ", ".join(map(str, self.held))
        return f"this stage holds layers {ids}" if ids else "this stage holds no layer"
