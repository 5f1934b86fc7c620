"""The `StageModel` of a model whose layers are those of `decoder.py`."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StatePool
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, RmsNorm, Rotation
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.rotary import RotaryEmbedding
from sgl_pipeline.pp_runner.model.stage_model import LoadedLayer, PlainSteps, pass_plain_layers
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource, weight_opener
from sgl_pipeline.pp_runner.weights.layouts import read_matrix, round_matrix
from sgl_pipeline.pp_runner.weights.paced_weights import PacedWeights
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix
from sgl_pipeline.pp_runner.weights.schemes import Layout


class OutputHead:
    """The final norm and lm_head, for the rows whose logits are wanted only."""

    def __init__(self, norm: RmsNorm, weight: Matrix, kernels: LayerKernels) -> None:
        self._norm = norm
        self._linear = kernels.linear(weight)
        self._kernels = kernels

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] in fp32 of the residual stream's `rows` [S, H]; S may be 0."""
        return self._linear(self._kernels.norm(rows, self._norm)).float()


class NativeStageModel:
    """The weights of one stage. `layers` holds its decoder layers by model-wide id.

    Use `load` or `build`. `loaded` maps the names of the tensors that it holds to their bytes.

    Args:
        open_source: opens the weights, once now and again for each layer that is loaded later. An
            open source would keep the read parts of its files in memory.
        layers: model-wide ids of the layers to load now.
        on_read: called before each tensor that is read now.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        open_source: Callable[[], WeightSource],
        *,
        device: torch.device,
        kernels: LayerKernels,
        layers: Iterable[int],
        is_first: bool,
        is_last: bool,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self.layers: dict[int, DecoderLayer] = {}
        self.loaded: dict[str, int] = {}
        self._open_source = open_source
        self._embedding: torch.Tensor | None = None
        self._head: OutputHead | None = None
        self._kernels = kernels
        with torch.inference_mode():
            weights = PacedWeights(open_source(), on_read)
            for layer in layers:
                self.layers[layer] = DecoderLayer.load(spec, layer, weights, kernels)
            self._load_ends(weights, is_first=is_first, is_last=is_last)
            self._rotary = RotaryEmbedding(spec.rope, spec.head_dim, device)
        self.loaded.update(weights.loaded)

    @classmethod
    def load(
        cls,
        spec: DecoderSpec,
        path: str | Path,
        *,
        layers: Iterable[int],
        is_first: bool,
        is_last: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LayerKernels,
        load_format: str = "safetensors",
        on_read: Callable[[], None] = lambda: None,
    ) -> "NativeStageModel":
        """Reads the tensors of `layers`, and of embedding or head if the stage has them; `on_read`
        is called before each.

        Raises CheckpointError, which names file and tensor, when one does not fit the spec.
        """
        return cls(
            spec,
            weight_opener(path, load_format, dtype, device),
            device=device,
            kernels=kernels,
            layers=layers,
            is_first=is_first,
            is_last=is_last,
            on_read=on_read,
        )

    @classmethod
    def build(
        cls,
        spec: DecoderSpec,
        weights: WeightSource,
        *,
        device: torch.device,
        kernels: LayerKernels,
        layers: Iterable[int],
        is_first: bool,
        is_last: bool,
    ) -> "NativeStageModel":
        """The same from any source of weights, which lie on `device`."""
        return cls(
            spec,
            lambda: weights,
            device=device,
            kernels=kernels,
            layers=layers,
            is_first=is_first,
            is_last=is_last,
        )

    @property
    def is_first(self) -> bool:
        """True if the stage begins with token ids."""
        return self._embedding is not None

    @property
    def is_last(self) -> bool:
        """True if the stage ends with logits."""
        return self._head is not None

    @property
    def plain_steps(self) -> PlainSteps:
        """See `StageModel.plain_steps`."""
        return self

    @property
    def has_experts(self) -> bool:
        """True if any of the stage's layers is a mixture of experts."""
        return any(layer.has_experts for layer in self.layers.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as they were read."""
        return sum(self.loaded.values())

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the tensors of the largest of its layers, as they were read."""
        return max(
            (
                sum(size for name, size in self.loaded.items() if name.startswith(prefix))
                for prefix in map(self._prefix, self.layers)
            ),
            default=0,
        )

    @torch.inference_mode()
    def read_layer(
        self, layer: int, pause: Callable[[], None] = lambda: None
    ) -> LoadedLayer[DecoderLayer]:
        """Reads one layer more, for `add_layer`; changes nothing, so that a thread may call it.

        Args:
            pause: called before each tensor is read.

        Raises CheckpointError as at the start.
        """
        weights = PacedWeights(self._open_source(), pause)
        decoder = DecoderLayer.load(self.spec, layer, weights, self._kernels)
        prefix = self._prefix(layer)
        sizes = {name: size for name, size in weights.loaded.items() if name.startswith(prefix)}
        return LoadedLayer(layer, decoder, sizes)

    def add_layer(self, loaded: LoadedLayer[DecoderLayer]) -> None:
        """Adds a layer that was read."""
        assert loaded.layer not in self.layers, f"layer {loaded.layer} is loaded already"
        self.layers[loaded.layer] = loaded.weights
        self.loaded |= loaded.sizes

    def remove_layer(self, layer: int) -> LoadedLayer[DecoderLayer]:
        """Removes the weights of `layer`, and returns them."""
        prefix = self._prefix(layer)
        sizes = {name: size for name, size in self.loaded.items() if name.startswith(prefix)}
        self.loaded = {name: size for name, size in self.loaded.items() if name not in sizes}
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
        """Holds `layers` and no others from now on, and the ends that go with them: present ones
        stay, the others are read. `on_read` is called before each tensor, `before_part` before each
        layer and before the ends, `on_layer` after each layer.

        Raises CheckpointError as at the start.
        """
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
        prefixes = tuple(map(self._prefix, wanted))
        sizes = {name: size for name, size in self.loaded.items() if name.startswith(prefixes)}
        self._embedding = self._head = None  # first: two of each may not fit
        before_part()
        weights = PacedWeights(self._open_source(), on_read)
        self._load_ends(weights, is_first=is_first, is_last=is_last)
        self.loaded = sizes | weights.loaded

    def _load_ends(self, weights: WeightSource, *, is_first: bool, is_last: bool) -> None:
        embedding = _load_embedding(self.spec, weights) if is_first else None
        self._embedding = embedding
        self._head = _load_head(self.spec, weights, embedding, self._kernels) if is_last else None

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
        """Runs `layers`, in their order, on a step for which `attention.plan` was called before.

        Args:
            hidden: the residual stream [T, H] from the stage before, in the model's dtype; None on
                the first stage. Not written to: it may be a buffer of a graph or of a link.
            state_pool: given if and only if the model has states.

        Returns the residual stream [T, H], a tensor of its own: for the next stage, or on the last
        one for `logits`.
        """
        stream, rotation = self.enter(inputs, hidden)
        return pass_plain_layers(
            self, layers, inputs, stream, rotation, kv_pool, attention, state_pool
        )

    @torch.inference_mode()
    def enter(
        self, inputs: StepInputs, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, Rotation]:
        """The input of the first layer: the residual stream [T, H], of the token ids or `hidden`,
        and the rows' rotation."""
        if self._embedding is not None:
            hidden = F.embedding(inputs.token_ids, self._embedding)
        assert hidden is not None, "a stage after the first needs the residual stream"
        return hidden, self._rotary.at(inputs.positions)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in fp32 of N rows [N, H] of the residual stream; on the last stage only."""
        assert self._head is not None, "only the last stage has the head"
        return self._head(hidden)

    def _prefix(self, layer: int) -> str:
        """The prefix of the names of the layer's tensors."""
        return self.spec.names.layer.format(layer=layer) + "."


def _load_embedding(spec: DecoderSpec, weights: WeightSource) -> torch.Tensor:
    return weights.read(f"{spec.names.embedding}.weight", (spec.vocab_size, spec.hidden_size))


def _load_head(
    spec: DecoderSpec,
    weights: WeightSource,
    embedding: torch.Tensor | None,
    kernels: LayerKernels,
) -> OutputHead:
    """The head; if it is tied and not in the file, its matrix is the embedding table, rounded as
    the model's other matrices are."""
    norm_weight = weights.read(f"{spec.names.final_norm}.weight", (spec.hidden_size,))
    norm = RmsNorm(norm_weight, spec.norm_epsilon, spec.norm_offset)
    head = spec.names.head
    if not spec.tied_embeddings or weights.has(f"{head}.weight"):
        shape = (spec.vocab_size, spec.hidden_size)
        return OutputHead(norm, read_matrix(weights, spec.quantization, head, shape), kernels)
    table = _load_embedding(spec, weights) if embedding is None else embedding
    quantization = spec.quantization
    scheme = quantization.scheme_of(head) if quantization is not None else None
    if quantization is None or scheme is None:
        return OutputHead(norm, table, kernels)
    if quantization.layout_of(head) is not Layout.SIXTEEN_BITS:
        return OutputHead(norm, table, kernels)
    matrix = round_matrix(weights, f"{head}.weight", table, scheme)
    if embedding is None:
        del weights.loaded[f"{spec.names.embedding}.weight"]  # which is not kept
    return OutputHead(norm, matrix, kernels)
