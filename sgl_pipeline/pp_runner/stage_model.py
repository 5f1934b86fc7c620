"""A stage's share of the model: its layers, the embedding on the first, the head on the last.

Loaded and run by the stage worker. Never schedules, samples or sends, and keeps no state of a
step: two stage models can live in one process.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.attention.backend import AttentionBackend
from sgl_pipeline.pp_runner.checkpoint import WeightSource, open_weights
from sgl_pipeline.pp_runner.decoder import DecoderLayer
from sgl_pipeline.pp_runner.kv_pool import KvPool
from sgl_pipeline.pp_runner.layer_kernels.backend import LayerKernels, RmsNorm
from sgl_pipeline.pp_runner.model_spec import ModelSpec
from sgl_pipeline.pp_runner.rotary import RotaryEmbedding
from sgl_pipeline.pp_runner.step_inputs import StepInputs


class OutputHead:
    """The final norm and lm_head, for the rows whose logits are wanted only."""

    def __init__(self, norm: RmsNorm, weight: torch.Tensor, kernels: LayerKernels) -> None:
        self._norm = norm
        self._linear = kernels.linear(weight)
        self._kernels = kernels

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] in fp32 of the residual stream's `rows` [S, H]; S may be 0."""
        return self._linear(self._kernels.norm(rows, self._norm)).float()


class StageModel:
    """The weights of one stage. `layers` holds its decoder layers by model-wide id, in order.

    Use `StageModel.load`. `loaded` maps the names of the tensors that were read to their bytes.
    """

    def __init__(
        self,
        layers: dict[int, DecoderLayer],
        rotary: RotaryEmbedding,
        embedding: torch.Tensor | None,
        head: OutputHead | None,
        loaded: dict[str, int],
        hidden_size: int,
    ) -> None:
        self.layers = layers
        self.hidden_size = hidden_size
        self.loaded = loaded
        self._rotary = rotary
        self._embedding = embedding
        self._head = head

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        path: str | Path,
        *,
        layers: Iterable[int],
        is_first: bool,
        is_last: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LayerKernels,
        load_format: str = "safetensors",
    ) -> "StageModel":
        """Reads the tensors of `layers`, and of embedding or head where the stage has them.

        Raises CheckpointError that names file and tensor when one does not fit the spec.
        """
        weights = open_weights(path, load_format, dtype, device)
        return cls.build(
            spec,
            weights,
            device=device,
            kernels=kernels,
            layers=layers,
            is_first=is_first,
            is_last=is_last,
        )

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        weights: WeightSource,
        *,
        device: torch.device,
        kernels: LayerKernels,
        layers: Iterable[int],
        is_first: bool,
        is_last: bool,
    ) -> "StageModel":
        """The same from any source of weights, which lie on `device`."""
        with torch.inference_mode():
            decoder_layers = {
                layer: DecoderLayer(spec, layer, weights, kernels) for layer in layers
            }
            embedding = _load_embedding(spec, weights) if is_first else None
            head = _load_head(spec, weights, embedding, kernels) if is_last else None
            rotary = RotaryEmbedding(spec.rope, spec.head_dim, device)
        return cls(decoder_layers, rotary, embedding, head, weights.loaded, spec.hidden_size)

    @property
    def is_first(self) -> bool:
        """Whether the stage begins with token ids."""
        return self._embedding is not None

    @property
    def has_experts(self) -> bool:
        """Whether any of the stage's layers is a mixture of experts."""
        return any(layer.has_experts for layer in self.layers.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors that were read."""
        return sum(self.loaded.values())

    @torch.inference_mode()
    def forward(
        self,
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        kv_pool: KvPool,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Runs the stage's layers on one step, for which `attention.plan` was called before.

        Args:
            hidden: the residual stream [T, H] from the stage before, in the model's dtype; None on
                the first stage. Not written to: it may be a buffer of a graph or of a link.

        Returns the residual stream [T, H]: for the next stage, or on the last one for `logits`.
        """
        is_ours = self._embedding is not None  # so that a layer may write over it
        if self._embedding is not None:
            hidden = F.embedding(inputs.token_ids, self._embedding)
        assert hidden is not None, "a stage after the first needs the residual stream"
        rotation = self._rotary.at(inputs.positions)
        for layer in self.layers.values():
            hidden = layer.forward(hidden, rotation, inputs.slots, kv_pool, attention, is_ours)
            is_ours = True
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in fp32 of N rows [N, H] of the residual stream; on the last stage only."""
        assert self._head is not None, "only the last stage has the head"
        return self._head(hidden)


def _load_embedding(spec: ModelSpec, weights: WeightSource) -> torch.Tensor:
    return weights.read(f"{spec.names.embedding}.weight", (spec.vocab_size, spec.hidden_size))


def _load_head(
    spec: ModelSpec,
    weights: WeightSource,
    embedding: torch.Tensor | None,
    kernels: LayerKernels,
) -> OutputHead:
    """The head; where it is tied and not in the file, its matrix is the embedding table."""
    norm_weight = weights.read(f"{spec.names.final_norm}.weight", (spec.hidden_size,))
    norm = RmsNorm(norm_weight, spec.norm_epsilon)
    head = f"{spec.names.head}.weight"
    if not spec.tied_embeddings or weights.has(head):
        matrix = weights.read(head, (spec.vocab_size, spec.hidden_size))
    else:
        matrix = _load_embedding(spec, weights) if embedding is None else embedding
    return OutputHead(norm, matrix, kernels)
