"""Runs a stage's layers inside transformers' decoder.

The decoder is transformers' own, with nothing but what the stage runs: the layers of other stages
pass the residual stream on, and the stage's first layer takes the stream that the stage before has
sent, whatever the decoder made of its inputs. Its final norm belongs to the head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.model.generic.attention_call import RunningStep, StageStep
from sgl_pipeline.pp_runner.model.generic.passing_layers import (
    EnteredLayer,
    Given,
    HeardLayer,
    PassedLayer,
)
from sgl_pipeline.pp_runner.model.generic.skeleton import Skeleton


class DecoderRun:
    """The decoder of `skeleton`, whose layers and norm `norm` it takes out.

    `passed` are what stands for its layers, `running` is the step that it runs.
    """

    def __init__(self, skeleton: Skeleton, norm: str) -> None:
        self._skeleton = skeleton
        self.passed = [PassedLayer(layer) for layer in skeleton.layers]
        self.running = RunningStep()
        self._in_place: object = None
        self._entered: EnteredLayer | None = None
        self._first = HeardLayer(skeleton.layers[0])
        setattr(skeleton.decoder, norm, nn.Identity())
        self.forget()
        skeleton.remake_buffers(skeleton.decoder)

    def forget(self) -> None:
        """Lets the decoder hold no layer, so that one that leaves is freed."""
        self._in_place = self._entered = None
        self._skeleton.decoder.layers = nn.ModuleList(self.passed)

    def run(
        self,
        order: Sequence[int],
        layers: Mapping[int, nn.Module],
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        kv_pool: KvPool,
        attention: LayerwiseAttention,
    ) -> torch.Tensor:
        """The residual stream [T, H] behind those of `layers` that `order` names; `hidden` as in
        `StageModel.forward`."""
        self._put_in_place(order, layers, is_first=hidden is None)
        self.running.step = StageStep(inputs.slots, kv_pool, attention)
        if self._entered is not None and hidden is not None:
            self._entered.stream = hidden[None]
        try:
            return self._decode(inputs, hidden)
        finally:
            self.running.step = None
            if self._entered is not None:
                self._entered.stream = None

    def enter(self, inputs: StepInputs, hidden: torch.Tensor | None) -> tuple[torch.Tensor, Given]:
        """The arguments that the decoder gives to its first layer: the residual stream [T, H], of
        the token ids or `hidden`, and all else."""
        first = self._first
        if self._in_place is not first:
            self._skeleton.decoder.layers = nn.ModuleList([first])
            self._in_place = first
        self._decode(inputs, hidden)
        return (first.stream[0] if hidden is None else hidden), first.given

    def given_to_layers(self, positions: Sequence[int], dtype: torch.dtype) -> list[Given]:
        """The arguments that the decoder gives to each of its layers, for rows at `positions`."""
        heard = [HeardLayer(layer) for layer in self.passed]
        decoder = self._skeleton.decoder
        decoder.layers = nn.ModuleList(heard)
        hidden_size = self._skeleton.embedding.weight.shape[1]
        decoder(
            inputs_embeds=torch.zeros(1, len(positions), hidden_size, dtype=dtype),
            position_ids=torch.tensor([positions]),
            use_cache=False,
        )
        self.forget()
        return [layer.given for layer in heard]

    def _decode(self, inputs: StepInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        given: dict[str, Any] = (
            {"input_ids": inputs.token_ids[None]}
            if hidden is None
            else {"inputs_embeds": hidden[None]}
        )
        output = self._skeleton.decoder(
            **given, position_ids=inputs.positions[None], use_cache=False
        )
        rows: torch.Tensor = output.last_hidden_state[0]
        return rows

    def _put_in_place(
        self, order: Sequence[int], layers: Mapping[int, nn.Module], *, is_first: bool
    ) -> None:
        """Has the decoder run the layers of `order`, and the first of them begin with the stream
        of the stage before, if there is one."""
        wanted = (is_first, tuple(order), tuple(id(layers[layer]) for layer in order))
        if self._in_place == wanted:
            return
        running: list[nn.Module] = list(self.passed)
        for layer in order:
            running[layer] = layers[layer]
        self._entered = None
        if not is_first:
            self._entered = EnteredLayer(layers[order[0]])
            running[order[0]] = self._entered
        self._skeleton.decoder.layers = nn.ModuleList(running)
        self._in_place = wanted
