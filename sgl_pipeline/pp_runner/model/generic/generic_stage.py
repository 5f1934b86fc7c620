"""The `StageModel` of a model whose layers are transformers' code.

The decoder is transformers' own, on the meta device except what the stage holds (`decoder_run.py`).
Where all of its layers compute what our own `DecoderLayer` computes, they are ours
(`plain_layer.py`), and the decoder makes only what the first of them is given.

Shapes: T rows of the step, N rows for logits, H hidden size, V vocabulary size.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sgl_pipeline.errors import CheckpointError, UnsupportedModelError
from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StatePool
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, Rotation
from sgl_pipeline.pp_runner.model.generic.attention_call import (
    PROBED,
    SERVED,
    PagedAttention,
    direct_attention,
)
from sgl_pipeline.pp_runner.model.generic.decoder_head import DecoderHead, read_head
from sgl_pipeline.pp_runner.model.generic.decoder_run import DecoderRun
from sgl_pipeline.pp_runner.model.generic.part_filling import fill, refuse_meta
from sgl_pipeline.pp_runner.model.generic.plain_layer import (
    PlainForm,
    build_plain_layer,
    rotation_of,
)
from sgl_pipeline.pp_runner.model.generic.plain_probe import TRIAL_POSITIONS, plain_forms
from sgl_pipeline.pp_runner.model.generic.probes import Trace, trace
from sgl_pipeline.pp_runner.model.generic.rotary_choice import hold_frequencies, return_fp32
from sgl_pipeline.pp_runner.model.generic.skeleton import KeyTable, make_skeleton
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.model.generic.stream_probe import probe_stream
from sgl_pipeline.pp_runner.model.generic.tensor_reader import TensorReader
from sgl_pipeline.pp_runner.model.stage_model import LoadedLayer, PlainSteps, pass_plain_layers
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource
from sgl_pipeline.pp_runner.weights.paced_weights import PacedWeights

# `DecoderLayer` where they are plain, else a module of transformers.
Layer = Any


def structure(path: str | Path, dtype: torch.dtype) -> Trace:
    """The structure of the model in the directory `path`, in `dtype`. Raises as `trace`."""
    return trace(make_skeleton(path, dtype, PROBED))


class GenericStageModel:
    """The weights of one stage. `layers` holds its decoder layers by model-wide id, `loaded` maps
    the names of the tensors that it holds to their bytes.

    Args:
        path: the model's directory.
        open_source: opens the weights, once now and again for each layer that is loaded later.
        layers: model-wide ids of the layers to load now.
        on_read: called before each tensor that is read now.

    Raises UnsupportedModelError where the model is not what `spec` says, or its decoder does
    anything with the residual stream beside its layers; CheckpointError as the source of weights.
    """

    def __init__(
        self,
        spec: GenericSpec,
        path: str | Path,
        open_source: Callable[[], WeightSource],
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LayerKernels,
        layers: Iterable[int],
        is_first: bool,
        is_last: bool,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        if device.type != "cpu":
            raise UnsupportedModelError(
                "the layers of this model are transformers' code, which runs on CPUs only "
                "(--device cpu)"
            )
        seen = structure(path, dtype)
        if seen.attentions != spec.attentions:
            raise UnsupportedModelError(
                f"the model in {path} attends in other ways than the one that was probed at the "
                "start; every host needs the same config.json"
            )
        self.spec = spec
        self.layers: dict[int, Layer] = {}
        self.loaded: dict[str, int] = {}
        self._sizes: dict[int, dict[str, int]] = {}
        self._end_sizes: dict[str, int] = {}
        self._kernels, self._open_source, self._dtype = kernels, open_source, dtype
        self._skeleton = make_skeleton(path, dtype, SERVED)
        self._norm_name = seen.norm
        self._norm = getattr(self._skeleton.decoder, seen.norm)
        self._is_first = False
        self._head: DecoderHead | None = None
        with torch.inference_mode():
            source = open_source()
            self._table = KeyTable(
                self._skeleton, source.names(), is_quantized=spec.quantization is not None
            )
            # After the table, which asks the decoder for its layers.
            self._run = DecoderRun(self._skeleton, seen.norm)
            hold_frequencies(self._skeleton.decoder, spec.context_length)
            probe_stream(self._skeleton, self._run.passed, dtype)
            self._forms = self._plain_forms()
            if self._forms is not None:
                return_fp32(self._skeleton.decoder)
            for layer in layers:
                self.add_layer(self._read_from(source, layer, on_read))
            self._load_ends(source, on_read, is_first=is_first, is_last=is_last)

    @property
    def is_first(self) -> bool:
        """True if the stage begins with token ids."""
        return self._is_first

    @property
    def is_last(self) -> bool:
        """True if the stage ends with logits."""
        return self._head is not None

    @property
    def plain_steps(self) -> PlainSteps | None:
        """See `StageModel.plain_steps`."""
        return None if self._forms is None else self

    @property
    def has_experts(self) -> bool:
        """True if any of the stage's layers is a mixture of experts."""
        return any(self.spec.layer_has_experts(layer) for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as they were read."""
        return sum(self.loaded.values())

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the tensors of the largest of its layers, as they were read."""
        return max((sum(sizes.values()) for sizes in self._sizes.values()), default=0)

    @torch.inference_mode()
    def read_layer(
        self, layer: int, pause: Callable[[], None] = lambda: None
    ) -> LoadedLayer[Layer]:
        """See `StageModel.read_layer`."""
        return self._read_from(self._open_source(), layer, pause)

    def add_layer(self, loaded: LoadedLayer[Layer]) -> None:
        """Adds a layer that was read."""
        assert loaded.layer not in self.layers, f"layer {loaded.layer} is loaded already"
        self.layers[loaded.layer] = loaded.weights
        self._sizes[loaded.layer] = loaded.sizes
        self.loaded |= loaded.sizes

    def remove_layer(self, layer: int) -> LoadedLayer[Layer]:
        """Removes the weights of `layer`, and returns them."""
        sizes = self._sizes.pop(layer)
        self.loaded = {name: size for name, size in self.loaded.items() if name not in sizes}
        self._run.forget()
        return LoadedLayer(layer, self.layers.pop(layer), sizes)

    @torch.inference_mode()
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
        """See `StageModel.take_over`."""
        wanted = tuple(layers)
        for layer in {*self.layers} - {*wanted}:
            self.remove_layer(layer)
        for layer in wanted:
            if layer not in self.layers:
                before_part()
                self.add_layer(self.read_layer(layer, on_read))
                on_layer()
        if (is_first, is_last) == (self.is_first, self.is_last):
            return
        self._drop_ends()  # first: two of each may not fit
        before_part()
        self._load_ends(self._open_source(), on_read, is_first=is_first, is_last=is_last)

    @torch.inference_mode()
    def forward(
        self,
        layers: Iterable[int],
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        kv_pool: KvPool,
        attention: LayerwiseAttention,
        state_pool: StatePool | None = None,
    ) -> torch.Tensor:
        """See `StageModel.forward`; where layers are transformers', all are waited for before the
        first one runs."""
        assert self._is_first or hidden is not None, "this stage needs the residual stream"
        if self._forms is not None:
            stream, rotation = self.enter(inputs, hidden)
            return pass_plain_layers(self, layers, inputs, stream, rotation, kv_pool, attention)
        order = tuple(layers)
        if hidden is not None and not order:
            return hidden.clone()
        return self._run.run(order, self.layers, inputs, hidden, kv_pool, attention)

    @torch.inference_mode()
    def enter(
        self, inputs: StepInputs, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, Rotation]:
        """See `PlainSteps.enter`."""
        assert self._forms is not None, "these layers are not ours"
        stream, given = self._run.enter(inputs, hidden)
        rotation = rotation_of(given, interleaved=self._forms[0].interleaved)
        assert rotation is not None
        return stream, rotation

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in fp32 of N rows [N, H] of the residual stream; on the last stage only."""
        assert self._head is not None, "only the last stage has the head"
        return self._head(hidden)

    def _plain_forms(self) -> tuple[PlainForm, ...] | None:
        """The form in which its layers are ours; None where they are not all."""
        given = self._run.given_to_layers(TRIAL_POSITIONS, self._dtype)
        if given is None:
            return None
        skeleton = self._skeleton
        return plain_forms(skeleton.layers, skeleton.copy_of, given, self.spec.attentions)

    def _read_from(
        self, source: WeightSource, layer: int, pause: Callable[[], None]
    ) -> LoadedLayer[Layer]:
        prefix = self._skeleton.layer_prefix(layer)
        if unknown := self._table.unknown_below(prefix):
            raise CheckpointError(
                f"the checkpoint has {', '.join(unknown[:3])}, which transformers' code of this "
                "model does not use"
            )
        before = set(source.loaded)
        module = self._make_layer(layer, prefix, self._reader(source, pause))
        sizes = {name: size for name, size in source.loaded.items() if name not in before}
        return LoadedLayer(layer, module, sizes)

    def _make_layer(self, layer: int, prefix: str, reader: TensorReader) -> Layer:
        template = self._skeleton.layers[layer]
        if self._forms is not None:
            return build_plain_layer(layer, self._forms[layer], template, prefix, reader)
        module = fill(self._skeleton.copy_of(template), prefix, reader)
        self._skeleton.remake_buffers(module)
        refuse_meta(module, prefix)
        expected = self.spec.attentions[layer]
        direct_attention(module, PagedAttention(layer, expected, self._run.running))
        return module

    def _reader(self, source: WeightSource, pause: Callable[[], None]) -> TensorReader:
        paced = PacedWeights(source, pause)
        return TensorReader(
            self._skeleton, self._table, paced, self._kernels, self.spec.quantization
        )

    def _load_ends(
        self,
        source: WeightSource,
        on_read: Callable[[], None],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        before = set(source.loaded)
        reader = self._reader(source, on_read)
        if is_first:
            embedding = self._skeleton.embedding
            name = f"{self._skeleton.embedding_name}.weight"
            table = reader.tensor(name, embedding.weight)
            embedding.weight = nn.Parameter(table, requires_grad=False)
        self._is_first = is_first
        if is_last:
            kept = self._skeleton.embedding.weight if is_first else None
            self._head = read_head(self._skeleton, self._norm, self._norm_name, reader, kept)
        self._end_sizes = {name: size for name, size in source.loaded.items() if name not in before}
        self.loaded |= self._end_sizes
        self._run.forget()

    def _drop_ends(self) -> None:
        embedding = self._skeleton.embedding
        embedding.weight = nn.Parameter(embedding.weight.to("meta"), requires_grad=False)
        self._is_first, self._head = False, None
        self.loaded = {
            name: size for name, size in self.loaded.items() if name not in self._end_sizes
        }
        self._end_sizes = {}
